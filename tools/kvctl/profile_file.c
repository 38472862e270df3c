/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of depths in a file, for kvctl and kvlm. Only the ratios at which the depth grows are
 * written, because the table is a step function.
 */

#include "tools/kvctl/profile.h"

#include <errno.h>
#include <jansson.h>
#include <string.h>

#include "ipc/base/util.h"

static const char *const defs[] = {NULL, "INCLUDE_GEN", "PROMPT_ONLY"};

char *profile_line(const uint8_t depth[PROFILE_RATIOS], uint32_t def) {
        json_auto_t *table = json_pack("{s:s, s:[]}", "def", defs[def], "entries");
        json_t *entries = json_object_get(table, "entries");
        unsigned last = 0;

        for (unsigned r = 0; r < PROFILE_RATIOS; r++) {
                if (depth[r] != last &&
                    json_array_append_new(entries, json_pack("[i, i]", r, depth[r])) < 0)
                        return NULL;
                last = depth[r];
        }
        return json_dumps(table, 0);
}

/* Below the first entry, one layer is reused, because it does not depend on other tokens. */
static bool read_entries(json_t *entries, uint8_t depth[PROFILE_RATIOS]) {
        json_int_t r, b, last = -1, deepest = 1;
        json_t *entry;
        size_t i;

        memset(depth, 1, PROFILE_RATIOS);
        json_array_foreach(entries, i, entry) {
                if (json_unpack(entry, "[II!]", &r, &b) < 0 || r <= last || r >= PROFILE_RATIOS ||
                    b < deepest || b > UINT8_MAX)
                        return false;
                memset(depth + r, (int)b, PROFILE_RATIOS - (size_t)r);
                last = r;
                deepest = b;
        }
        return json_is_array(entries);
}

int profile_read(const char *path, uint8_t depth[PROFILE_RATIOS], uint32_t *def,
                 struct kvd_why *why) {
        json_error_t error;
        json_auto_t *table = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
        const char *name = json_string_value(json_object_get(table, "def"));

        if (!table)
                return kvd_refuse(why, -EINVAL, "table %s: %s", path, error.text);
        for (*def = ARRAY_SIZE(defs) - 1; *def && (!name || strcmp(name, defs[*def]) != 0);)
                --*def;
        if (*def && read_entries(json_object_get(table, "entries"), depth))
                return 0;
        return kvd_refuse(why, -EINVAL,
                          "%s is not a table such as {\"def\": \"INCLUDE_GEN\", \"entries\": "
                          "[[0, 1], [60, 3]]} with ratios and depths that rise",
                          path);
}
