/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compiled once for each instruction set. Scores: 64 bytes of 16 keys at a time are interleaved as
 * they are, words of one float or of two halves, into a stage that stays in the first-level cache;
 * widening a word then gives a lane per key. Sums: a lane per dimension, values are widened in
 * registers.
 */

#include "kernels/attend_rows.h"

#include <string.h>

#include "ipc/base/util.h"
#include "kernels/interleave.h"
#include "kernels/lanes.h"

/* What is held in registers: rows of scores or sums times vectors. */
#if defined(KVD_ISA_AVX512)
enum { ROWS = 4, TILE_PANELS = 2, PAIRS = 2 };
#else
enum { ROWS = 2, TILE_PANELS = 1, PAIRS = 1 };
#endif

enum {
        STAGED = 2, /* panels */
        STEP = 32,  /* values mixed before the next part of their rows */
        AHEAD = 32, /* rows fetched ahead */
};

/* ---- scores ---- */

/* A panel: 16 keys, line by line. ahead: as many, wanted next. */
KERNEL void stage_panel(uint8_t *to, const uint8_t *const *rows, const uint8_t *const *ahead,
                        size_t bytes, enum kvd_number type) {
        size_t lines = DIV_UP(bytes, KVD_LINE), fetched = 0;

        for (size_t line = 0; line < lines; line++, to += (size_t)KVD_LINE_WORDS * KVD_LINE) {
                for (; fetched * lines < (line + 1) * KVD_PANEL; fetched++)
                        lanes_expect(ahead[fetched], bytes);
                lanes_interleave(to, rows, line * KVD_LINE,
                                 (uint32_t)MIN(bytes - line * KVD_LINE, (size_t)KVD_LINE), type);
        }
}

KERNEL void score_step(lanes acc[ROWS][STAGED], const lanes *key, const float *q, uint32_t dim,
                       int rows, int panels) {
        for (int r = 0; r < rows; r++) {
                lanes qi = lanes_set(q[(size_t)r * dim]);

                for (int p = 0; p < panels; p++)
                        acc[r][p] = lanes_fma(qi, key[p], acc[r][p]);
        }
}

KERNEL void score_tile(float *to, size_t ld, const uint8_t *stage, size_t panel, const float *q,
                       uint32_t dim, uint32_t n, enum kvd_number type, int rows, int panels) {
        lanes acc[ROWS][STAGED], even[STAGED], odd[STAGED];

        for (int r = 0; r < rows; r++)
                for (int p = 0; p < panels; p++)
                        acc[r][p] = lanes_zero();
        for (uint32_t d = 0; d < dim; stage += KVD_LINE) {
                for (int p = 0; p < panels; p++)
                        if (type == KVD_NUMBER_F32)
                                even[p] = lanes_load((const float *)(stage + p * panel));
                        else
                                lanes_widen_2(stage + p * panel, type, &even[p], &odd[p]);
                score_step(acc, even, q + d++, dim, rows, panels);
                if (type != KVD_NUMBER_F32 && d < dim)
                        score_step(acc, odd, q + d++, dim, rows, panels);
        }
        for (int r = 0; r < rows; r++)
                for (int p = 0; p < panels; p++)
                        lanes_store_to(to + r * ld + p * KVD_PANEL, acc[r][p],
                                       MIN(KVD_PANEL, n - p * KVD_PANEL));
}

/* A few rows of queries with panels that are staged, n keys. */
KERNEL void score_staged(float *to, size_t ld, const uint8_t *stage, size_t panel, const float *q,
                         uint32_t dim, uint32_t n, enum kvd_number type, int rows, int panels) {
        uint32_t i = 0;

        for (; i + (panels - 1) * KVD_PANEL < n; i += panels * KVD_PANEL)
                score_tile(to + i, ld, stage + i / KVD_PANEL * panel, panel, q, dim, n - i, type,
                           rows, panels);
        for (; i < n; i += KVD_PANEL)
                score_tile(to + i, ld, stage + i / KVD_PANEL * panel, panel, q, dim, n - i, type,
                           rows, 1);
}

KERNEL void score_rows(float *to, size_t ld, const uint8_t *stage, size_t panel, const float *q,
                       uint32_t rows, uint32_t dim, uint32_t n, enum kvd_number type) {
        uint32_t r = 0;

        for (; r + ROWS <= rows; r += ROWS)
                score_staged(to + r * ld, ld, stage, panel, q + (size_t)r * dim, dim, n, type, ROWS,
                             TILE_PANELS);
        for (; r + 2 <= rows; r += 2)
                score_staged(to + r * ld, ld, stage, panel, q + (size_t)r * dim, dim, n, type, 2,
                             TILE_PANELS);
        for (; r < rows; r++)
                score_staged(to + r * ld, ld, stage, panel, q + (size_t)r * dim, dim, n, type, 1,
                             STAGED);
}

/* The 16 rows from number from on; the last one again where there are no more. */
KERNEL const uint8_t *const *rows_from(const uint8_t *padded[KVD_PANEL], const uint8_t *const *rows,
                                       uint32_t from, uint32_t n) {
        if (from + KVD_PANEL <= n)
                return rows + from;
        for (uint32_t i = 0; i < KVD_PANEL; i++)
                padded[i] = rows[MIN(from + i, n - 1)];
        return padded;
}

