/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_HSHARE_H
#define KVD_KERNELS_CUDA_HSHARE_H

/*
 * How alike HShare's selections are (overlap of kernels/hshare.h), on a GPU, for many pairs of
 * layers or heads in one launch.
 */

#include "kernels/cuda/gpu.h"

/* Their rows from there on. */
struct gpu_overlap_pair {
        uint32_t a, b;
};

/*
 * to[i * (end - first) + r - first], first <= r < end: bits that row a + r and row b + r of pair i
 * have in common. Rows have so many 64-bit words each and lie one behind the other through the
 * blocks, whose sizes are multiples of 8; a word of a block that is not resident counts as zeros.
 */
#define GPU_OVERLAP_PAIRS 65535u /* of one launch */

struct gpu_overlap {
        struct gpu_blocks blocks;
        cu_address pairs;        /* const struct gpu_overlap_pair * */
        cu_address to;           /* uint32_t * */
        uint32_t n, first, end, words;
};

int gpu_overlap(struct gpu *gpu, cu_stream stream, const struct gpu_overlap *a);

#endif
