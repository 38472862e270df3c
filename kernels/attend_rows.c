/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compiled once for each instruction set. Keys and values are widened in registers, one dimension
 * per lane, and are used for a few queries while they are there. A score is then a sum over the
 * lanes, and 16 scores are summed at a time. For many queries, keys are first laid side by side,
 * and a score is a sum over the rows of that arrangement, in the same order.
 */

#include "kernels/attend_mix.h"

#include <string.h>

#include "ipc/base/util.h"
#include "kernels/interleave.h"
#include "kernels/rows.h"

/*
 * What is kept in registers. Scores of a few queries: those of ATTEND_ROWS queries with TILE /
 * ATTEND_ROWS keys. Scores of many queries: two lanes for each of SIDE queries.
 */
#if defined(KVD_ISA_AVX512)
enum { TILE = 16, SIDE = 8 };
#else
enum { TILE = 4, SIDE = 3 };
#endif

/* ---- scores of a few queries: sums over lanes ---- */

/* Stores queries in the order of lanes_place(), transformed as keys are, padded with zeros. */
KERNEL void place_rows(float *to, const float *q, uint32_t rows, uint32_t dim, uint32_t apart,
                       enum kvd_number type) {
        uint32_t wide = (uint32_t)kvd_attend_sum(dim);
        float group[KVD_GROUP];

        for (uint32_t r = 0; r < rows; r++, q += dim) {
                for (uint32_t d = 0; d < dim; d++) {
                        if (d % KVD_GROUP == 0) {
                                memcpy(group, q + d, MIN(dim - d, KVD_GROUP) * sizeof *q);
                                turn_key(group, MIN(dim - d, KVD_GROUP), type);
                        }
                        to[lanes_place(d, dim, type) * apart + r] = group[d % KVD_GROUP];
                }
                for (uint32_t d = dim; d < wide; d++)
                        to[d * apart + r] = 0.0f;
        }
}

/* With many queries, the elements of SIDE of them lie side by side. */
KERNEL void place_type(float *to, const float *q, uint32_t rows, uint32_t dim,
                       enum kvd_number type) {
        uint32_t wide = (uint32_t)kvd_attend_sum(dim), r = 0;

        for (; rows >= ATTEND_MANY && r + SIDE <= rows; r += SIDE)
                place_rows(to + (size_t)r * wide, q + (size_t)r * dim, SIDE, dim, SIDE, type);
        for (; r < rows; r++)
                place_rows(to + (size_t)r * wide, q + (size_t)r * dim, 1, dim, 1, type);
}

static void place(float *to, const float *q, enum kvd_number type, uint32_t rows, uint32_t dim) {
        TYPED(type, place_type, to, q, rows, dim);
}

/* Adds the products of 32 elements from number d on. */
KERNEL void multiply_32(lanes *acc, const uint8_t *const *keys, const struct lanes_scale *scale,
                        int n, const float *q, size_t ld, int rows, uint32_t d,
                        enum kvd_number type) {
        lanes even[TILE], odd[TILE];

        for (int k = 0; k < n; k++)
                row_widen_scaled(scale[k], keys[k], d, type, &even[k], &odd[k]);
        for (int i = 0; i < rows * n; i++)
                acc[i] = lanes_fma(lanes_load(q + i / n * ld + d), even[i % n], acc[i]);
        for (int i = 0; i < rows * n; i++)
                acc[i] = lanes_fma(lanes_load(q + i / n * ld + d + KVD_LANES), odd[i % n], acc[i]);
}

/* acc[r * n + k] = product sums of query r and key k, one per lane. */
KERNEL void multiply(lanes *acc, const uint8_t *const *keys, int n, const float *q, size_t ld,
                     int rows, uint32_t dim, enum kvd_number type) {
        struct lanes_scale scale[TILE];
        lanes last[TILE];
        uint32_t d = 0, whole = dim / 32 * 32;

        for (int i = 0; i < rows * n; i++)
                acc[i] = lanes_zero();
        while (d < whole) {
                for (int k = 0; k < n; k++)
                        scale[k] = row_scale_of(keys[k], d, dim, type);
                for (uint32_t end = MIN(whole, d + KVD_GROUP); d < end; d += 32)
                        multiply_32(acc, keys, scale, n, q, ld, rows, d, type);
        }
        for (; d < dim; d += KVD_LANES) {
                for (int k = 0; k < n; k++)
                        last[k] = row_widen(keys[k], d, MIN(dim - d, KVD_LANES), dim, type);
                for (int i = 0; i < rows * n; i++)
                        acc[i] = lanes_fma(lanes_load(q + i / n * ld + d), last[i % n], acc[i]);
        }
}