KERNEL void scores_type(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                        const float *q, uint32_t rows, uint32_t dim, uint8_t *stage,
                        enum kvd_number type) {
        uint32_t panels = STAGED;
        size_t bytes = dim * number_size(type), panel = ALIGN_UP(bytes, KVD_LINE) * KVD_LINE_WORDS;
        const uint8_t *padded[KVD_PANEL], *next[KVD_PANEL];

        for (uint32_t i = 0; i < MIN(n, AHEAD); i++)
                lanes_expect(keys[i], bytes);
        for (uint32_t i = 0, count; i < n; i += count) {
                count = MIN(n - i, panels * KVD_PANEL);
                for (uint32_t p = 0; p < count; p += KVD_PANEL)
                        stage_panel(stage + p / KVD_PANEL * panel,
                                    rows_from(padded, keys, i + p, n),
                                    rows_from(next, keys, i + p + AHEAD, n), bytes, type);
                score_rows(to + i, ld, stage, panel, q, rows, dim, count, type);
        }
}

static void scores(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                   enum kvd_number type, const float *q, uint32_t rows, uint32_t dim, void *stage) {
        if (type == KVD_NUMBER_F32)
                scores_type(to, ld, keys, n, q, rows, dim, stage, KVD_NUMBER_F32);
        else if (type == KVD_NUMBER_F16)
                scores_type(to, ld, keys, n, q, rows, dim, stage, KVD_NUMBER_F16);
        else
                scores_type(to, ld, keys, n, q, rows, dim, stage, KVD_NUMBER_BF16);
}

/* ---- sums ---- */

/*
 * 32 pairs elements from byte at on, of n values; bytes of later ones, of n_there, are fetched
 * ahead.
 */
KERNEL void mix_tile(float *sum, size_t lds, const float *p, size_t ld,
                     const uint8_t *const *values, uint32_t n, uint32_t n_there, size_t at,
                     size_t bytes, enum kvd_number type, int rows, int pairs) {
        lanes acc[ROWS][2 * PAIRS], v[2 * PAIRS];

        for (int r = 0; r < rows; r++)
                for (int i = 0; i < 2 * pairs; i++)
                        acc[r][i] = lanes_load(sum + r * lds + i * KVD_LANES);
        for (uint32_t t = 0; t < n; t++) {
                const uint8_t *row = values[t] + at;

                if (bytes)
                        lanes_expect(values[MIN(t + AHEAD, n_there - 1)] + at, bytes);
                for (int i = 0; i < pairs; i++)
                        lanes_widen_2(row + i * 2 * lanes_bytes(type), type, &v[2 * i],
                                      &v[2 * i + 1]);
                for (int r = 0; r < rows; r++) {
                        lanes weight = lanes_set(p[r * ld + t]);

                        for (int i = 0; i < 2 * pairs; i++)
                                acc[r][i] = lanes_fma(weight, v[i], acc[r][i]);
                }
        }
        for (int r = 0; r < rows; r++)
                for (int i = 0; i < 2 * pairs; i++)
                        lanes_store(sum + r * lds + i * KVD_LANES, acc[r][i]);
}

/* The last dimensions, less than 32, in their order. */
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
        size_t lds = kvd_attend_sum(dim), at = (size_t)offset;
        uint32_t d = 0;

        for (; d + 32 * PAIRS <= dim; d += 32 * PAIRS)
                mix_tile(sum + d, lds, p, ld, values, n, n_there, at + d * number_size(type),
                         first && d == 0 ? dim * number_size(type) : 0, type, rows, PAIRS);
        for (; d + 32 <= dim; d += 32)
                mix_tile(sum + d, lds, p, ld, values, n, n_there, at + d * number_size(type),
                         first && d == 0 ? dim * number_size(type) : 0, type, rows, 1);
        for (int r = 0; r < rows && d < dim; r++)
                mix_last(sum + r * lds + d, p + r * ld, values, n, at + d * number_size(type),
                         dim - d, type);
}

KERNEL void mix_type(float *sum, const float *p, size_t ld, const uint8_t *const *values,
                     ptrdiff_t offset, uint32_t n, uint32_t rows, uint32_t dim,
                     enum kvd_number type) {
        size_t lds = kvd_attend_sum(dim);

        for (uint32_t t = 0; t < MIN(n, AHEAD); t++)
                lanes_expect(values[t] + offset, dim * number_size(type));
        for (uint32_t t = 0; t < n; t += STEP) {
                uint32_t count = MIN(n - t, STEP), r = 0;

                for (; r + ROWS <= rows; r += ROWS)
                        mix_step(sum + r * lds, p + r * ld + t, ld, values + t, offset, count,
                                 n - t, dim, type, ROWS, r == 0);
                for (; r + 2 <= rows; r += 2)
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

static void finish(float *to, const float *sum, const float *total, enum kvd_number type,
                   uint32_t rows, uint32_t dim) {
        size_t lds = kvd_attend_sum(dim);
        float quotients[2 * KVD_LANES];

        for (uint32_t r = 0; r < rows; r++, to += dim, sum += lds) {
                /* a total of 0: then all sums are 0 */
                lanes divisor = lanes_set(total[r] == 0.0f ? 1.0f : total[r]);

                for (uint32_t d = 0; d < dim; d += 2 * KVD_LANES) {
                        uint32_t n = MIN(dim - d, 2 * KVD_LANES);
                        bool whole = n == 2 * KVD_LANES;

                        lanes_store(quotients, lanes_div(lanes_load(sum + d), divisor));
                        lanes_store(quotients + KVD_LANES,
                                    lanes_div(lanes_load(sum + d + KVD_LANES), divisor));
                        for (uint32_t i = 0; i < n; i++)
                                to[d + i] = quotients[whole ? lanes_place_2(i, type) : i];
                }
        }
}

const struct kvd_attend_ops KVD_VARIANT(kvd_attend) = {
        .scores = scores,
        .mix = mix,
        .finish = finish,
};
