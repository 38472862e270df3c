/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_BLOCK_H
#define KVD_KERNELS_CUDA_BLOCK_H

/* Scattered tokens together, on a GPU: compact of kernels/block.h for many layers and heads. */

#include "kernels/cuda/gpu.h"

/*
 * Of every layer and head: keys and values of token index[j] of the blocks become token j of those
 * from number `to` on, j < n, which are others. Token t is slot t % per_block of block ids[t /
 * per_block]; its keys are at offset + layer * layer_stride + head * head_stride + slot *
 * slot_stride, its values a plane behind. All in bytes. What has no block is passed over.
 */
#define GPU_COMPACT_HEADS 32767u /* of all layers of a launch */

struct gpu_compact {
        struct gpu_blocks blocks;
        uint64_t offset, layer_stride, plane, head_stride, slot_stride;
        cu_address index;        /* const uint32_t [layer][head][n] */
        uint32_t to, layers, heads, per_block, n;
        uint32_t bytes;          /* of a token's keys: a multiple of 2 */
        uint32_t wide;           /* set by the function: by 16 bytes at a time */
};

int gpu_compact(struct gpu *gpu, cu_stream stream, const struct gpu_compact *a);

#endif
