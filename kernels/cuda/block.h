/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_BLOCK_H
#define KVD_KERNELS_CUDA_BLOCK_H

/* Compacts scattered tokens on a GPU: compact of kernels/block.h for many layers and heads. */

#include "kernels/cuda/gpu.h"

/*
 * For every layer and head, copies keys and values of token index[j] of the blocks to token j of
 * the blocks from ids[to] on, j < n. Source and destination blocks must differ. Token t is slot t %
 * per_block of block ids[t / per_block]. Its keys are at offset + layer * layer_stride + head *
 * head_stride + slot * slot_stride, its values plane bytes further; all in bytes. Tokens whose
 * source or destination block is not resident are skipped.
 */
#define GPU_COMPACT_HEADS 32767u /* maximum number of heads, over all layers of a launch */

struct gpu_compact {
        struct gpu_blocks blocks;
        uint64_t offset, layer_stride, plane, head_stride, slot_stride;
        cu_address index; /* const uint32_t [layer][head][n] */
        uint32_t to, layers, heads, per_block, n;
        uint32_t bytes; /* bytes of a token's keys */
        uint32_t unit;  /* set by the function: bytes that are copied at a time: 16, 2 or 1 */
};

int gpu_compact(struct gpu *gpu, cu_stream stream, const struct gpu_compact *a);

#endif
