/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention in rounds. If queries need more blocks than may stay in the pool, some come after others
 * have left. Each round is attention over the blocks that came for it. A result is the mean of the
 * rounds' results, by the weights of what they saw.
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "client/internal.h"
#include "client/methods/attend.h"
#include "client/methods/reader.h"
#include "ipc/base/sys.h"

struct rounds {
        bool *seen; /* [max_blocks] entries of earlier rounds */
        float *weight,
                *new_weight; /* [kv_heads][READER_PIECE][group] of earlier rounds, and this */
        float *out;          /* [READER_PIECE][heads][head_dim] of this round */
};

int rounds_new(struct kvd_reader *p) {
        size_t heads = (size_t)p->group * p->geometry->kv_heads * READER_PIECE;
        struct rounds *r = sys->calloc(1, sizeof *r);

        p->rounds = r;
        if (!r)
                return -ENOMEM;
        r->seen = sys->calloc(p->max_blocks, sizeof *r->seen);
        r->weight = sys->calloc(2 * heads, sizeof *r->weight);
        r->new_weight = r->weight + heads;
        r->out = sys->calloc(heads * p->geometry->head_dim, sizeof *r->out);
        return r->seen && r->weight && r->out ? 0 : -ENOMEM;
}

void rounds_free(struct kvd_reader *p) {
        if (!p->rounds)
                return;
        free(p->rounds->seen);
        free(p->rounds->weight);
        free(p->rounds->out);
        free(p->rounds);
        p->rounds = NULL;
}

/* Takes a query head's result of this round into the result of all. */
static void merge_head(float *out, float *weight, const float *new_out, float new_weight,
                       uint32_t dim) {
        float largest = fmaxf(*weight, new_weight), before, now, sum;

        if (new_weight == -INFINITY)
                return;
        before = expf(*weight - largest);
        now = expf(new_weight - largest);
        sum = before + now;
        for (uint32_t d = 0; d < dim; d++)
                out[d] = (before * out[d] + now * new_out[d]) / sum;
        *weight = largest + logf(sum);
}

static void merge(const struct kvd_reader *p, float *out, size_t ldo, uint32_t n) {
        uint32_t group = p->group, dim = p->geometry->head_dim;
        size_t width = (size_t)group * p->geometry->kv_heads * dim;
        const struct rounds *r = p->rounds;

        for (uint32_t h = 0; h < p->geometry->kv_heads; h++)
                for (uint32_t t = 0; t < n; t++)
                        for (uint32_t g = 0; g < group; g++) {
                                size_t at = ((size_t)h * n + t) * group + g,
                                       head = ((size_t)h * group + g) * dim;

                                merge_head(out + t * ldo + head, r->weight + at,
                                           r->out + t * width + head, r->new_weight[at], dim);
                        }
}

int rounds_attend(struct kvd_reader *p, uint32_t layer, const struct kvd_table *table,
                  const struct kvd_heads *heads, const float *q, size_t ldq, float *out,
                  size_t ldo) {
        size_t width = (size_t)heads->heads * p->geometry->head_dim;
        struct rounds *r = p->rounds;
        struct attend_part part = {.behind = true, .weight = r->weight};
        struct kvd_heads later = *heads;
        struct kvd_seen seen;
        int e;

        reader_seen(p, layer, &seen);
        e = attend_sequence(&seen, layer, table, heads, &part, q, ldq, out, ldo);
        later.sinks = NULL; /* they were in the first round */
        seen.mass = NULL;
        part = (struct attend_part){.without = r->seen, .weight = r->new_weight};
        memset(r->seen, 0, p->max_blocks * sizeof *r->seen);
        while (e == 0 && (e = residency_fetch_more(p, r->seen)) > 0) {
                e = attend_sequence(&seen, layer, table, &later, &part, q, ldq, r->out, width);
                if (e == 0)
                        merge(p, out, ldo, table->n);
        }
        return e;
}
