/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_KEYDIFF_H
#define KVD_KERNELS_CUDA_KEYDIFF_H

/*
 * KeyDiff on a GPU: the operations of kernels/keydiff.h over blocks of a pool, for any number of
 * layers at once. Validity and scores are defined there. Sums run in a different order here, which
 * depends on the shape alone: the same call gives the same bits on every device. Scores are within
 * 2e-6 of the reference, anchors within 1e-5 of their length.
 *
 * All keys must be read for the anchors before the first score can be computed, so both operations
 * read the keys. Scores are computed from the last token to the first, so that keys which the
 * anchors' pass left in the L2 cache are still there. With the anchors of summaries
 * (ipc/base/summary.h; 1/8 of the bytes of the keys with 16 bits and 16 tokens per block), score
 * alone is enough.
 *
 * -EINVAL: an unknown type, a size of 0, dim above GPU_SCORE_DIM, or an odd one if keys are
 * quantised.
 */

#include "kernels/cuda/gpu.h"

#define GPU_SCORE_DIM 256u

/*
 * As struct kvd_key_rows: in block ids[t / per_block], head h of token t and layer l begins at
 * offset + l * layer_stride bytes plus h * head_stride + t % per_block * token_stride elements; of
 * numbers of less than 16 bits, bytes. Rows of others that are aligned to 16 bytes are read fastest.
 */
struct gpu_key_rows {
        struct gpu_blocks blocks;
        uint64_t offset, layer_stride;      /* bytes */
        uint64_t head_stride, token_stride; /* elements, or bytes */
        uint32_t layers, heads, dim, per_block;
        uint32_t number; /* enum kvd_number */
};

struct gpu_scores {
        struct gpu_key_rows keys;
        uint32_t from, to;      /* tokens */
        uint64_t stride;        /* floats from a head's scores to the next's: at least to - from */
        cu_address sums;        /* float [layer][head][dim] */
        cu_address counts;      /* uint32_t [layer][head] */
        cu_address scores;      /* float [layer][head][stride]: token t at t - from */
        cu_address scratch;     /* gpu_score_scratch() bytes; aligned to 16 */
        uint32_t slice, slices; /* set by the functions below */
};

/* Adds the directions of the tokens from <= t < to to sums, and their number to counts. */
int gpu_anchor(struct gpu *gpu, cu_stream stream, const struct gpu_scores *a);

/* Scores against the anchors in sums, which may also be means. counts and scratch are not used. */
int gpu_score(struct gpu *gpu, cu_stream stream, const struct gpu_scores *a);

size_t gpu_score_scratch(const struct gpu_scores *a);

/*
 * The best score of each head and block, and its mean over the heads of all layers. The bits equal
 * the reference's.
 */
struct gpu_block_scores {
        cu_address mean;   /* float [blocks], blocks being n / per_block rounded up */
        cu_address best;   /* float [head][blocks] */
        cu_address scores; /* float: head h, token t at h * stride + t */
        uint64_t stride;
        uint32_t heads; /* layers x heads, as gpu_score() leaves them */
        uint32_t n, per_block;
};

/* Reads 4 heads n bytes, writes 4 (heads + 1) blocks bytes. */
int gpu_block_scores(struct gpu *gpu, cu_stream stream, const struct gpu_block_scores *a);

#endif
