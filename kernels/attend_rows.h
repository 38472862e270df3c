/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ATTEND_ROWS_H
#define KVD_KERNELS_ATTEND_ROWS_H

/*
 * Attention of a few queries over keys and values read where they are: what may be seen is given as
 * pointers to rows of dim elements of a type, wherever they lie. The order of additions is that of
 * "lanes" in kernels/ops.h for scores, elements being where lanes_place() says, and a chain for
 * sums.
 */

#include "kernels/ops.h"

struct kvd_attend_ops {
        /*
         * Queries in the order in which scores() wants them, of that type and so many of them:
         * kvd_attend_sum() floats a row.
         */
        void (*place)(float *to, const float *q, enum kvd_number type, uint32_t rows, uint32_t dim);

        /*
         * to[r * ld + i] = lanes over d < dim of placed[r][d] * key(i, d), i < n. stage:
         * kvd_attend_stage() bytes. It and placed begin with a line of the cache, best.
         */
        void (*scores)(float *to, size_t ld, const uint8_t *const *keys, uint32_t n,
                       enum kvd_number type, const float *placed, uint32_t rows, uint32_t dim,
                       void *stage);

        /*
         * sum[r][d] = chain from sum[r][d] over t < n of p[r * ld + t] * value(t, d); value t lies
         * offset bytes from values[t]. The elements of a row of sum lie in an order of the type's;
         * finish() knows it, and zeros are zeros in all of them. kvd_attend_sum() floats a row.
         */
        void (*mix)(float *sum, const float *p, size_t ld, const uint8_t *const *values,
                    ptrdiff_t offset, uint32_t n, enum kvd_number type, uint32_t rows,
                    uint32_t dim);

        /* to[r * dim + d] = sum[r][d] / total[r], which sum is afterwards; 0 where the total is. */
        void (*finish)(float *to, float *sum, const float *total, enum kvd_number type,
                       uint32_t rows, uint32_t dim);
};

extern const struct kvd_attend_ops kvd_attend_scalar, kvd_attend_avx2, kvd_attend_avx512;

/* 16 keys side by side, widened. */
static inline size_t kvd_attend_stage(uint32_t dim) {
        return (size_t)KVD_PANEL * (((size_t)dim * sizeof(float) + 63) / 64 * 64);
}

static inline size_t kvd_attend_sum(uint32_t dim) {
        return ((size_t)dim + 31) / 32 * 32;
}

#endif
