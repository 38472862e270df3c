/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_SUMMARISE_H
#define KVD_KERNELS_CUDA_SUMMARISE_H

/*
 * Summaries of blocks (ipc/base/summary.h) in one launch: norms of planes, sums of keys'
 * directions, labels of keys. They are bit for bit what the workers' CPU kernels compute. Reads
 * each block once (for labels, keys are read again from shared memory, and for norms from the L2
 * cache), and writes a row each.
 */

#include "kernels/cuda/gpu.h"

#define GPU_SUMMARISE_DIM 256u

struct gpu_summarise {
        struct gpu_blocks blocks;
        uint64_t offset;              /* bytes from a block's start to layer 0's K */
        struct gpu_block_shape shape; /* dim up to GPU_SUMMARISE_DIM */
        uint32_t n;                   /* blocks: ids[0] to ids[n - 1] */
        uint32_t n_channels;          /* channels per label, up to 256 */
        /* const uint32_t [n]: number of tokens written; 0: all of every block */
        cu_address tokens;
        cu_address channels; /* const uint16_t [layer][head][n_channels] */
        /*
         * Row i is at rows + i * row_bytes; aligned to 4. The row of a block that is not resident is
         * not written; nor are stamps and the bytes behind the labels.
         */
        cu_address rows;
        uint64_t row_bytes;
        uint32_t norms_off, anchors_off, labels_off;
};

int gpu_summarise(struct gpu *gpu, cu_stream stream, const struct gpu_summarise *a);

#endif
