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

/*
 * The same by the driver's copies, one for each run of neighbours, without a kernel: of any size and alignment. ids are
 * those of a->blocks, which is not used, in memory of this processor.
 */
int gpu_gather_copies(struct gpu *gpu, cu_stream stream, const struct gpu_gather *a, const uint32_t *ids);

/*
 * By whichever of the two is expected to be faster: copies if the parts are large and one end is on the host, so that
 * no multiprocessor waits for PCIe; else the kernel. Not measured yet on a GPU: GPU_COPIES_FROM is an estimate, of what
 * a copy's start costs (2 us) against what the bus moves meanwhile.
 */
#define GPU_COPIES_FROM (256u << 10) /* bytes of a part */

int gpu_gather_fastest(struct gpu *gpu, cu_stream stream, const struct gpu_gather *a, const uint32_t *ids,
                       bool host_memory);

/* bytes at offset of each of n blocks become zeros: multiples of 16. Blocks that are not resident are passed over. */
struct gpu_clear {
        struct gpu_blocks blocks;
        uint32_t n;
        uint32_t reserved; /* 0 */
        uint64_t offset, bytes;
};

int gpu_clear(struct gpu *gpu, cu_stream stream, const struct gpu_clear *a);

#endif
