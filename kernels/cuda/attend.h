/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_ATTEND_H
#define KVD_KERNELS_CUDA_ATTEND_H

/*
 * Attention over keys and values in blocks of a pool, for all heads of a layer and many sequences
 * at once: what kernels/attend.h does for one head of one sequence. Members that are zero are off;
 * with all of them off it is causal attention over all positions. Products are summed in fp32
 * (16-bit keys and values on the matrix units, with queries and weights as sums of two 16-bit
 * numbers), so results are within the tolerances of the reference, not equal to it. The same call
 * gives the same bits every time.
 *
 * A position whose block is GPU_NO_BLOCK, or that is not chosen, is treated as if it did not exist.
 * A query that sees nothing gets zeros.
 *
 * A decode must move 2 * dim elements for every position seen and KV head; queries and results are
 * small compared to that. Numbers of less than 16 bits are not for the matrix units.
 */

#include "kernels/cuda/gpu.h"

struct gpu_attend {
        /*
         * Keys and values. Position i of sequence s is slot i % block_tokens of block ids[s *
         * ld_blocks + i / block_tokens]. The row of KV head h begins k_offset (or v_offset) + h *
         * head_stride + slot * token_stride bytes into the block. (HND: a head's slots are
         * contiguous; NHD: a slot's heads are.)
         */
        struct gpu_blocks blocks;
        uint64_t ld_blocks;
        uint64_t k_offset, v_offset;
        uint64_t head_stride, token_stride;
        uint32_t number; /* enum kvd_number of keys and values; below 16 bits, of any alignment */
        uint32_t block_tokens;
        uint32_t dim;             /* 1 to 256; even if keys are quantised */
        uint32_t kv_heads, group; /* query head h * group + g uses KV head h; group <= 128 */

        /*
         * Sequences. The last token of s sees the positions [0, lengths[s]); if causal, each
         * earlier token sees one position less.
         */
        uint32_t n_sequences;
        uint32_t max_length; /* maximum of lengths */
        cu_address lengths;  /* const uint32_t * */
        /* prefill only: const uint32_t *; s has tokens [starts[s], starts[s + 1]) */
        cu_address starts;
        uint32_t max_tokens;    /* prefill: maximum number of tokens of a sequence */
        uint32_t bidirectional; /* if not 0, every token sees [0, lengths[s]) */

        /* Token-sparse: only some of those positions; strictly ascending. */
        cu_address chosen;   /* const uint32_t *, at (s * kv_heads + h) * ld_chosen */
        cu_address n_chosen; /* const uint32_t *, at s * kv_heads + h */
        uint64_t ld_chosen;
        uint32_t max_chosen; /* maximum of n_chosen */

        /*
         * Queries and results: token i (decode: sequence i), head j is at q + (i * q_token + j *
         * q_head) elements, and likewise for out. q_number, out_number: enum kvd_number, 16 or
         * 32 bits.
         */
        uint32_t q_number, out_number;
        float scale; /* > 0 */
        cu_address q, out;
        uint64_t q_token, q_head, out_token, out_head;

        /*
         * As in kernels/attend.h: the rotation of block b of the table of sequence s is rotation[s
         * * ld_blocks + b].
         */
        cu_address rotation; /* const uint32_t *: 0, or 1 + the index of its rotation */
        /* const float *, [dim] each: cosines, then sines; dim is even */
        cu_address rotations;

        /*
         * Attention mass, summed over the tokens and the query heads of a KV head, and added to the
         * previous contents: that of block b at block_mass[(s * kv_heads + h) * ld_block_mass + b],
         * that of a position likewise in token_mass.
         */
        cu_address block_mass, token_mass; /* float * */
        uint64_t ld_block_mass, ld_token_mass;

        /*
         * Columns (positions, or chosen positions) that one thread block processes; a multiple of
         * 16. 0: in decode, as many as keep this device busy; in prefill, all of them, which leaves
         * much of the device idle if there are few tokens and many columns. A token's results
         * depend on this number. If the caller sets it, the results of a decode do not depend on
         * the rest of the batch. Those of a prefill never depend on the other tokens of the call.
         */
        uint32_t split;

        cu_address workspace; /* aligned to 256; in use until the launch has completed */
        uint64_t workspace_bytes;
};

/*
 * Bytes of workspace needed. The number depends on the device, on sizes and on which members are
 * off, not on the contents of device memory. Calls the driver, so the context must be current, as
 * for a launch. 0 if none is needed, or if arguments are invalid (the reason is in gpu->why).
 */
uint64_t gpu_attend_workspace(struct gpu *gpu, const struct gpu_attend *a);

/*
 * One token per sequence. 0, -EINVAL if members do not agree, -ENOBUFS if the workspace is too
 * small; the reason is in gpu->why.
 */
int gpu_attend_decode(struct gpu *gpu, cu_stream stream, const struct gpu_attend *a);

/*
 * starts[s + 1] - starts[s] tokens of sequence s, the last of them at position lengths[s] - 1 if
 * causal. Results as above. For kvlm, and for engines that have no prefill kernel: products of 16 x
 * 8 x 16 by one warp at a time leave most of an H100's matrix units idle (estimated: a quarter of
 * what kernels made for them reach).
 */
int gpu_attend_prefill(struct gpu *gpu, cu_stream stream, const struct gpu_attend *a);

#endif
