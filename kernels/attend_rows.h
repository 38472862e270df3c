/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ATTEND_ROWS_H
#define KVD_KERNELS_ATTEND_ROWS_H

/*
 * Attention of a few queries over keys and values read in place: pointers name the visible rows,
 * each of dim elements of a type, at any address. Scores are added in the order "lanes" of
 * kernels/ops.h, with elements at the lanes that lanes_place() gives; sums of values are a chain.
 */

#include "kernels/ops.h"

struct kvd_attend_ops {
        /*
         * Arranges rows queries as scores() expects them for that type and that number of rows:
         * kvd_attend_sum() floats per row.
         */
        void (*place)(float *to, const float *q, enum kvd_number type, uint32_t rows, uint32_t dim);

        /*
         * to[r * ld + i] = sum over d < dim of placed[r][d] * key(i, d), i < n, in the order
         * "lanes". stage: kvd_attend_stage() bytes of scratch. Fastest if stage and placed are
         * aligned to a cache line.
         */
        void (*scores)(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                       enum kvd_number type, const float *placed, uint32_t rows, uint32_t dim,
                       void *stage);

        /*
         * sum[r][d] += sum over t < n of p[r * ld + t] * value(t, d), as a chain; value t begins
         * offset bytes after values[t]. The order of the elements in a row of sum depends on the
         * type and is known to finish() only; all zeros is zero in every order. kvd_attend_sum()
         * floats per row.
         */
        void (*mix)(float *sum, const float *p, size_t ld, const uint8_t *const *values,
                    ptrdiff_t offset, uint32_t n, enum kvd_number type, uint32_t rows,
                    uint32_t dim);

        /* to[r * dim + d] = sum[r][d] / total[r], or 0 if total[r] is 0. sum is overwritten. */
        void (*finish)(float *to, float *sum, const float *total, enum kvd_number type,
                       uint32_t rows, uint32_t dim);
};

extern const struct kvd_attend_ops kvd_attend_scalar, kvd_attend_avx2, kvd_attend_avx512,
        kvd_attend_neon;

/* Bytes of 16 keys side by side, widened to floats. */
static inline size_t kvd_attend_stage(uint32_t dim) {
        return (size_t)KVD_PANEL * (((size_t)dim * sizeof(float) + 63) / 64 * 64);
}

static inline size_t kvd_attend_sum(uint32_t dim) {
        return ((size_t)dim + 31) / 32 * 32;
}

#endif
