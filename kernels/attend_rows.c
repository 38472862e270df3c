/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compiled once for each instruction set. Keys and values are widened in registers, one dimension
 * per lane, and are used for a few queries while they are there. A score is then a sum over the
 * lanes, and 16 scores are summed at a time. For many queries, keys are first laid side by side,
 * and a score is a sum over the rows of that arrangement, in the same order.
 */

#include "kernels/attend_rows.h"

#include <string.h>

#include "ipc/base/util.h"
#include "kernels/interleave.h"
#include "kernels/lanes.h"

/*
 * What is kept in registers. Scores of a few queries: those of ROWS queries with TILE / ROWS keys.
 * Scores of many queries: two lanes for each of SIDE queries. Sums: MIX_ROWS by MIX_LANES lanes, or
 * ROWS by PAIRS pairs of lanes.
 */
#if defined(KVD_ISA_AVX512)
enum { ROWS = 4, TILE = 16, SIDE = 8, PAIRS = 2, MIX_ROWS = 8, MIX_LANES = 2 };
#else
enum { ROWS = 2, TILE = 4, SIDE = 3, PAIRS = 1, MIX_ROWS = 6, MIX_LANES = 1 };
#endif

enum {
        STEP = 32,          /* values mixed before the next part of their rows, with few queries */
        STEP_BYTES = 16384, /* the same with many queries, in bytes of values, if that is more */
        AHEAD = 32,         /* rows to prefetch ahead */
        MANY = 16,          /* number of queries from which laying keys side by side pays */
};

/* ---- scores of a few queries: sums over lanes ---- */

/* Stores queries in the order of lanes_place(), padded with zeros. */
KERNEL void place_rows(float *to, const float *q, enum kvd_number type, uint32_t rows, uint32_t dim,
                       uint32_t apart) {
        uint32_t wide = (uint32_t)kvd_attend_sum(dim);

        for (uint32_t r = 0; r < rows; r++, q += dim) {
                for (uint32_t d = 0; d < dim; d++)
                        to[lanes_place(d, dim, type) * apart + r] = q[d];
                for (uint32_t d = dim; d < wide; d++)
                        to[d * apart + r] = 0.0f;
        }
}

/* With many queries, the elements of SIDE of them lie side by side. */
KERNEL void place_type(float *to, const float *q, enum kvd_number type, uint32_t rows,
                       uint32_t dim) {
        uint32_t wide = (uint32_t)kvd_attend_sum(dim), r = 0;

        for (; rows >= MANY && r + SIDE <= rows; r += SIDE)
                place_rows(to + (size_t)r * wide, q + (size_t)r * dim, type, SIDE, dim, SIDE);
        for (; r < rows; r++)
                place_rows(to + (size_t)r * wide, q + (size_t)r * dim, type, 1, dim, 1);
}

static void place(float *to, const float *q, enum kvd_number type, uint32_t rows, uint32_t dim) {
        if (type == KVD_NUMBER_BF16)
                place_type(to, q, KVD_NUMBER_BF16, rows, dim);
        else
                place_type(to, q, KVD_NUMBER_F32, rows, dim);
}

/* acc[r * n + k] = product sums of query r and key k, one per lane. */
KERNEL void multiply(lanes *acc, const uint8_t *const *keys, int n, const float *q, size_t ld,
                     int rows, uint32_t dim, enum kvd_number type) {
        lanes even[TILE], odd[TILE];
        uint32_t d = 0;

        for (int i = 0; i < rows * n; i++)
                acc[i] = lanes_zero();
        for (; d + 32 <= dim; d += 32) {
                for (int k = 0; k < n; k++)
                        lanes_widen_2(number_at(keys[k], d, type), type, &even[k], &odd[k]);
                for (int i = 0; i < rows * n; i++)
                        acc[i] = lanes_fma(lanes_load(q + i / n * ld + d), even[i % n], acc[i]);
                for (int i = 0; i < rows * n; i++)
                        acc[i] = lanes_fma(lanes_load(q + i / n * ld + d + KVD_LANES), odd[i % n],
                                           acc[i]);
        }
        for (; d < dim; d += KVD_LANES) {
                for (int k = 0; k < n; k++)
                        even[k] = lanes_widen_to(number_at(keys[k], d, type),
                                                 MIN(dim - d, KVD_LANES), type);
                for (int i = 0; i < rows * n; i++)
                        acc[i] = lanes_fma(lanes_load(q + i / n * ld + d), even[i % n], acc[i]);
        }
}

