/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads BiCache's table from a JSON file. Each entry is checked separately, so that the message
 * names the reason.
 */

#include "tools/kvlm/bicache_table.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/file.h"
#include "tools/json.h"
#include "tools/kvlm/refuse.h"

static int read_step(const json_t *entry, uint32_t layers, struct kvd_bstep *ret) {
        uint64_t r, b;

        if (json_array_size(entry) != 2 || json_whole(json_array_get(entry, 0), &r) < 0 ||
            json_whole(json_array_get(entry, 1), &b) < 0)
                return refuse(-EINVAL, "an entry is not a pair of numbers");
        if (r > 100 || b < 1 || b > layers)
                return refuse(-EINVAL,
                              "an entry is not a percentage and a number of layers from 1 to %u",
                              layers);
        *ret = (struct kvd_bstep){(uint8_t)r, (uint16_t)b};
        return 0;
}

static int read_steps(const json_t *entries, uint32_t layers, struct kvd_btable *t) {
        const json_t *entry;
        size_t i;

        json_array_foreach(entries, i, entry) {
                struct kvd_bstep step;
                int r = read_step(entry, layers, &step);

                if (r < 0)
                        return r;
                if (t->n > 0 &&
                    (step.percent <= t->steps[t->n - 1].percent || step.b < t->steps[t->n - 1].b))
                        return refuse(-EINVAL, "percentages must ascend, and layers must not decrease");
                t->steps[t->n++] = step; /* at most one per percentage */
        }
        return 0;
}

static int read_table(const json_t *j, uint32_t layers, struct kvd_btable *t) {
        const json_t *def = json_object_get(j, "def"), *entries = json_object_get(j, "entries");

        if (!json_is_object(j))
                return refuse(-EINVAL, "it is not a JSON object");
        if (json_says(def, "INCLUDE_GEN"))
                t->ratio = KVD_RATIO_INCLUDE_GEN;
        else if (json_says(def, "PROMPT_ONLY"))
                t->ratio = KVD_RATIO_PROMPT_ONLY;
        else
                return refuse(-EINVAL, "\"def\" is neither INCLUDE_GEN nor PROMPT_ONLY");
        if (!json_is_array(entries))
                return refuse(-EINVAL, "there is no array \"entries\"");
        return read_steps(entries, layers, t);
}

int bicache_table_read(const char *path, uint32_t layers, struct kvd_btable *ret) {
        _cleanup_(freep) char *text = NULL;
        json_auto_t *j = NULL;
        struct kvd_btable t = {0};
        size_t size;
        int r = read_file(path, &text, &size);

        if (r < 0)
                return r;
        j = json_read(text, size);
        r = read_table(j, layers, &t);
        if (r < 0) {
                _cleanup_(freep) char *why = strdup(refusal());

                return refuse(r, "table %s: %s", path, why ? why : "");
        }
        *ret = t;
        return 0;
}

uint32_t bicache_table_deepest(const struct kvd_btable *t) {
        return t->n > 0 ? t->steps[t->n - 1].b : 1;
}
