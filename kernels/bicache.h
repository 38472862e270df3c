/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_BICACHE_H
#define KVD_KERNELS_BICACHE_H

/*
 * BiCache (Go et al. 2026, arXiv 2606.07571): how similar the keys and values of a prefix are when
 * it is computed alone and when it is computed with what follows it (sections 4.1 and 4.2, sim_l).
 * How many layers follow from that: kernels/btable.h.
 */

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Inner products of a pair of rows. To get those of a token, add up those of its heads. */
struct kvd_products {
        double ab, aa, bb;
};

struct kvd_bicache_ops {
        /*
         * to[i] += the products of row i of a and row i of b, i < n, each of dim elements; stride_a
         * and stride_b are bytes from row to row. Sums are fp32 within 4,096 elements of a row
         * (order "lanes"), and fp64 beyond that.
         */
        void (*products)(struct kvd_products *to, const void *a, size_t stride_a, const void *b,
                         size_t stride_b, enum kvd_number type, uint32_t n, uint32_t dim);
};

extern const struct kvd_bicache_ops kvd_bicache_scalar, kvd_bicache_avx2, kvd_bicache_avx512,
        kvd_bicache_neon;

/* ab / (|a| |b|); 0 if one of them is 0. */
double kvd_cosine(const struct kvd_products *p);

/*
 * The paper's similarity of a layer (appendix B.1): the cosine of the keys and values of all tokens
 * as one vector. keys, values: [tokens].
 */
double kvd_similarity_flat(const struct kvd_products *keys, const struct kvd_products *values,
                           uint32_t tokens);

/*
 * The official code's similarity of a layer: the cosine of each token (over its heads), for keys
 * and for values, averaged over tokens and both.
 */
double kvd_similarity_token_mean(const struct kvd_products *keys, const struct kvd_products *values,
                                 uint32_t tokens);

#ifdef __cplusplus
}
#endif

#endif
