/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention of many tokens; that of one is in attend_token.c and gives the same bits. Keys are
 * packed into panels first, once for all queries of the call: a score is then one lane of a matrix
 * product, the chain over the head's dimensions, and the scores of one query lie at their columns.
 * Softmax and the weighted sum of values go over them by column. Queries are done in tiles of a few
 * rows to reuse what is loaded; the last tokens of a tile see more columns than the first, and
 * those are added row by row.
 *
 * Because the weights of a row all exist before they are used, the mass of a block is a sum over
 * its columns; there is no need for the partial maxima that a kernel needs which visits blocks
 * separately.
 */

#include "kernels/attend_inner.h"

#include <string.h>

#include "ipc/base/util.h"

enum { TILE = 8, SPAN = 4 * KVD_PANEL };

/* Where things lie in the scratch memory, in floats. */
struct scratch {
        size_t keys;     /* packed, by column */
        size_t values;   /* widened or compacted; not where they can be read in place */
        /* a panel of keys, before they are packed; not where keys can be packed from their block */
        size_t stage;
        size_t scores;   /* a tile's rows of padded columns */
        size_t q, sum;   /* a tile's rows of dim */
        size_t total;    /* of each row of a tile; 0 where nothing is seen */
        size_t rotated;   /* a tile's rows of dim, rotated; then of scores of a span */
        size_t visible;  /* uint32_t per token of the call: columns that it sees */
        size_t end;
        size_t ld;       /* padded columns */
        bool in_place;
};

/* ---- what is seen ---- */

/* How many columns each token sees. */
static void count_visible(const struct kvd_attention *a, uint32_t *visible) {
        struct kvd_stretch r = {0};
        uint32_t t = 0;

        while (kvd_attend_next(a, &r)) {
                if (a->n_keys)
                        continue;
                for (; t < a->n && a->first + t < r.position; t++)
                        visible[t] = r.column;
                for (; t < a->n && a->first + t < r.position + r.n; t++)
                        visible[t] = r.column + (a->first + t - r.position) + 1;
        }
        for (; t < a->n; t++)
                visible[t] = r.column;
}

/* ---- scratch ---- */

static bool all_resident(const struct kvd_attention *a) {
        for (uint32_t b = 0; b < DIV_UP(kvd_attend_keys(a), a->block_tokens); b++)
                if (!a->blocks[b])
                        return false;
        return true;
}

static uint32_t tile_tokens(const struct kvd_attention *a) {
        return MAX(1, TILE / a->group);
}

static struct scratch lay_out(const struct kvd_attention *a) {
        size_t rows = (size_t)tile_tokens(a) * a->group,
               n = a->chosen ? a->n_chosen : kvd_attend_keys(a);
        struct scratch s = {.ld = ALIGN_UP(n, KVD_PANEL)};

        s.in_place = a->type == KVD_NUMBER_F32 && !a->chosen && all_resident(a);
        s.values = s.ld * a->dim;
        s.stage = s.values + (s.in_place ? 0 : s.ld * a->dim);
        s.scores = s.stage + (s.in_place ? 0 : (size_t)KVD_PANEL * a->dim);
        s.q = s.scores + rows * s.ld;
        s.sum = s.q + rows * a->dim;
        s.total = s.sum + rows * a->dim;
        s.rotated = s.total + rows;
        s.visible = s.rotated + (a->rotation ? rows * (a->dim + SPAN) : 0);
        s.end = s.visible + a->n;
        return s;
}

/* A call of many tokens may be made of calls of one. */
size_t kvd_attend_scratch(const struct kvd_attention *a) {
        struct kvd_attention last = *a;
        size_t token;

        last.first = kvd_attend_keys(a) - 1;
        last.n = 1;
        token = kvd_attend_token_scratch(&last);
        return a->n <= 1 ? token : MAX(token, lay_out(a).end);
}

/* ---- keys and values ---- */

static void fetch(const struct kvd_attention *a, float *to, const uint8_t *head, uint32_t slot,
                  uint32_t n) {
        const float *wide = (const float *)head + slot * a->stride;
        const uint16_t *narrow = (const uint16_t *)head + slot * a->stride;

        for (uint32_t i = 0; i < n; i++, to += a->dim)
                if (a->type == KVD_NUMBER_F32)
                        memcpy(to, wide + i * a->stride, a->dim * sizeof *to);
                else
                        a->ops->widen(to, narrow + i * a->stride, a->dim, a->type);
}

/* Keys are staged by panels: whole panels are packed faster than single rows. */
static void stage_stretch(const struct kvd_attention *a, const struct scratch *s,
                          const struct kvd_stretch *r) {
        const uint8_t *block = a->blocks[r->block];
        float *stage = a->scratch + s->stage;
        uint32_t slot = r->position - r->block * a->block_tokens;

        fetch(a, a->scratch + s->values + (size_t)r->column * a->dim, block + a->v_offset, slot,
              r->n);
        for (uint32_t i = 0, n; i < r->n; i += n) {
                uint32_t lane = (r->column + i) % KVD_PANEL;

                n = MIN(r->n - i, KVD_PANEL - lane);
                fetch(a, stage + (size_t)lane * a->dim, block + a->k_offset, slot + i, n);
                if (lane + n == KVD_PANEL)
                        a->ops->pack(a->scratch + s->keys, r->column + i - lane, stage, a->dim,
                                     KVD_PANEL, a->dim);
        }
}

