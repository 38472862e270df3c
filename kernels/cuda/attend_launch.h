/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_ATTEND_LAUNCH_H
#define KVD_KERNELS_CUDA_ATTEND_LAUNCH_H

/*
 * The arguments of the attention kernels: the caller's, and what attend.c derived from them. A
 * column is a position or, if positions are chosen, an index into that list; a row is a token and a
 * query head. Scores are kept as exponents of two: scale * log2(e) * (q . k).
 */

#include "kernels/cuda/attend.h"

/* How a warp's 16 rows of queries and weights are made of 16-bit numbers. */
enum gpu_attend_form {
        /* 8 rows of rounded numbers, and 8 of the rounding errors: one product does both */
        GPU_ATTEND_NARROW,
        GPU_ATTEND_WIDE,  /* 16 rows, two products */
        GPU_ATTEND_PLAIN, /* 16 rows, rounded only: if queries and results are 16-bit themselves */
};

enum {
        GPU_ATTEND_TILE = 16, /* columns that a warp processes at a time */
        /* without matrix units: query heads at a time, for up to 128 dimensions, */
        GPU_ATTEND_HEADS_128 = 8,
        GPU_ATTEND_HEADS_256 = 4, /* and for more */
        GPU_ATTEND_WARPS = 4,     /* maximum per thread block; fewer if shared memory is short */
        GPU_ATTEND_LEAST_STAGES = 2,
        GPU_ATTEND_PREFILL_STAGES = 2,
        GPU_ATTEND_MASS_THREADS = 256,
        GPU_ATTEND_SUM_THREADS = 256,
};

struct gpu_attend_launch {
        struct gpu_attend a;
        float exponent;      /* scale * log2(e) */
        uint32_t split;      /* columns per split */
        uint32_t n_splits;   /* splits of the longest sequence */
        uint32_t head_tiles; /* parts of a group, each processed by a different thread block */
        uint32_t stages;     /* decode: tiles per warp in shared memory */
        uint32_t row_tiles;  /* prefill: thread blocks per sequence and KV head */
        uint32_t tokens;     /* rows per sequence and head: max_tokens, or 1 */

        cu_address sums;    /* float[row][split][dim]: sums of weights times values */
        cu_address stats;   /* float[row][split][2]: largest score, sum of weights */
        cu_address totals;  /* float[row][2]: the same over all splits; 0 if no masses are wanted */
        cu_address scores;  /* decode: float[sequence, query head][ld_scores]; 0 likewise */
        cu_address weights; /* float[sequence, KV head][ld_scores] */
        uint64_t ld_scores;
};

/*
 * Maximum number of tiles that a warp has in shared memory (GPU_ATTEND_LEAST_STAGES if shared
 * memory is short), and bytes of one (keys, values, positions and rotations).
 */
#define GPU_ATTEND_STAGES(dim) ((dim) <= 64 ? 6 : 3)
#define GPU_ATTEND_STAGE_BYTES(dim) (GPU_ATTEND_TILE * ((dim)*4 + 8))

/* Bytes of a warp's queries. Warps share them if none are rotated. */
#define GPU_ATTEND_QUERY_BYTES(dim, form) \
        (GPU_ATTEND_TILE * (dim)*2 * ((form) == GPU_ATTEND_WIDE ? 2 : 1))

#endif
