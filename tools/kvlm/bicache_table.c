/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/bicache_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/file.h"
#include "tools/kvlm/json.h"
#include "tools/kvlm/note.h"

static int read_step(const struct json *j, uint32_t node, uint32_t layers, struct bicache_step *ret) {
        uint32_t ratio = node + 1, depth = ratio < j->n_nodes ? j->nodes[ratio].next : 0;
        uint64_t r, b;

        if (j->nodes[node].type != JSON_ARRAY || ratio >= j->nodes[node].next || depth >= j->nodes[node].next ||
            j->nodes[depth].next != j->nodes[node].next || json_u64(j, ratio, &r) < 0 || json_u64(j, depth, &b) < 0)
                return note(-EINVAL, "an entry is not a pair of numbers");
        if (r > 100 || b < 1 || b > layers)
                return note(-EINVAL, "an entry is not a percentage and a depth from 1 to %u", layers);
        *ret = (struct bicache_step){(uint8_t)r, (uint16_t)b};
        return 0;
}

static int read_steps(const struct json *j, uint32_t entries, uint32_t layers, struct bicache_table *t) {
        for (uint32_t node = entries + 1; node < j->nodes[entries].next; node = j->nodes[node].next) {
                int r = t->n < BICACHE_ENTRIES ? read_step(j, node, layers, t->steps + t->n) : -EINVAL;

                if (r < 0 || (t->n > 0 && t->steps[t->n].ratio <= t->steps[t->n - 1].ratio))
                        return r < 0 ? r : note(-EINVAL, "ratios do not ascend");
                t->n++;
        }
        return 0;
}

static int read_table(const struct json *j, uint32_t layers, struct bicache_table *t) {
        uint32_t def = json_find(j, 0, "def"), entries = json_find(j, 0, "entries");

        t->include_gen = def && json_is(j, def, "INCLUDE_GEN");
        if (!t->include_gen && !(def && json_is(j, def, "PROMPT_ONLY")))
                return note(-EINVAL, "\"def\" is neither INCLUDE_GEN nor PROMPT_ONLY");
        if (!entries || j->nodes[entries].type != JSON_ARRAY)
                return note(-EINVAL, "there is no array \"entries\"");
        return read_steps(j, entries, layers, t);
}

int bicache_table_read(const char *path, uint32_t layers, struct bicache_table *ret) {
        _cleanup_(freep) char *text = NULL;
        struct bicache_table t = {0};
        struct json j = {0};
        size_t size;
        int r = read_file(path, &text, &size);

        if (r < 0)
                return r;
        r = json_parse(text, size, &j);
        if (r < 0 || j.nodes[0].type != JSON_OBJECT)
                r = note(-EINVAL, "it is not a JSON object");
        else
                r = read_table(&j, layers, &t);
        json_release(&j);
        if (r < 0) {
                _cleanup_(freep) char *why = strdup(note_line());

                return note(r, "table %s: %s", path, why ? why : "");
        }
        *ret = t;
        return 0;
}

uint32_t bicache_table_depth(const struct bicache_table *t, uint32_t ratio) {
        uint32_t depth = 1;

        for (uint32_t i = 0; i < t->n && t->steps[i].ratio <= ratio; i++)
                depth = t->steps[i].depth;
        return depth;
}

uint32_t bicache_table_deepest(const struct bicache_table *t) {
        uint32_t depth = 1;

        for (uint32_t i = 0; i < t->n; i++)
                depth = MAX(depth, t->steps[i].depth);
        return depth;
}

uint32_t bicache_ratio(uint32_t part, uint32_t whole) {
        uint64_t hundredfold = UINT64_C(100) * part, floor = hundredfold / whole, rest = hundredfold % whole;

        if (2 * rest > whole || (2 * rest == whole && floor % 2 == 1))
                floor++;
        return (uint32_t)floor;
}