/* Computes 16 scores: rows queries with 16 / rows keys. */
KERNEL void score_tile(float *to, size_t ld, const uint8_t *const *keys, uint32_t n, const float *q,
                       uint32_t dim, enum kvd_number type, int rows) {
        size_t width = kvd_attend_sum(dim);
        int wide = KVD_LANES / rows, part = MIN(wide, TILE / MIN(rows, ROWS));
        float scores[KVD_LANES];
        lanes products[KVD_LANES], some[TILE];

        for (int r = 0; r < rows; r += ROWS)
                for (int k = 0; k < wide; k += part) {
                        int here = MIN(rows - r, ROWS);

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

        for (uint32_t i = 0; i < n; i += wide) {
                for (uint32_t k = 0; k < wide && ahead; k++)
                        lanes_expect(ahead[i + k], dim * number_size(type));
                score_tile(to + i, ld, keys + i, n - i, q, dim, type, rows);
        }
}

KERNEL void score_rows(float *to, size_t ld, const uint8_t *const *keys,
                       const uint8_t *const *ahead, uint32_t n, const float *q, uint32_t rows,
                       uint32_t dim, enum kvd_number type) {
        size_t width = kvd_attend_sum(dim);
        uint32_t r = 0;

        for (; r + ROWS <= rows; r += ROWS, ahead = NULL)
                score_some(to + r * ld, ld, keys, ahead, n, q + r * width, dim, type, ROWS);
        for (; ROWS > 2 && r + 2 <= rows; r += 2, ahead = NULL)
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

        for (uint32_t i = 0; i < MIN(n, AHEAD); i++)
                lanes_expect(keys[i], dim * number_size(type));
        for (uint32_t i = 0; i < n; i += KVD_LANES)
                score_rows(to + i, ld, rows_from(padded, keys, i, n),
                           rows_from(next, keys, i + AHEAD, n), MIN(n - i, KVD_LANES), placed, rows,
                           dim, type);
}

KERNEL void score_many(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                       const float *placed, uint32_t rows, uint32_t dim, enum kvd_number type,
                       float *stage) {
        const uint8_t *padded[KVD_LANES];

        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                stage_keys(stage, rows_from(padded, keys, i, n), dim, type);
                score_stages(to + i, ld, stage, placed, rows, dim, MIN(n - i, KVD_LANES));
        }
}

KERNEL void scores_type(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                        const float *placed, uint32_t rows, uint32_t dim, enum kvd_number type,
                        void *stage) {
        if (rows < MANY)
                score_few(to, ld, keys, n, placed, rows, dim, type);
        else
                score_many(to, ld, keys, n, placed, rows, dim, type, stage);
}

static void scores(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                   enum kvd_number type, const float *placed, uint32_t rows, uint32_t dim,
                   void *stage) {
        if (type == KVD_NUMBER_F32)
                scores_type(to, ld, keys, n, placed, rows, dim, KVD_NUMBER_F32, stage);
        else if (type == KVD_NUMBER_F16)
                scores_type(to, ld, keys, n, placed, rows, dim, KVD_NUMBER_F16, stage);
        else
                scores_type(to, ld, keys, n, placed, rows, dim, KVD_NUMBER_BF16, stage);
}

/* ---- sums ---- */

/* A part of the sums: lanes [from, to) of pairs pairs of lanes, in rows rows. */
struct part {
        int rows, pairs, from, to;
};

/*
 * Adds n values to a part of the sums; the elements begin at byte at of each value. Prefetches
 * bytes bytes of later values, of which n_there exist; 0: no prefetch.
 */
KERNEL void mix_tile(float *sum, size_t lds, const float *p, size_t ld,
                     const uint8_t *const *values, uint32_t n, uint32_t n_there, size_t at,
                     size_t bytes, enum kvd_number type, struct part part) {
        lanes acc[MIX_ROWS][2 * PAIRS], v[2 * PAIRS];

        for (int r = 0; r < part.rows; r++)
                for (int i = part.from; i < part.to; i++)
                        acc[r][i] = lanes_load(sum + r * lds + i * KVD_LANES);
        for (uint32_t t = 0; t < n; t++) {
                const uint8_t *row = values[t] + at;

                if (bytes)
                        lanes_expect(values[MIN(t + AHEAD, n_there - 1)] + at, bytes);
                for (int i = 0; i < part.pairs; i++)
                        lanes_widen_2(row + i * 2 * lanes_bytes(type), type, &v[2 * i],
                                      &v[2 * i + 1]);
                for (int r = 0; r < part.rows; r++) {
                        lanes weight = lanes_set(p[r * ld + t]);

                        for (int i = part.from; i < part.to; i++)
                                acc[r][i] = lanes_fma(weight, v[i], acc[r][i]);
                }
        }
        for (int r = 0; r < part.rows; r++)
                for (int i = part.from; i < part.to; i++)
                        lanes_store(sum + r * lds + i * KVD_LANES, acc[r][i]);
}

/* Adds the last dimensions, fewer than 32, in their natural order. */
KERNEL void mix_last(float *sum, const float *p, const uint8_t *const *values, uint32_t n,
                     size_t at, uint32_t left, enum kvd_number type) {
        for (uint32_t d = 0; d < left; d += KVD_LANES) {
                uint32_t count = MIN(left - d, KVD_LANES);
                lanes acc = lanes_load_to(sum + d, count);

                for (uint32_t t = 0; t < n; t++)
                        acc = lanes_fma(lanes_set(p[t]),
                                        lanes_widen_to(values[t] + at + d * number_size(type),
                                                       count, type),
                                        acc);
                lanes_store_to(sum + d, acc, count);
        }
}

