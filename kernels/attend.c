/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Keys are packed into panels first, once for all queries of the call: a score is then one lane of a matrix product,
 * the chain over the head's dimensions, and the scores of one query lie at their absolute positions. Softmax and the
 * weighted sum of values go over them by position. Queries are done in tiles of a few rows to reuse what is loaded;
 * the last tokens of a tile see more positions than the first, and those are added row by row.
 */

#include "kernels/attend.h"

#include <string.h>

#include "ipc/base/util.h"

enum { TILE = 8 };

/* Where things lie in the scratch memory, in floats. */
struct scratch {
        size_t keys;     /* packed, positions 0 to n_keys */
        size_t values;   /* widened; 16-bit types only */
        size_t slots;    /* one block's keys, widened; 16-bit types only */
        size_t scores;   /* a tile's rows of n_keys */
        size_t q, sum;   /* a tile's rows of dim */
        size_t total;    /* of each row of a tile */
        size_t end;
};

static uint32_t tile_tokens(const struct kvd_attention *a) {
        return MAX(1, TILE / a->group);
}

static size_t padded_keys(const struct kvd_attention *a) {
        return ALIGN_UP((size_t)a->first + a->n, KVD_PANEL);
}

static struct scratch lay_out(const struct kvd_attention *a) {
        size_t rows = (size_t)tile_tokens(a) * a->group, n_keys = padded_keys(a);
        bool wide = a->type == KVD_NUMBER_F32;
        struct scratch s = {.keys = 0};

        s.values = n_keys * a->dim;
        s.slots = s.values + (wide ? 0 : n_keys * a->dim);
        s.scores = s.slots + (wide ? 0 : (size_t)a->block_tokens * a->dim);
        s.q = s.scores + rows * n_keys;
        s.sum = s.q + rows * a->dim;
        s.total = s.sum + rows * a->dim;
        s.end = s.total + rows;
        return s;
}

size_t kvd_attend_scratch(const struct kvd_attention *a) {
        return lay_out(a).end;
}

static void widen_slots(const struct kvd_attention *a, float *to, const uint8_t *from, uint32_t n) {
        const uint16_t *slots = (const uint16_t *)from;

        for (uint32_t i = 0; i < n; i++)
                a->ops->widen(to + (size_t)i * a->dim, slots + i * a->stride, a->dim, a->type);
}

/* Packs the keys, and widens the values if they need it. */
static void gather(const struct kvd_attention *a, const struct scratch *s) {
        float *keys = a->scratch + s->keys, *values = a->scratch + s->values, *slots = a->scratch + s->slots;
        uint32_t n_keys = a->first + a->n;

        for (uint32_t i = 0; i < n_keys; i += a->block_tokens) {
                const uint8_t *block = a->blocks[i / a->block_tokens];
                uint32_t n = MIN(a->block_tokens, n_keys - i);

                if (a->type == KVD_NUMBER_F32) {
                        a->ops->pack(keys, i, (const float *)(block + a->k_offset), a->stride, n, a->dim);
                        continue;
                }
                widen_slots(a, slots, block + a->k_offset, n);
                a->ops->pack(keys, i, slots, a->dim, n, a->dim);
                widen_slots(a, values + (size_t)i * a->dim, block + a->v_offset, n);
        }
}

/* Scores and weighted sums of tokens [token, token + n) of the call; the sums are not yet divided by the totals. */
static void weigh(const struct kvd_attention *a, const struct scratch *s, const struct kvd_rows *values,
                  uint32_t token, uint32_t n) {
        float *scores = a->scratch + s->scores, *sum = a->scratch + s->sum, *q = a->scratch + s->q;
        uint32_t least = a->first + token + 1, rows = n * a->group, width = a->group * a->dim;
        size_t ld = padded_keys(a);

        for (uint32_t i = 0; i < n; i++)
                memcpy(q + (size_t)i * width, a->q + (token + i) * a->ldq, width * sizeof *q);
        a->ops->matmul(scores, ld, q, a->dim, rows, a->scratch + s->keys, a->dim, least + n - 1);
        for (uint32_t r = 0; r < rows; r++)
                a->scratch[s->total + r] = a->ops->softmax(scores + r * ld, least + r / a->group, a->scale);

        memset(sum, 0, (size_t)n * width * sizeof *sum);
        a->ops->mix(sum, a->dim, scores, ld, rows, values, 0, least);
        for (uint32_t r = a->group; r < rows; r++)
                a->ops->mix(sum + (size_t)r * a->dim, a->dim, scores + r * ld, ld, 1, values, least,
                            least + r / a->group);
}

static void deliver(const struct kvd_attention *a, const struct scratch *s, uint32_t token, uint32_t n) {
        const float *sum = a->scratch + s->sum, *total = a->scratch + s->total;

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t g = 0; g < a->group; g++, sum += a->dim, total++)
                        for (uint32_t d = 0; d < a->dim; d++)
                                a->out[(token + i) * a->ldo + g * a->dim + d] = sum[d] / *total;
}

void kvd_attend(const struct kvd_attention *a) {
        const struct scratch s = lay_out(a);
        const uint8_t *widened = (const uint8_t *)(a->scratch + s.values);
        struct kvd_rows values = {a->blocks, a->v_offset, a->stride, a->block_tokens, a->dim};

        if (a->type != KVD_NUMBER_F32)
                values = (struct kvd_rows){&widened, 0, a->dim, UINT32_MAX, a->dim};
        gather(a, &s);
        for (uint32_t t = 0, n; t < a->n; t += n) {
                n = MIN(tile_tokens(a), a->n - t);
                weigh(a, &s, &values, t, n);
                deliver(a, &s, t, n);
        }
}
