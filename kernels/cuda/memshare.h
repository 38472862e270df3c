/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_MEMSHARE_H
#define KVD_KERNELS_CUDA_MEMSHARE_H

/*
 * MemShare's stage 2 on a GPU: the operations of kernels/memshare.h on blocks of a pool, many at a
 * time. Sums run in the order of the reference: each lane of a group has the columns that are one
 * chain there. So distances and norms have the reference's bits.
 *
 * -EINVAL: an unknown type, order or metric, a size of 0, or an address that is missing or not
 * aligned to its elements.
 */

#include "kernels/cuda/gpu.h"

/* a, b: indices into blocks.ids. Layer 0's K begins offset bytes after a block's start. */
struct gpu_distance_pair {
        uint32_t a, b;
        uint32_t angle; /* row of angles for b's keys; ignored if half is 0 */
};

struct gpu_distances {
        struct gpu_blocks blocks;
        uint64_t offset;
        struct gpu_block_shape shape;
        uint32_t metric;  /* enum kvd_memshare_metric */
        uint32_t half;    /* number of rotated pairs of dimensions, 2 half <= dim; 0 if none */
        double limit;     /* INFINITY: compute every distance, reject nothing by norms */
        cu_address pairs; /* const struct gpu_distance_pair * */
        uint32_t n;
        uint32_t together; /* set by the function: layers between two checks of the limit */
        uint32_t bounded;  /* set by the function: distances that are already INFINITY stay so */
        cu_address angles; /* const float [angle][cosines, sines][half]; 0 if half is 0 */
        cu_address norms;  /* 0, or const float [index into blocks.ids][layer][K, V] */
        /* double [n]: INFINITY if above the limit or NaN, or if a block is not resident */
        cu_address distances;
};

/* KVD_MEMSHARE_RELATIVE needs norms. */
int gpu_distances(struct gpu *gpu, cu_stream stream, const struct gpu_distances *a);

/* Frobenius norms of n blocks: to[i][layer][K, V], NaN if not resident. Reads the blocks once. */
struct gpu_norms {
        struct gpu_blocks blocks;
        uint64_t offset;
        struct gpu_block_shape shape;
        uint32_t n;
        cu_address to; /* float */
};

int gpu_norms(struct gpu *gpu, cu_stream stream, const struct gpu_norms *a);

#endif
