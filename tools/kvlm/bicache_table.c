/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/bicache_table.h"

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/file.h"
#include "tools/kvlm/json.h"
#include "tools/kvlm/note.h"

static int read_step(const struct json *j, uint32_t node, uint32_t layers, struct kvd_bstep *ret) {
        uint32_t percent = node + 1, depth = percent < j->n_nodes ? j->nodes[percent].next : 0;
        uint64_t r, b;

        if (j->nodes[node].type != JSON_ARRAY || percent >= j->nodes[node].next || depth >= j->nodes[node].next ||
            j->nodes[depth].next != j->nodes[node].next || json_u64(j, percent, &r) < 0 || json_u64(j, depth, &b) < 0)
                return note(-EINVAL, "an entry is not a pair of numbers");
        if (r > 100 || b < 1 || b > layers)
                return note(-EINVAL, "an entry is not a percentage and a number of layers from 1 to %u", layers);
        *ret = (struct kvd_bstep){(uint8_t)r, (uint16_t)b};
        return 0;
}

static int read_steps(const struct json *j, uint32_t entries, uint32_t layers, struct kvd_btable *t) {
        for (uint32_t node = entries + 1; node < j->nodes[entries].next; node = j->nodes[node].next, t->n++) {
                struct kvd_bstep step;
                int r = read_step(j, node, layers, &step);

                if (r < 0)
                        return r;
                if (t->n > 0 && (step.percent <= t->steps[t->n - 1].percent || step.b < t->steps[t->n - 1].b))
                        return note(-EINVAL, "percentages do not ascend, or layers fall");
                t->steps[t->n] = step; /* at most one for each percentage */
        }
        return 0;
}

static int read_table(const struct json *j, uint32_t layers, struct kvd_btable *t) {
        uint32_t def = json_find(j, 0, "def"), entries = json_find(j, 0, "entries");

        if (def && json_is(j, def, "INCLUDE_GEN"))
                t->ratio = KVD_RATIO_INCLUDE_GEN;
        else if (def && json_is(j, def, "PROMPT_ONLY"))
                t->ratio = KVD_RATIO_PROMPT_ONLY;
        else
                return note(-EINVAL, "\"def\" is neither INCLUDE_GEN nor PROMPT_ONLY");
        if (!entries || j->nodes[entries].type != JSON_ARRAY)
                return note(-EINVAL, "there is no array \"entries\"");
        return read_steps(j, entries, layers, t);
}

int bicache_table_read(const char *path, uint32_t layers, struct kvd_btable *ret) {
        _cleanup_(freep) char *text = NULL;
        struct kvd_btable t = {0};
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

uint32_t bicache_table_deepest(const struct kvd_btable *t) {
        return t->n > 0 ? t->steps[t->n - 1].b : 1;
}
