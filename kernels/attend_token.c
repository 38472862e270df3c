/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention of one token, as in decoding: its query heads go over the keys once and over the values
 * once, and neither is copied. Rows are named some hundred at a time, so that it does not matter
 * where they lie.
 */

#include <string.h>

#include "ipc/base/util.h"
#include "kernels/attend_inner.h"
#include "kernels/attend_rows.h"

enum { NAMED = 512, AHEAD = 64 };

/* Where things lie in the scratch memory, in floats. */
struct scratch {
        size_t scores; /* a row of ld columns for each query head */
        size_t sum, total, rotated, stage, end;
        size_t ld;
};

/* Rows of neighbouring columns, of which n are to be used and the others will be. */
struct named {
        const uint8_t *rows[NAMED];
        uint32_t column, n, there;
        uint32_t rotation;
};

static struct scratch lay_out(const struct kvd_attention *a) {
        struct scratch s = {.ld = a->chosen ? a->n_chosen : kvd_attend_keys(a)};

        s.sum = a->group * s.ld;
        s.total = s.sum + a->group * kvd_attend_sum(a->dim);
        s.rotated = s.total + a->group;
        s.stage = s.rotated + (a->rotation ? (size_t)a->group * a->dim : 0);
        s.end = s.stage + kvd_attend_stage(a->dim) / sizeof(float);
        return s;
}

size_t kvd_attend_token_scratch(const struct kvd_attention *a) {
        return lay_out(a).end;
}

/* ---- naming rows ---- */

/* Names what is left of a stretch, as far as there is room; the stretch is then the rest. */
static void name_stretch(const struct kvd_attention *a, struct named *to, struct kvd_stretch *r,
                         size_t offset) {
        size_t step = a->stride * (a->type == KVD_NUMBER_F32 ? sizeof(float) : sizeof(uint16_t));
        const uint8_t *row = a->blocks[r->block] + offset +
                             (r->position - r->block * a->block_tokens) * step;
        uint32_t n = MIN(r->n, NAMED - to->there);

        for (uint32_t i = 0; i < n; i++)
                to->rows[to->there + i] = row + i * step;
        to->there += n;
        r->position += n;
        r->column += n;
        r->n -= n;
}

/*
 * The next rows: all of them want their queries rotated alike. From column, n, there and r = 0 on;
 * false at the end.
 */
static bool name_rows(const struct kvd_attention *a, struct named *to, struct kvd_stretch *r,
                      size_t offset) {
        to->column += to->n;
        to->there -= to->n;
        memmove(to->rows, to->rows + to->n, to->there * sizeof *to->rows);
        while (to->there < NAMED && (r->n > 0 || kvd_attend_next(a, r))) {
                uint32_t rotation = a->rotation ? a->rotation[r->block] : 0;

                if (to->there > 0 && rotation != to->rotation)
                        break;
                to->rotation = rotation;
                name_stretch(a, to, r, offset);
        }
        to->n = to->there < NAMED ? to->there : NAMED - AHEAD;
        return to->n > 0;
}

/* ---- the three passes: keys, scores, values ---- */

static uint32_t score(const struct kvd_attention *a, const struct scratch *s) {
        struct named keys;
        struct kvd_stretch r = {0};
        uint32_t ready = 0;

        keys.column = keys.n = keys.there = 0;
        while (name_rows(a, &keys, &r, a->k_offset)) {
                if (keys.rotation && keys.rotation != ready)
                        kvd_attend_rotate(a, a->scratch + s->rotated, a->q, keys.rotation,
                                          a->group);
                ready = keys.rotation ? keys.rotation : ready;
                a->ops->attend->scores(a->scratch + s->scores + keys.column, s->ld, keys.rows,
                                       keys.n, keys.there, a->type,
                                       keys.rotation ? a->scratch + s->rotated : a->q, a->group,
                                       a->dim, a->scratch + s->stage);
        }
        return keys.column;
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

static void mix(const struct kvd_attention *a, const struct scratch *s) {
        struct named values;
        struct kvd_stretch r = {0};
        float *sum = a->scratch + s->sum;

        memset(sum, 0, a->group * kvd_attend_sum(a->dim) * sizeof *sum);
        values.column = values.n = values.there = 0;
        while (name_rows(a, &values, &r, a->v_offset))
                a->ops->attend->mix(sum, a->scratch + s->scores + values.column, s->ld, values.rows,
                                    values.n, values.there, a->type, a->group, a->dim);
}

void kvd_attend_token(const struct kvd_attention *a) {
        const struct scratch s = lay_out(a);

        weigh(a, &s, score(a, &s));
        mix(a, &s);
        a->ops->attend->finish(a->out, a->scratch + s.sum, a->scratch + s.total, a->type, a->group,
                               a->dim);
}
