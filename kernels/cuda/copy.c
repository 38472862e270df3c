/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/copy.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/util.h"

enum { THREADS = 256, PIECE = THREADS * 4 * 16 };

int gpu_gather(struct gpu *gpu, cu_stream stream, const struct gpu_gather *a) {
        uint64_t pieces = a->n * DIV_UP(a->bytes, PIECE);
        uint32_t blocks;

        if (a->bytes % 16 || a->offset % 16 || a->blocks.block_bytes % 16 || a->blocks.base % 16 || a->packed % 16) {
                snprintf(gpu->why, sizeof gpu->why, "gather: addresses and sizes are multiples of 16");
                return -EINVAL;
        }
        if (pieces == 0)
                return 0;
        blocks = MAX(gpu_resident_blocks(gpu, GPU_KERNEL_gather, THREADS, 0), 1); /* if none, the launch says why */
        return gpu_launch(gpu, GPU_KERNEL_gather, (struct gpu_grid){(uint32_t)MIN(pieces, blocks), 1, 1, THREADS, 0},
                          stream, a);
}