/* Keys that are used together. They take registers beside the sums, most of all with one query. */
KERNEL int keys_together(int rows, enum kvd_number type) {
        int n = MIN(KVD_LANES / rows, TILE / MIN(rows, ATTEND_ROWS));

        return rows == 1 && (TILE > 4 || type != KVD_NUMBER_F32) ? n / 2 : n;
}

/* Computes 16 scores: rows queries with 16 / rows keys. */
KERNEL void score_tile(float *to, size_t ld, const uint8_t *const *keys,
                       const uint8_t *const *ahead, uint32_t n, const float *q, uint32_t dim,
                       enum kvd_number type, int rows) {
        size_t width = kvd_attend_sum(dim);
        int wide = KVD_LANES / rows, part = keys_together(rows, type);
        float scores[KVD_LANES];
        lanes products[KVD_LANES], some[TILE];

        for (int r = 0; r < rows; r += ATTEND_ROWS)
                for (int k = 0; k < wide; k += part) {
                        int here = MIN(rows - r, ATTEND_ROWS);

                        for (int i = 0; i < part && ahead && r == 0; i++)
                                lanes_expect(ahead[k + i], kvd_format_row(type, dim));
                        multiply(some, keys + k, part, q + r * width, width, here, dim, type);
                        for (int i = 0; i < here * part; i++)
                                products[(r + i / part) * wide + k + i % part] = some[i];
                }
        lanes_store(scores, lanes_sum_16(products));
        for (int r = 0; r < rows; r++)
                if (n >= (uint32_t)wide)
                        memcpy(to + r * ld, scores + r * wide, wide * sizeof *to);
                else
                        memcpy(to + r * ld, scores + r * wide, n * sizeof *to);
}

/* Scores a few queries with the first n of 16 keys. ahead: 16 keys to prefetch, or NULL. */
KERNEL void score_some(float *to, size_t ld, const uint8_t *const *keys,
                       const uint8_t *const *ahead, uint32_t n, const float *q, uint32_t dim,
                       enum kvd_number type, int rows) {
        uint32_t wide = (uint32_t)(KVD_LANES / rows);

        for (uint32_t i = 0; i < n; i += wide)
                score_tile(to + i, ld, keys + i, ahead ? ahead + i : NULL, n - i, q, dim, type,
                           rows);
}

KERNEL void score_rows(float *to, size_t ld, const uint8_t *const *keys,
                       const uint8_t *const *ahead, uint32_t n, const float *q, uint32_t rows,
                       uint32_t dim, enum kvd_number type) {
        size_t width = kvd_attend_sum(dim);
        uint32_t r = 0;

        for (; r + ATTEND_ROWS <= rows; r += ATTEND_ROWS, ahead = NULL)
                score_some(to + r * ld, ld, keys, ahead, n, q + r * width, dim, type, ATTEND_ROWS);
        for (; ATTEND_ROWS > 2 && r + 2 <= rows; r += 2, ahead = NULL)
                score_some(to + r * ld, ld, keys, ahead, n, q + r * width, dim, type, 2);
        for (; r < rows; r++, ahead = NULL)
                score_some(to + r * ld, ld, keys, ahead, n, q + r * width, dim, type, 1);
}

/* ---- scores of many queries: 16 keys side by side ---- */

/* Number of floats of 16 staged keys. */
KERNEL size_t stage_floats(uint32_t dim) {
        return (size_t)ALIGN_UP(dim, KVD_LANES) * KVD_LANES;
}

