/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's table in a file, as kvlm --bicache-table reads it. Only the ratios at which the depth
 * grows are written, because the table is a step function.
 */

#include <errno.h>
#include <jansson.h>
#include <stdbool.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvctl/profile.h"

static const char *const defs[] = {NULL, "INCLUDE_GEN", "PROMPT_ONLY"};

void profile_write(const struct profile *p, FILE *to) {
        uint8_t last = 0;
        bool first = true;

        fprintf(to, "{\"def\": \"%s\", \"entries\": [", defs[p->def]);
        for (unsigned r = 0; r < PROFILE_RATIOS; r++) {
                if (p->depth[r] == last)
                        continue;
                fprintf(to, "%s[%u, %u]", first ? "" : ", ", r, p->depth[r]);
                last = p->depth[r];
                first = false;
        }
        fputs("]}\n", to);
}

/* [r, b]: r is above the previous one, b not below it. */
static bool take_entry(const json_t *entry, json_int_t *r, json_int_t *b) {
        const json_t *first = json_array_get(entry, 0), *second = json_array_get(entry, 1);
        json_int_t last_r = *r, last_b = *b;

        if (json_array_size(entry) != 2 || !json_is_integer(first) || !json_is_integer(second))
                return false;
        *r = json_integer_value(first);
        *b = json_integer_value(second);
        return *r > last_r && *r < PROFILE_RATIOS && *b >= last_b && *b <= UINT8_MAX;
}

static int take_entries(const json_t *entries, uint8_t depth[PROFILE_RATIOS]) {
        json_int_t r = -1, b = 0;
        json_t *entry;
        size_t i;

        memset(depth, 0, PROFILE_RATIOS);
        json_array_foreach(entries, i, entry) {
                if (!take_entry(entry, &r, &b))
                        return -EINVAL;
                memset(depth + r, (int)b, PROFILE_RATIOS - (size_t)r);
        }
        return json_array_size(entries) ? 0 : -EINVAL;
}

static uint32_t find_def(const char *name) {
        uint32_t def = ARRAY_SIZE(defs);

        while (--def && (!name || strcmp(name, defs[def]) != 0))
                ;
        return def;
}

int profile_read(const char *text, uint8_t depth[PROFILE_RATIOS], uint32_t *def) {
        json_t *table = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
        int r = -EINVAL;

        *def = find_def(json_string_value(json_object_get(table, "def")));
        if (*def)
                r = take_entries(json_object_get(table, "entries"), depth);
        json_decref(table);
        return r;
}
