/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_KEYDIFF_H
#define KVD_KERNELS_CUDA_KEYDIFF_H

/*
 * KeyDiff on a GPU: the operations of kernels/keydiff.h over blocks of a pool, for any number of
 * layers at once. What is valid, and what a score is, is said there; sums run in another order
 * here, one that depends on the shape alone: the same call gives the same bits on every device.
 * Scores are within 2e-6 of the reference, anchors within 1e-5 of their length.
 *
 * Anchors need all keys before the first score can be known: both read the keys. Scores are made
 * from the last token to the first, so that what the anchors' pass left in the L2 is still there.
 * With anchors of summaries (ipc/base/summary.h), 1/8 of the keys at 16 bits and 16 tokens a block,
 * score alone is enough.
 *
 * -EINVAL: a number of a type that is none, a size of 0, dim above GPU_KEYDIFF_DIM.
 */

#include "kernels/cuda/gpu.h"

#define GPU_KEYDIFF_DIM 256u

/* As struct kvd_key_rows: head h of token t and layer l begins, in block ids[t / per_block], at offset + l layer_stride
 * bytes, and there at element h head_stride + t % per_block token_stride. Aligned to 16 bytes they are read fast. */
struct gpu_key_rows {
        struct gpu_blocks blocks;
        uint64_t offset, layer_stride;      /* bytes */
        uint64_t head_stride, token_stride; /* elements */
        uint32_t layers, heads, dim, per_block;
        uint32_t number; /* enum kvd_number */
};

struct gpu_keydiff {
        struct gpu_key_rows keys;
        uint32_t from, to;   /* tokens */
        uint64_t stride;     /* floats from a head's scores to the next's: at least to - from */
        cu_address sums;     /* float [layer][head][dim] */
        cu_address counts;   /* uint32_t [layer][head] */
        cu_address scores;   /* float [layer][head]: token t at t - from */
        cu_address scratch;  /* gpu_keydiff_scratch() bytes; aligned to 16 */
        uint32_t slice, slices; /* set by the functions below */
};

/* sums and counts grow by those of the tokens from <= t < to. */
int gpu_keydiff_anchor(struct gpu *gpu, cu_stream stream, const struct gpu_keydiff *a);

/* Scores against sums, which may be means as well. Uses neither counts nor scratch. */
int gpu_keydiff_score(struct gpu *gpu, cu_stream stream, const struct gpu_keydiff *a);

size_t gpu_keydiff_scratch(const struct gpu_keydiff *a);

/*
 * The best of each head and block, and their mean over the heads of all layers: bits as the
 * reference's.
 */
struct gpu_keydiff_blocks {
        cu_address mean;   /* float [blocks], blocks being n / per_block rounded up */
        cu_address best;   /* float [head][blocks] */
        cu_address scores; /* float: head h, token t at h * stride + t */
        uint64_t stride;
        uint32_t heads;    /* layers x heads, as gpu_keydiff_score() leaves them */
        uint32_t n, per_block;
};

/* Reads 4 heads n bytes, writes 4 (heads + 1) blocks. */
int gpu_keydiff_blocks(struct gpu *gpu, cu_stream stream, const struct gpu_keydiff_blocks *a);

#endif