/* Stages 16 keys side by side: widened, in the order of lanes_place(), padded with zeros. */
KERNEL void stage_keys(float *to, const uint8_t *const *keys, uint32_t dim, enum kvd_number type) {
        const uint32_t step = KVD_LINE / number_size(type), end = ALIGN_UP(dim, KVD_LANES);
        uint8_t words[KVD_LINE_WORDS * KVD_LINE];

        for (uint32_t d = 0; d < dim; d += step) {
                uint32_t bytes = (uint32_t)(MIN(dim - d, step) * number_size(type));

                if (type == KVD_NUMBER_F32) {
                        lanes_interleave((uint8_t *)(to + (size_t)d * KVD_LANES), keys,
                                         d * number_size(type), bytes, type);
                        continue;
                }
                lanes_interleave(words, keys, d * number_size(type), bytes, type);
                for (uint32_t w = 0; w < KVD_LINE_WORDS && d + 2 * w < end; w++) {
                        lanes even, odd;

                        lanes_widen_2(words + (size_t)w * KVD_LINE, type, &even, &odd);
                        lanes_store(to + (size_t)lanes_place(d + 2 * w, dim, type) * KVD_LANES,
                                    even);
                        lanes_store(to + (size_t)lanes_place(d + 2 * w + 1, dim, type) * KVD_LANES,
                                    odd);
                }
        }
}

KERNEL void stage_lanes(float *to, const lanes rows[KVD_LANES]) {
        float row[KVD_LANES][KVD_LANES];
        const uint8_t *at[KVD_LANES];

        for (int i = 0; i < KVD_LANES; i++) {
                lanes_store(row[i], rows[i]);
                at[i] = (const uint8_t *)row[i];
        }
        lanes_interleave((uint8_t *)to, at, 0, KVD_LINE, KVD_NUMBER_F32);
}

/* The same for keys of less than 16 bits an element. */
KERNEL void stage_narrow(float *to, const uint8_t *const *keys, uint32_t dim,
                         enum kvd_number type) {
        lanes a[KVD_LANES], b[KVD_LANES];
        uint32_t d = 0;

        for (; d + 32 <= dim; d += 32) {
                for (int i = 0; i < KVD_LANES; i++)
                        row_widen_2(keys[i], d, dim, type, &a[i], &b[i]);
                stage_lanes(to + (size_t)d * KVD_LANES, a);
                stage_lanes(to + (size_t)(d + KVD_LANES) * KVD_LANES, b);
        }
        for (; d < dim; d += KVD_LANES) {
                for (int i = 0; i < KVD_LANES; i++)
                        a[i] = row_widen(keys[i], d, MIN(dim - d, KVD_LANES), dim, type);
                stage_lanes(to + (size_t)d * KVD_LANES, a);
        }
}

/* A few queries and 16 keys, each side by side. */
struct products {
        const float *q, *keys;
        size_t stage; /* floats of the keys */
};

/*
 * sum[r] is what multiply() leaves in lane j for query r and each key, other[r] what it leaves in
 * lane j + 8. The first product is not added to 0, so a score of 0 may differ in sign from
 * score_few()'s; no weight depends on that sign.
 */
KERNEL void multiply_2(lanes *sum, lanes *other, const struct products *p, uint32_t j, int rows) {
        const float *q = p->q + j * rows, *keys = p->keys + j * KVD_LANES, *end = keys + p->stage;
        lanes a = lanes_held(lanes_load(keys)), b = lanes_held(lanes_load(keys + 8 * KVD_LANES));

        for (int r = 0; r < rows; r++) {
                sum[r] = lanes_mul(lanes_set(q[r]), a);
                other[r] = lanes_mul(lanes_set(q[8 * rows + r]), b);
        }
        while (keys += KVD_LANES * KVD_LANES, q += KVD_LANES * rows, keys < end) {
                a = lanes_held(lanes_load(keys));
                for (int r = 0; r < rows; r++)
                        sum[r] = lanes_fma(lanes_set(q[r]), a, sum[r]);
                b = lanes_held(lanes_load(keys + 8 * KVD_LANES));
                for (int r = 0; r < rows; r++)
                        other[r] = lanes_fma(lanes_set(q[8 * rows + r]), b, other[r]);
        }
}

KERNEL void sum_2(lanes *sum, const struct products *p, uint32_t j, int rows) {
        lanes other[SIDE];

        multiply_2(sum, other, p, j, rows);
        for (int r = 0; r < rows; r++)
                sum[r] = lanes_add(sum[r], other[r]);
}