KERNEL void mix_step(float *sum, const float *p, size_t ld, const uint8_t *const *values,
                     ptrdiff_t offset, uint32_t n, uint32_t n_there, uint32_t dim,
                     enum kvd_number type, int rows, bool first) {
        size_t lds = kvd_attend_sum(dim), at = (size_t)offset,
               ahead = first ? number_size(type) : 0;
        uint32_t d = 0;

        for (; rows <= ROWS && d + 32 * PAIRS <= dim; d += 32 * PAIRS)
                mix_tile(sum + d, lds, p, ld, values, n, n_there, at + d * number_size(type),
                         32 * PAIRS * ahead, type, (struct part){rows, PAIRS, 0, 2 * PAIRS});
        for (; d + 32 <= dim; d += 32) {
                int lanes_here = rows <= ROWS ? 2 : MIX_LANES;

                mix_tile(sum + d, lds, p, ld, values, n, n_there, at + d * number_size(type),
                         32 * ahead, type, (struct part){rows, 1, 0, lanes_here});
                if (lanes_here == 1)
                        mix_tile(sum + d, lds, p, ld, values, n, n_there,
                                 at + d * number_size(type), 0, type, (struct part){rows, 1, 1, 2});
        }
        for (int r = 0; r < rows && d < dim; r++)
                mix_last(sum + r * lds + d, p + r * ld, values, n, at + d * number_size(type),
                         dim - d, type);
}

KERNEL void mix_type(float *sum, const float *p, size_t ld, const uint8_t *const *values,
                     ptrdiff_t offset, uint32_t n, uint32_t rows, uint32_t dim,
                     enum kvd_number type) {
        size_t lds = kvd_attend_sum(dim);
        uint32_t row = dim * (uint32_t)number_size(type),
                 step = rows < MANY ? STEP : MAX(STEP, STEP_BYTES / row);

        for (uint32_t t = 0; t < MIN(n, AHEAD); t++)
                lanes_expect(values[t] + offset, row);
        for (uint32_t t = 0; t < n; t += step) {
                uint32_t count = MIN(n - t, step), r = 0;

                for (; r + MIX_ROWS <= rows; r += MIX_ROWS)
                        mix_step(sum + r * lds, p + r * ld + t, ld, values + t, offset, count,
                                 n - t, dim, type, MIX_ROWS, r == 0);
                for (; r + ROWS <= rows; r += ROWS)
                        mix_step(sum + r * lds, p + r * ld + t, ld, values + t, offset, count,
                                 n - t, dim, type, ROWS, r == 0);
                for (; ROWS > 2 && r + 2 <= rows; r += 2)
                        mix_step(sum + r * lds, p + r * ld + t, ld, values + t, offset, count,
                                 n - t, dim, type, 2, r == 0);
                for (; r < rows; r++)
                        mix_step(sum + r * lds, p + r * ld + t, ld, values + t, offset, count,
                                 n - t, dim, type, 1, r == 0);
        }
}

static void mix(float *sum, const float *p, size_t ld, const uint8_t *const *values,
                ptrdiff_t offset, uint32_t n, enum kvd_number type, uint32_t rows, uint32_t dim) {
        if (type == KVD_NUMBER_F32)
                mix_type(sum, p, ld, values, offset, n, rows, dim, KVD_NUMBER_F32);
        else if (type == KVD_NUMBER_F16)
                mix_type(sum, p, ld, values, offset, n, rows, dim, KVD_NUMBER_F16);
        else
                mix_type(sum, p, ld, values, offset, n, rows, dim, KVD_NUMBER_BF16);
}

KERNEL void finish_type(float *to, float *sum, const float *total, uint32_t rows, uint32_t dim,
                        enum kvd_number type) {
        uint32_t wide = (uint32_t)kvd_attend_sum(dim);

        for (uint32_t r = 0; r < rows; r++, to += dim, sum += wide) {
                /* a total of 0 means that all sums are 0 */
                lanes divisor = lanes_set(total[r] == 0.0f ? 1.0f : total[r]);

                for (uint32_t d = 0; d < wide; d += KVD_LANES)
                        lanes_store(sum + d, lanes_div(lanes_load(sum + d), divisor));
                for (uint32_t d = 0; d < dim / 32 * 32; d += 32)
                        for (uint32_t i = 0; i < 32; i++)
                                to[d + i] = sum[d + lanes_place_2(i, type)];
                for (uint32_t d = dim / 32 * 32; d < dim; d++)
                        to[d] = sum[d];
        }
}

static void finish(float *to, float *sum, const float *total, enum kvd_number type, uint32_t rows,
                   uint32_t dim) {
        if (type == KVD_NUMBER_BF16)
                finish_type(to, sum, total, rows, dim, KVD_NUMBER_BF16);
        else
                finish_type(to, sum, total, rows, dim, KVD_NUMBER_F32);
}

const struct kvd_attend_ops KVD_VARIANT(kvd_attend) = {
        .place = place,
        .scores = scores,
        .mix = mix,
        .finish = finish,
};
