/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention of one token, as in decoding: its query heads go over the keys once and over the values
 * once, and neither is copied. Rows are named first, so that it does not matter where they lie: a
 * value is as far from its key as its head's values from its keys.
 */

#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend_inner.h"
#include "kernels/attend_rows.h"

/* Where things lie in the scratch memory, in floats. */
struct scratch {
        size_t scores; /* a row of ld columns for each query head */
        size_t sum, total, rotated, stage;
        size_t rows; /* a pointer for each column: its key */
        size_t end;
        size_t ld;
};

static struct scratch lay_out(const struct kvd_attention *a) {
        struct scratch s = {.ld = a->chosen ? a->n_chosen : kvd_attend_keys(a)};
        size_t pointer = sizeof(uint8_t *) / sizeof(float);

        s.sum = a->group * s.ld;
        s.total = s.sum + a->group * kvd_attend_sum(a->dim);
        s.rotated = s.total + a->group;
        s.stage = s.rotated + (a->rotation ? (size_t)a->group * a->dim : 0);
        s.rows = s.stage + kvd_attend_stage(a->dim) / sizeof(float);
        s.end = s.rows + (s.ld + 1) * pointer; /* one more: they are aligned */
        return s;
}

size_t kvd_attend_token_scratch(const struct kvd_attention *a) {
        return lay_out(a).end;
}

static const uint8_t **rows_of(const struct kvd_attention *a, const struct scratch *s) {
        return (const uint8_t **)ALIGN_UP((uintptr_t)(a->scratch + s->rows), sizeof(uint8_t *));
}

/* ---- the three passes: keys, scores, values ---- */

static void name_rows(const struct kvd_attention *a, const uint8_t **rows,
                      const struct kvd_stretch *r) {
        size_t step = a->stride * (a->type == KVD_NUMBER_F32 ? sizeof(float) : sizeof(uint16_t));
        const uint8_t *row = a->blocks[r->block] + a->k_offset +
                             (r->position - r->block * a->block_tokens) * step;

        for (uint32_t i = 0; i < r->n; i++)
                rows[r->column + i] = row + i * step;
}

/* Columns that want their queries rotated alike; ready: how they are. */
static void score_run(const struct kvd_attention *a, const struct scratch *s, uint32_t from,
                      uint32_t to, uint32_t rotation, uint32_t *ready) {
        if (from == to)
                return;
        if (rotation && rotation != *ready) {
                kvd_attend_rotate(a, a->scratch + s->rotated, a->q, rotation, a->group);
                *ready = rotation;
        }
        a->ops->attend->scores(a->scratch + s->scores + from, s->ld, rows_of(a, s) + from,
                               to - from, a->type, rotation ? a->scratch + s->rotated : a->q,
                               a->group, a->dim, a->scratch + s->stage);
}

static uint32_t score(const struct kvd_attention *a, const struct scratch *s) {
        uint32_t from = 0, rotation = 0, ready = 0;
        struct kvd_stretch r = {0};

        while (kvd_attend_next(a, &r)) {
                uint32_t own = a->rotation ? a->rotation[r.block] : 0;

                if (own != rotation) {
                        score_run(a, s, from, r.column, rotation, &ready);
                        from = r.column;
                        rotation = own;
                }
                name_rows(a, rows_of(a, s), &r);
        }
        score_run(a, s, from, r.column, rotation, &ready);
        return r.column;
}

static void weigh(const struct kvd_attention *a, const struct scratch *s, uint32_t seen) {
        float *total = a->scratch + s->total;

        for (uint32_t g = 0; g < a->group; g++) {
                float *p = a->scratch + s->scores + g * s->ld;

                total[g] = seen == 0 ? 0.0f : a->ops->softmax(p, seen, a->scale);
                if ((a->block_mass || a->token_mass) && seen > 0)
                        kvd_attend_mass(a, p, total[g], seen);
        }
}

static void mix(const struct kvd_attention *a, const struct scratch *s, uint32_t seen) {
        float *sum = a->scratch + s->sum;

        memset(sum, 0, a->group * kvd_attend_sum(a->dim) * sizeof *sum);
        a->ops->attend->mix(sum, a->scratch + s->scores, s->ld, rows_of(a, s),
                            (ptrdiff_t)(a->v_offset - a->k_offset), seen, a->type, a->group,
                            a->dim);
}

void kvd_attend_token(const struct kvd_attention *a) {
        const struct scratch s = lay_out(a);

        const uint32_t seen = score(a, &s);

        weigh(a, &s, seen);
        mix(a, &s, seen);
        a->ops->attend->finish(a->out, a->scratch + s.sum, a->scratch + s.total, a->type, a->group,
                               a->dim);
}
