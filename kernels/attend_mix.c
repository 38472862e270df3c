/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Weighted sums of values; compiled once for each instruction set. Values are widened in registers,
 * one dimension per lane, and are added to a few sums while they are there.
 */

#include "kernels/attend_mix.h"

#include <string.h>

#include "kernels/rows.h"

/* What is kept in registers: MIX_ROWS by MIX_LANES lanes, or ATTEND_ROWS by PAIRS pairs of lanes. */
#if defined(KVD_ISA_AVX512)
enum { PAIRS = 2, MIX_ROWS = 8, MIX_LANES = 2 };
#else
enum { PAIRS = 1, MIX_ROWS = 6, MIX_LANES = 1 };
#endif

enum {
        STEP = 32,          /* values mixed before the next part of their rows, with few queries */
        STEP_BYTES = 16384, /* the same with many queries, in bytes of values, if that is more */
};

/* A part of the sums: lanes [from, to) of pairs pairs of lanes, in rows rows. */
struct part {
        int rows, pairs, from, to;
};

/* Values, of which a row begins offset bytes after each pointer, and what to prefetch of later ones. */
struct values {
        const uint8_t *const *at;
        ptrdiff_t offset;
        uint32_t n, n_there; /* to mix; that exist */
        uint32_t ahead;      /* how many rows ahead of the sums they are prefetched */
        uint32_t dim;
        bool first; /* they are read for the first time, so later ones are prefetched */
};

/*
 * Prefetches a part of a later row, of n elements from number d on. Of quantised rows, which are
 * short and end with their scales, the first part is all.
 */
KERNEL void mix_expect(const struct values *v, uint32_t t, uint32_t d, uint32_t n,
                       enum kvd_number type) {
        const uint8_t *row = v->at[MIN(t + v->ahead, v->n_there - 1)] + v->offset;

        if (!kvd_is_quantised(type))
                lanes_expect(row_at(row, d, type), kvd_code_bytes(type, n));
        else if (d == 0)
                lanes_expect(row, kvd_format_row(type, v->dim));
}

/*
 * Adds values to a part of the sums; the elements begin with number d of each row. Two pairs begin
 * with a group, and have its scale.
 */
KERNEL void mix_tile(float *sum, size_t lds, const float *p, size_t ld, const struct values *values,
                     uint32_t d, bool expect, struct part part, enum kvd_number type) {
        lanes acc[MIX_ROWS][2 * PAIRS], v[2 * PAIRS];

        for (int r = 0; r < part.rows; r++)
                for (int i = part.from; i < part.to; i++)
                        acc[r][i] = lanes_load(sum + r * lds + i * KVD_LANES);
        for (uint32_t t = 0; t < values->n; t++) {
                const uint8_t *row = values->at[t] + values->offset;
                struct lanes_scale scale = row_scale_of(row, d, values->dim, type);

                if (expect)
                        mix_expect(values, t, d, (uint32_t)part.pairs * 32, type);
                for (int i = 0; i < part.pairs; i++)
                        row_widen_scaled(scale, row, d + (uint32_t)i * 32, type, &v[2 * i],
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
KERNEL void mix_last(float *sum, const float *p, const struct values *v, uint32_t d,
                     enum kvd_number type) {
        for (; d < v->dim; d += KVD_LANES) {
                uint32_t count = MIN(v->dim - d, KVD_LANES);
                lanes acc = lanes_load_to(sum + d, count);

                for (uint32_t t = 0; t < v->n; t++)
                        acc = lanes_fma(lanes_set(p[t]),
                                        row_widen(v->at[t] + v->offset, d, count, v->dim, type),
                                        acc);
                lanes_store_to(sum + d, acc, count);
        }
}

KERNEL void mix_step(float *sum, const float *p, size_t ld, const struct values *v, int rows,
                     enum kvd_number type) {
        size_t lds = kvd_attend_sum(v->dim);
        uint32_t d = 0;

        for (; rows <= ATTEND_ROWS && d + 32 * PAIRS <= v->dim; d += 32 * PAIRS)
                mix_tile(sum + d, lds, p, ld, v, d, v->first,
                         (struct part){rows, PAIRS, 0, 2 * PAIRS}, type);
        for (; d + 32 <= v->dim; d += 32) {
                int lanes_here = rows <= ATTEND_ROWS ? 2 : MIX_LANES;

                mix_tile(sum + d, lds, p, ld, v, d, v->first, (struct part){rows, 1, 0, lanes_here},
                         type);
                if (lanes_here == 1)
                        mix_tile(sum + d, lds, p, ld, v, d, false, (struct part){rows, 1, 1, 2},
                                 type);
        }
        for (int r = 0; r < rows && d < v->dim; r++)
                mix_last(sum + r * lds, p + r * ld, v, d, type);
}

/* Adds the values to all rows. */
KERNEL void mix_rows(float *sum, const float *p, size_t ld, struct values *v, uint32_t rows,
                     enum kvd_number type) {
        size_t lds = kvd_attend_sum(v->dim);
        uint32_t r = 0;

        for (; r + MIX_ROWS <= rows; r += MIX_ROWS, v->first = false)
                mix_step(sum + r * lds, p + r * ld, ld, v, MIX_ROWS, type);
        for (; r + ATTEND_ROWS <= rows; r += ATTEND_ROWS, v->first = false)
                mix_step(sum + r * lds, p + r * ld, ld, v, ATTEND_ROWS, type);
        for (; ATTEND_ROWS > 2 && r + 2 <= rows; r += 2, v->first = false)
                mix_step(sum + r * lds, p + r * ld, ld, v, 2, type);
        for (; r < rows; r++, v->first = false)
                mix_step(sum + r * lds, p + r * ld, ld, v, 1, type);
}

KERNEL void mix_type(float *sum, const float *p, size_t ld, const uint8_t *const *values,
                     ptrdiff_t offset, uint32_t n, uint32_t rows, uint32_t dim,
                     enum kvd_number type) {
        uint32_t row = (uint32_t)kvd_format_row(type, dim),
                 step = rows < ATTEND_MANY ? STEP : MAX(STEP, STEP_BYTES / row),
                 ahead = attend_ahead(row);

        for (uint32_t t = 0; t < MIN(n, ahead); t++)
                lanes_expect(values[t] + offset, row);
        for (uint32_t t = 0; t < n; t += step) {
                struct values some = {values + t, offset, MIN(n - t, step), n - t, ahead,
                                      dim,        true};

                mix_rows(sum, p + t, ld, &some, rows, type);
        }
}

void KVD_VARIANT(kvd_attend_mix)(float *sum, const float *p, size_t ld,
                                 const uint8_t *const *values, ptrdiff_t offset, uint32_t n,
                                 enum kvd_number type, uint32_t rows, uint32_t dim) {
        TYPED(type, mix_type, sum, p, ld, values, offset, n, rows, dim);
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

void KVD_VARIANT(kvd_attend_finish)(float *to, float *sum, const float *total, enum kvd_number type,
                                    uint32_t rows, uint32_t dim) {
        if (lanes_splits(type))
                finish_type(to, sum, total, rows, dim, KVD_NUMBER_BF16);
        else
                finish_type(to, sum, total, rows, dim, KVD_NUMBER_F32);
}
