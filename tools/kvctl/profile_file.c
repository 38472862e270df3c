/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's table in a file, as kvlm --bicache-table reads it. Only the shares at which the depth
 * grows are written, because the table is a step function.
 */

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvctl/profile.h"

static const char *const defs[] = {NULL, "INCLUDE_GEN", "PROMPT_ONLY"};

/* Only where the depth grows: a step function. */
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

static const char *skip_blanks(const char *at) {
        while (isspace((unsigned char)*at))
                at++;
        return at;
}

/* A number, and the character that must follow it. NULL: neither. */
static const char *take_number(const char *at, char after, unsigned long most, unsigned long *ret) {
        char *end;

        at = skip_blanks(at);
        if (!isdigit((unsigned char)*at))
                return NULL;
        *ret = strtoul(at, &end, 10);
        at = skip_blanks(end);
        return *ret <= most && *at == after ? at + 1 : NULL;
}

/* [r, b], r above the one before. */
static const char *take_entry(const char *at, unsigned long *r, unsigned long *b) {
        at = take_number(at, ',', PROFILE_RATIOS - 1, r);
        return at ? take_number(at, ']', UINT8_MAX, b) : NULL;
}

static uint32_t find_def(const char *text) {
        return strstr(text, "\"INCLUDE_GEN\"") ? 1 : strstr(text, "\"PROMPT_ONLY\"") ? 2 : 0;
}

int profile_read(const char *text, uint8_t depth[PROFILE_RATIOS], uint32_t *def) {
        const char *at = strstr(text, "\"entries\"");
        unsigned long r, b, last_r = 0, last_b = 0;
        bool any = false;

        *def = find_def(text);
        at = at ? strchr(at, '[') : NULL;
        if (!*def || !at)
                return -EINVAL;
        memset(depth, 0, PROFILE_RATIOS);
        for (at = skip_blanks(at + 1); *at == '['; at = skip_blanks(*at == ',' ? at + 1 : at)) {
                at = take_entry(at + 1, &r, &b);
                if (!at || (any && r <= last_r) || b < last_b)
                        return -EINVAL;
                memset(depth + r, (int)b, PROFILE_RATIOS - r);
                last_r = r;
                last_b = b;
                any = true;
                at = skip_blanks(at);
        }
        return any && *at == ']' ? 0 : -EINVAL;
}
