/* SPDX-License-Identifier: Apache-2.0 */

/* BiCache's kernel; compiled once for each instruction set. */

#include "kernels/bicache.h"

#include "kernels/rows.h"

enum { PIECE = 4096 };

/* Adds the products of elements from d on, below end. */
KERNEL void row_products(struct kvd_products *to, const void *a, const void *b, uint32_t d,
                         uint32_t end, uint32_t dim, enum kvd_number type) {
        lanes ab = lanes_zero(), aa = lanes_zero(), bb = lanes_zero();

        for (; d < end; d += KVD_LANES) {
                uint32_t n = MIN(end - d, KVD_LANES);
                lanes ai = row_widen(a, d, n, dim, type), bi = row_widen(b, d, n, dim, type);

                ab = lanes_fma(ai, bi, ab);
                aa = lanes_fma(ai, ai, aa);
                bb = lanes_fma(bi, bi, bb);
        }
        to->ab += (double)lanes_sum(ab);
        to->aa += (double)lanes_sum(aa);
        to->bb += (double)lanes_sum(bb);
}

KERNEL void products_type(struct kvd_products *to, const uint8_t *a, size_t stride_a,
                          const uint8_t *b, size_t stride_b, uint32_t n, uint32_t dim,
                          enum kvd_number type) {
        for (uint32_t i = 0; i < n; i++)
                for (uint32_t d = 0; d < dim; d += PIECE)
                        row_products(to + i, a + i * stride_a, b + i * stride_b, d,
                                     MIN(d + PIECE, dim), dim, type);
}

static void products(struct kvd_products *to, const void *a, size_t stride_a, const void *b,
                     size_t stride_b, enum kvd_number type, uint32_t n, uint32_t dim) {
        TYPED(type, products_type, to, a, stride_a, b, stride_b, n, dim);
}

const struct kvd_bicache_ops KVD_VARIANT(kvd_bicache) = {
        .products = products,
};
