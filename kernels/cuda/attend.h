/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_ATTEND_H
#define KVD_KERNELS_CUDA_ATTEND_H

/*
 * Attention over keys and values that lie in blocks of a pool, for all heads of a layer and many
 * sequences at once: what kernels/attend.h does for one head of one sequence. Members that are zero
 * are off, and what is left is causal attention over all positions. Products are summed in fp32 (of
 * 16-bit keys and values on the matrix units, queries and weights as sums of two 16-bit numbers),
 * so results are within the tolerances of kernels' references, not equal. The same call gives the
 * same bits every time.
 *
 * A position whose block is GPU_NO_BLOCK, or that is not chosen, is as if it had never been. A
 * query that sees nothing gets zeros.
 *
 * Bytes that a decode must move: 2 * dim elements for every position seen and KV head; queries and
 * results are small against it.
 */

#include "kernels/cuda/gpu.h"

struct gpu_attend {
        /*
         * Keys and values. Position i of sequence s is slot i % block_tokens of block number ids[s
         * * ld_blocks + i / block_tokens]; what KV head h has there begins k_offset + h *
         * head_stride + slot * token_stride bytes into the block (HND: a head's slots one after the
         * other; NHD: a slot's heads).
         */
        struct gpu_blocks blocks;
        uint64_t ld_blocks;
        uint64_t k_offset, v_offset;
        uint64_t head_stride, token_stride;
        uint32_t number;         /* enum kvd_number of both */
        uint32_t block_tokens;
        uint32_t dim;            /* 1 to 256 */
        uint32_t kv_heads, group; /* query head h * group + g goes with KV head h; group <= 128 */

        /*
         * Sequences. The last token of s sees the positions [0, lengths[s]); the one before, if
         * causal, one less.
         */
        uint32_t n_sequences;
        uint32_t max_length;     /* none is longer */
        cu_address lengths;      /* const uint32_t * */
        /* prefill: const uint32_t *: s has tokens [starts[s], starts[s + 1]) */
        cu_address starts;
        uint32_t max_tokens;     /* prefill: none has more */
        uint32_t bidirectional;  /* every token sees [0, lengths[s]) */

        /* Token-sparse: of those, only some positions; ascending, none twice. */
        cu_address chosen;       /* const uint32_t *, at (s * kv_heads + h) * ld_chosen */
        cu_address n_chosen;     /* const uint32_t *, at s * kv_heads + h */
        uint64_t ld_chosen;
        uint32_t max_chosen;     /* none is longer */

        /*
         * Queries and results: token i (decode: sequence i), head j at q + (i * q_token + j *
         * q_head) elements.
         */
        uint32_t q_number, out_number;
        float scale;             /* > 0 */
        cu_address q, out;
        uint64_t q_token, q_head, out_token, out_head;

        /*
         * As kernels/attend.h: the rotation of a block is at rotation[s * ld_blocks + its place in
         * the table].
         */
        cu_address rotation;         /* const uint32_t *: 0, or 1 + the number of its rotation */
        /* const float *, [dim] each: cosines, then sines; dim is even */
        cu_address rotations;

        /*
         * Attention mass, summed over the tokens and the query heads of a KV head, added to what is
         * there: block b's at block_mass[(s * kv_heads + h) * ld_block_mass + b], of position i
         * likewise.
         */
        cu_address block_mass, token_mass; /* float * */
        uint64_t ld_block_mass, ld_token_mass;

        /*
         * Columns (positions, or chosen ones) that one block of threads goes over; a multiple of
         * 16. 0: in decode as many as keep this device busy, in prefill all of them, which leaves
         * much of it idle if there are few tokens and many columns. A token's results depend on
         * this number. With one of the caller's own they do not depend on what else is in a batch
         * of decodes; in prefill they never depend on the other tokens of the call.
         */
        uint32_t split;

        cu_address workspace;    /* aligned to 256; free again when the launch has passed */
        uint64_t workspace_bytes;
};

/*
 * Bytes of workspace; they depend on the device, on sizes and on which members are off, not on what
 * is in device memory. The driver is asked, so the context is current, as for a launch.
 */
uint64_t gpu_attend_workspace(struct gpu *gpu, const struct gpu_attend *a);

/*
 * One token a sequence. -EINVAL: members that do not agree, -ENOBUFS: workspace too small; the
 * reason in gpu->why.
 */
int gpu_attend_decode(struct gpu *gpu, cu_stream stream, const struct gpu_attend *a);

/*
 * starts[s + 1] - starts[s] tokens of sequence s, the last of them at position lengths[s] - 1 if
 * causal. For kvlm, and for engines that have none: products of 16 x 8 x 16 by one warp at a time
 * leave most of an H100's matrix units idle (an estimate: a quarter of what kernels made for them
 * reach), so engines bring their own.
 */
int gpu_attend_prefill(struct gpu *gpu, cu_stream stream, const struct gpu_attend *a);

#endif
