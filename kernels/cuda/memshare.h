/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_MEMSHARE_H
#define KVD_KERNELS_CUDA_MEMSHARE_H

/*
 * MemShare's stage 2 on a GPU: the operations of kernels/memshare.h on blocks of a pool, many at a
 * time. Sums run in the order of the reference, each lane of a group having the columns that are
 * one chain there: distances and norms are its bits.
 *
 * -EINVAL: a type, order or metric that is none, a size of 0, an address that is missing or not
 * aligned to its numbers.
 */

#include "kernels/cuda/gpu.h"

enum gpu_order { GPU_ORDER_HND = 1, GPU_ORDER_NHD = 2 }; /* the numbers of enum kvd_order */

struct gpu_memshare_shape { /* members and numbers as in struct kvd_memshare_shape */
        uint32_t layers, heads, tokens, dim;
        uint32_t order, number;
};

/*
 * Blocks are meant by where they are in blocks.ids; layer 0's K begins offset bytes after a block's
 * start.
 */
struct gpu_memshare_pair {
        uint32_t a, b;
        uint32_t angle; /* of b's keys: a row of angles; not looked at where half is 0 */
};

struct gpu_memshare {
        struct gpu_blocks blocks;
        uint64_t offset;
        struct gpu_memshare_shape shape;
        uint32_t metric;          /* enum kvd_memshare_metric */
        uint32_t half;            /* pairs of dimensions that are rotated, 2 half <= dim; 0: none */
        double limit;             /* INFINITY: every distance is known, and norms reject nothing */
        cu_address pairs;         /* const struct gpu_memshare_pair * */
        uint32_t n;
        uint32_t together;        /* set by the function: layers between two looks at the limit, */
        uint32_t bounded;         /* and whether distances that are INFINITY already stay so */
        cu_address angles;        /* const float [angle][cosine, sine][half]; 0 if half is 0 */
        cu_address norms;         /* 0, or const float [blocks.ids' index][layer][K, V] */
        /* double [n]: INFINITY above the limit, for NaN, and where a block is not resident */
        cu_address distances;
};

/* KVD_MEMSHARE_RELATIVE needs norms. */
int gpu_memshare(struct gpu *gpu, cu_stream stream, const struct gpu_memshare *a);

/* Of n blocks: to[i][layer][K, V]. Reads 1 x the blocks. Not resident: NaN. */
struct gpu_memshare_keep {
        struct gpu_blocks blocks;
        uint64_t offset;
        struct gpu_memshare_shape shape;
        uint32_t n;
        cu_address to; /* float */
};

int gpu_memshare_norms(struct gpu *gpu, cu_stream stream, const struct gpu_memshare_keep *a);

#endif
