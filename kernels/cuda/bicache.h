/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_BICACHE_H
#define KVD_KERNELS_CUDA_BICACHE_H

/*
 * BiCache's products (kernels/bicache.h) of keys and values computed without and with the rest of
 * the input, on a GPU.
 */

#include "kernels/cuda/gpu.h"

/*
 * to[plane][token] = the sum over heads of the products of the token's rows in a and b. Row (plane,
 * head, token) has dim numbers at offset + plane * plane_stride + head * head_stride + token %
 * per_block * token_stride bytes in block token / per_block. The bits equal those of
 * kernels/bicache.h.
 */
struct gpu_products {
        cu_address to;          /* struct kvd_products[planes][tokens] */
        struct gpu_blocks a, b; /* all resident */
        uint64_t offset, plane_stride, head_stride, token_stride; /* bytes */
        uint32_t planes, heads, tokens, per_block, dim;
        uint32_t number; /* enum kvd_number */
};

int gpu_products(struct gpu *gpu, cu_stream stream, const struct gpu_products *a);

#endif
