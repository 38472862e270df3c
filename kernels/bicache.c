/* SPDX-License-Identifier: Apache-2.0 */

/* BiCache's kernel; compiled once for each instruction set. */

#include "kernels/bicache.h"

#include "ipc/base/util.h"
#include "kernels/lanes.h"

enum { PIECE = 4096 };

KERNEL void row_products(struct kvd_products *to, const void *a, const void *b, uint32_t dim,
                         enum kvd_number type) {
        lanes ab = lanes_zero(), aa = lanes_zero(), bb = lanes_zero();
        uint32_t i = 0;

        for (; i + KVD_LANES <= dim; i += KVD_LANES) {
                lanes ai = lanes_widen(number_at(a, i, type), type),
                      bi = lanes_widen(number_at(b, i, type), type);

                ab = lanes_fma(ai, bi, ab);
                aa = lanes_fma(ai, ai, aa);
                bb = lanes_fma(bi, bi, bb);
        }
        if (i < dim) {
                lanes ai = lanes_widen_n(number_at(a, i, type), dim - i, type);
                lanes bi = lanes_widen_n(number_at(b, i, type), dim - i, type);

                ab = lanes_fma(ai, bi, ab);
                aa = lanes_fma(ai, ai, aa);
                bb = lanes_fma(bi, bi, bb);
        }
        to->ab += (double)lanes_sum(ab);
        to->aa += (double)lanes_sum(aa);
        to->bb += (double)lanes_sum(bb);
}

KERNEL void products_type(struct kvd_products *to, const void *a, size_t stride_a, const void *b,
                          size_t stride_b, uint32_t n, uint32_t dim, enum kvd_number type) {
        for (uint32_t i = 0; i < n; i++)
                for (uint32_t d = 0; d < dim; d += PIECE)
                        row_products(to + i, number_at(a, i * stride_a + d, type),
                                     number_at(b, i * stride_b + d, type), MIN(PIECE, dim - d),
                                     type);
}

static void products(struct kvd_products *to, const void *a, size_t stride_a, const void *b,
                     size_t stride_b, enum kvd_number type, uint32_t n, uint32_t dim) {
        if (type == KVD_NUMBER_F32)
                products_type(to, a, stride_a, b, stride_b, n, dim, KVD_NUMBER_F32);
        else if (type == KVD_NUMBER_F16)
                products_type(to, a, stride_a, b, stride_b, n, dim, KVD_NUMBER_F16);
        else
                products_type(to, a, stride_a, b, stride_b, n, dim, KVD_NUMBER_BF16);
}

const struct kvd_bicache_ops KVD_VARIANT(kvd_bicache) = {
        .products = products,
};
