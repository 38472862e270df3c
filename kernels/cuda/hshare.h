/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_HSHARE_H
#define KVD_KERNELS_CUDA_HSHARE_H

/*
 * How similar HShare's selections are (overlap of kernels/hshare.h), on a GPU, for many pairs of
 * layers or heads in one launch.
 */

#include "kernels/cuda/gpu.h"

/* Numbers of the first rows of a pair. */
struct gpu_overlap_pair {
        uint32_t a, b;
};

/*
 * to[i * (end - first) + r - first] = number of bits set in both row a + r and row b + r of pair i,
 * first <= r < end. A row has words 64-bit words; rows are contiguous through the blocks, whose
 * sizes are multiples of 8. The words of a block that is not resident count as zeros.
 */
#define GPU_OVERLAP_PAIRS 65535u /* maximum number of pairs in one launch */

struct gpu_overlap {
        struct gpu_blocks blocks;
        cu_address pairs; /* const struct gpu_overlap_pair * */
        cu_address to;    /* uint32_t * */
        uint32_t n, first, end, words;
};

int gpu_overlap(struct gpu *gpu, cu_stream stream, const struct gpu_overlap *a);

#endif
