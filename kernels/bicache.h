/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_BICACHE_H
#define KVD_KERNELS_BICACHE_H

/*
 * BiCache: how alike the keys and values of a prefix are when it is computed alone and when it is
 * computed with what follows it. What to do about it is kernels/btable.h.
 */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Inner products of a row with itself and with its other; add up those of the heads of a token. */
struct kvd_products {
        double ab, aa, bb;
};

struct kvd_bicache_ops {
        /*
         * to[i] += the products of row i of a and row i of b, i < n, each of dim elements, strides
         * apart. Single precision inside a row (lanes, 4,096 elements at a time), double from
         * there.
         */
        void (*products)(struct kvd_products *to, const void *a, size_t stride_a, const void *b,
                         size_t stride_b, enum kvd_number type, uint32_t n, uint32_t dim);
};

extern const struct kvd_bicache_ops kvd_bicache_scalar, kvd_bicache_avx2, kvd_bicache_avx512;

/* ab / (|a| |b|); 0 if one of them is 0. */
double kvd_cosine(const struct kvd_products *p);

/* The paper's similarity of a layer: keys and values of all tokens as one vector. */
double kvd_similarity_flat(const struct kvd_products *keys, const struct kvd_products *values,
                           uint32_t tokens);

/*
 * The official code's: each token's cosine (over its heads), for keys and for values, and the mean
 * of all of those.
 */
double kvd_similarity_token_mean(const struct kvd_products *keys, const struct kvd_products *values,
                                 uint32_t tokens);

#ifdef __cplusplus
}
#endif

#endif