static void gather(const struct kvd_attention *a, const struct scratch *s) {
        float *keys = a->scratch + s->keys;
        struct kvd_stretch r = {0};
        uint32_t left;

        while (kvd_attend_next(a, &r))
                if (s->in_place)
                        a->ops->pack(keys, r.column,
                                     (const float *)(a->blocks[r.block] + a->k_offset), a->stride,
                                     r.n, a->dim);
                else
                        stage_stretch(a, s, &r);
        left = r.column % KVD_PANEL;
        if (!s->in_place && left > 0)
                a->ops->pack(keys, r.column - left, a->scratch + s->stage, a->dim, left, a->dim);
}

/* ---- rotated queries ---- */

/*
 * The scores of columns [from, to) again, with rotated queries; at most a span at a time, from a
 * panel's start.
 */
static void rescore(const struct kvd_attention *a, const struct scratch *s, uint32_t from,
                    uint32_t to, uint32_t rows) {
        const float *rotated = a->scratch + s->rotated;
        float *scores = a->scratch + s->scores,
              *span = a->scratch + s->rotated + (size_t)rows * a->dim;

        for (uint32_t end; from < to; from = end) {
                uint32_t start = from / KVD_PANEL * KVD_PANEL;

                end = MIN(to, start + SPAN);
                a->ops->matmul(span, SPAN, rotated, a->dim, rows,
                               a->scratch + s->keys + (size_t)start * a->dim, a->dim, end - start);
                for (uint32_t r = 0; r < rows; r++)
                        memcpy(scores + r * s->ld + from, span + (size_t)r * SPAN + (from - start),
                               (end - from) * sizeof *span);
        }
}

static void turn_scores(const struct kvd_attention *a, const struct scratch *s, uint32_t rows,
                        uint32_t n_columns) {
        uint32_t ready = 0, rotation, from, to;
        struct kvd_stretch r = {0};
        bool more = kvd_attend_next(a, &r);

        while (more && r.column < n_columns) {
                rotation = a->rotation[r.block];
                from = r.column;
                do {
                        to = r.column + r.n;
                        more = kvd_attend_next(a, &r);
                } while (more && a->rotation[r.block] == rotation);
                if (rotation == 0)
                        continue;
                if (rotation != ready)
                        kvd_attend_rotate(a, a->scratch + s->rotated, a->scratch + s->q, rotation,
                                          rows);
                ready = rotation;
                rescore(a, s, from, MIN(to, n_columns), rows);
        }
}

/* ---- tiles ---- */

/*
 * Weights of tokens [token, token + n) of the call: e^(score - the row's largest), and their
 * totals.
 */
static void weigh(const struct kvd_attention *a, const struct scratch *s, uint32_t token,
                  uint32_t n) {
        float *scores = a->scratch + s->scores, *q = a->scratch + s->q,
              *total = a->scratch + s->total;
        const uint32_t *visible = (const uint32_t *)(a->scratch + s->visible) + token;
        uint32_t rows = n * a->group, width = a->group * a->dim;

        for (uint32_t i = 0; i < n; i++)
                memcpy(q + (size_t)i * width, a->q + (token + i) * a->ldq, width * sizeof *q);
        a->ops->matmul(scores, s->ld, q, a->dim, rows, a->scratch + s->keys, a->dim,
                       visible[n - 1]);
        if (a->rotation)
                turn_scores(a, s, rows, visible[n - 1]);
        for (uint32_t r = 0; r < rows; r++) {
                uint32_t seen = visible[r / a->group];

                total[r] = seen == 0 ? 0.0f : a->ops->softmax(scores + r * s->ld, seen, a->scale);
                if ((a->block_mass || a->token_mass) && seen > 0)
                        kvd_attend_mass(a, scores + r * s->ld, total[r], seen);
        }
}

/* The weighted sums; not yet divided by the totals. */
static void mix(const struct kvd_attention *a, const struct scratch *s,
                const struct kvd_rows *values, uint32_t token, uint32_t n) {
        const uint32_t *visible = (const uint32_t *)(a->scratch + s->visible) + token;
        float *scores = a->scratch + s->scores, *sum = a->scratch + s->sum;
        uint32_t rows = n * a->group;

        memset(sum, 0, (size_t)rows * a->dim * sizeof *sum);
        a->ops->mix(sum, a->dim, scores, s->ld, rows, values, 0, visible[0]);
        for (uint32_t r = a->group; r < rows; r++)
                a->ops->mix(sum + (size_t)r * a->dim, a->dim, scores + r * s->ld, s->ld, 1, values,
                            visible[0], visible[r / a->group]);
}

static void deliver(const struct kvd_attention *a, const struct scratch *s, uint32_t token,
                    uint32_t n) {
        const float *sum = a->scratch + s->sum, *total = a->scratch + s->total;

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t g = 0; g < a->group; g++, sum += a->dim, total++)
                        for (uint32_t d = 0; d < a->dim; d++)
                                a->out[(token + i) * a->ldo + g * a->dim + d] =
                                        *total == 0.0f ? 0.0f : sum[d] / *total;
}

static void attend_packed(const struct kvd_attention *a) {
        const struct scratch s = lay_out(a);
        const uint8_t *compacted = (const uint8_t *)(a->scratch + s.values);
        struct kvd_rows values = {a->blocks, a->v_offset, a->stride, a->block_tokens, a->dim};

        if (!s.in_place)
                values = (struct kvd_rows){&compacted, 0, a->dim, UINT32_MAX, a->dim};
        gather(a, &s);
        count_visible(a, (uint32_t *)(a->scratch + s.visible));
        for (uint32_t t = 0, n; t < a->n; t += n) {
                n = MIN(tile_tokens(a), a->n - t);
                weigh(a, &s, t, n);
                mix(a, &s, &values, t, n);
                deliver(a, &s, t, n);
        }
}

void kvd_attend(const struct kvd_attention *a) {
        if (a->n == 1)
                kvd_attend_token(a);
        else
                attend_packed(a);
}
