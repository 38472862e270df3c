/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_ATTEND_LAUNCH_H
#define KVD_KERNELS_CUDA_ATTEND_LAUNCH_H

/*
 * What the kernels of attention are given: the caller's arguments, and what attend.c made of them.
 * A column is a position, or with chosen ones a place in that list; a row is a token and a query
 * head. Scores are kept as exponents of two: scale * log2(e) * (q . k).
 */

#include "kernels/cuda/attend.h"

/* How a warp's 16 rows of queries and weights are made of numbers of 16 bits. */
enum gpu_attend_form {
        /* 8 rows: what is rounded, and below them what rounding left: one product does both */
        GPU_ATTEND_NARROW,
        GPU_ATTEND_WIDE,   /* 16 rows, two products */
        GPU_ATTEND_PLAIN,  /* 16 rows, rounded: where queries and results have 16 bits themselves */
};

enum {
        GPU_ATTEND_TILE = 16,        /* columns that a warp does at a time */
        /* query heads at a time, without matrix units, of up to 128 dimensions, ... */
        GPU_ATTEND_HEADS_128 = 8,
        GPU_ATTEND_HEADS_256 = 4,    /* ... and more */
        GPU_ATTEND_WARPS = 4,        /* at most; fewer where there is little shared memory */
        GPU_ATTEND_LEAST_STAGES = 2,
        GPU_ATTEND_PREFILL_STAGES = 2,
        GPU_ATTEND_MASS_THREADS = 256,
        GPU_ATTEND_SUM_THREADS = 256,
};

struct gpu_attend_launch {
        struct gpu_attend a;
        float exponent;         /* scale * log2(e) */
        uint32_t split;         /* columns of a split, ... */
        uint32_t n_splits;      /* ... of the longest sequence */
        uint32_t head_tiles;    /* parts of a group that are done by different blocks of threads */
        uint32_t stages;        /* decode: tiles of a warp */
        uint32_t row_tiles;     /* prefill: blocks of threads for a sequence and KV head */
        uint32_t tokens;        /* rows of a sequence and head: max_tokens, or 1 */

        cu_address sums;        /* float[row][split][dim]: of values by weights */
        cu_address stats;       /* float[row][split][2]: largest score and sum of weights; ... */
        cu_address totals;      /* ... float[row][2]: of all splits; 0 if nobody asks for masses */
        cu_address scores;      /* decode: float[sequence, query head][ld_scores]; 0 likewise */
        cu_address weights;     /* float[sequence, KV head][ld_scores] */
        uint64_t ld_scores;
};

/*
 * Tiles that a warp has in shared memory (GPU_ATTEND_LEAST_STAGES, where there is little of it),
 * bytes of one (keys, values, positions and rotations), ...
 */
#define GPU_ATTEND_STAGES(dim) ((dim) <= 64 ? 6 : 3)
#define GPU_ATTEND_STAGE_BYTES(dim) (GPU_ATTEND_TILE * ((dim) * 4 + 8))

/* ... and of its queries, which warps have in common if none are rotated. */
#define GPU_ATTEND_QUERY_BYTES(dim, form) \
        (GPU_ATTEND_TILE * (dim)*2 * ((form) == GPU_ATTEND_WIDE ? 2 : 1))

#endif
