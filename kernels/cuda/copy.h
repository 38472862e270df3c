/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_COPY_H
#define KVD_KERNELS_CUDA_COPY_H

/*
 * Scattered blocks into one piece of memory and back. Source and target are memory of the device or pinned host memory:
 * whatever has an address there.
 */

#include "kernels/cuda/gpu.h"

struct gpu_gather {
        struct gpu_blocks blocks;
        uint32_t n;          /* blocks */
        uint32_t to_blocks;  /* 0: gather, blocks into packed; 1: scatter, packed into blocks */
        uint64_t offset;     /* bytes from a block's start, and ... */
        uint64_t bytes;      /* ... bytes of each: multiples of 16 */
        cu_address packed;   /* part i at packed + i * bytes; aligned to 16 */
};

/* A block that is not resident: gather writes zeros, scatter passes over its part. */
int gpu_gather(struct gpu *gpu, cu_stream stream, const struct gpu_gather *a);

#endif