/* The sum of lanes j, j + 8, j + 4 and j + 12. */
KERNEL void sum_4(lanes *sum, const struct products *p, uint32_t j, int rows) {
        lanes other[SIDE];

        sum_2(sum, p, j, rows);
        sum_2(other, p, j + 4, rows);
        for (int r = 0; r < rows; r++)
                sum[r] = lanes_add(sum[r], other[r]);
}

/* Sums all lanes in the tree order of lanes_sum(). */
KERNEL void score_staged(float *to, size_t ld, const struct products *p, uint32_t n, int rows) {
        lanes quarter[4][SIDE];

        for (uint32_t j = 0; j < 4; j++)
                sum_4(quarter[j], p, j, rows);
        for (int r = 0; r < rows; r++) {
                lanes even = lanes_add(quarter[0][r], quarter[2][r]),
                      odd = lanes_add(quarter[1][r], quarter[3][r]);

                lanes_store_to(to + r * ld, lanes_add(even, odd), n);
        }
}

/* With keys side by side, the sum of a key stays in its lane. The bits equal score_few()'s. */
KERNEL void score_stages(float *to, size_t ld, const float *keys, const float *q, uint32_t rows,
                         uint32_t dim, uint32_t n) {
        size_t width = kvd_attend_sum(dim), stage = stage_floats(dim);
        uint32_t r = 0;

        for (; r + SIDE <= rows; r += SIDE)
                score_staged(to + r * ld, ld, &(struct products){q + r * width, keys, stage}, n,
                             SIDE);
        for (; r < rows; r++)
                score_staged(to + r * ld, ld, &(struct products){q + r * width, keys, stage}, n, 1);
}

/* The 16 rows from index from on; missing rows repeat the last one. */
KERNEL const uint8_t *const *rows_from(const uint8_t *padded[KVD_LANES], const uint8_t *const *rows,
                                       uint32_t from, uint32_t n) {
        if (from + KVD_LANES <= n)
                return rows + from;
        for (uint32_t i = 0; i < KVD_LANES; i++)
                padded[i] = rows[MIN(from + i, n - 1)];
        return padded;
}

KERNEL void score_few(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                      const float *placed, uint32_t rows, uint32_t dim, enum kvd_number type) {
        const uint8_t *padded[KVD_LANES], *next[KVD_LANES];
        size_t row = kvd_format_row(type, dim);
        uint32_t ahead = attend_ahead(row);

        for (uint32_t i = 0; i < MIN(n, ahead); i++)
                lanes_expect(keys[i], row);
        for (uint32_t i = 0; i < n; i += KVD_LANES)
                score_rows(to + i, ld, rows_from(padded, keys, i, n),
                           rows_from(next, keys, i + ahead, n), MIN(n - i, KVD_LANES), placed, rows,
                           dim, type);
}

KERNEL void score_many(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                       const float *placed, uint32_t rows, uint32_t dim, float *stage,
                       enum kvd_number type) {
        const uint8_t *padded[KVD_LANES];

        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                const uint8_t *const *some = rows_from(padded, keys, i, n);

                if (kvd_is_narrow(type))
                        stage_narrow(stage, some, dim, type);
                else
                        stage_keys(stage, some, dim, type);
                score_stages(to + i, ld, stage, placed, rows, dim, MIN(n - i, KVD_LANES));
        }
}

KERNEL void scores_type(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                        const float *placed, uint32_t rows, uint32_t dim, void *stage,
                        enum kvd_number type) {
        if (rows < ATTEND_MANY)
                score_few(to, ld, keys, n, placed, rows, dim, type);
        else
                score_many(to, ld, keys, n, placed, rows, dim, stage, type);
}

static void scores(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                   enum kvd_number type, const float *placed, uint32_t rows, uint32_t dim,
                   void *stage) {
        TYPED(type, scores_type, to, ld, keys, n, placed, rows, dim, stage);
}

const struct kvd_attend_ops KVD_VARIANT(kvd_attend) = {
        .place = place,
        .scores = scores,
        .mix = KVD_VARIANT(kvd_attend_mix),
        .finish = KVD_VARIANT(kvd_attend_finish),
};
