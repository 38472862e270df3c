/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/copy.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/util.h"

#define THREADS 256
#define PIECE 16384u /* as in copy.cu */

/* No more blocks of threads than run at once; each takes its share of the pieces. */
int gpu_gather(struct gpu *gpu, cu_stream stream, const struct gpu_gather *a) {
        uint64_t pieces = a->n * DIV_UP(a->bytes, PIECE);
        uint32_t most = gpu_resident_blocks(gpu, GPU_KERNEL_gather, THREADS, 0);
        struct gpu_grid grid = {(uint32_t)MIN(pieces, most), 1, 1, THREADS, 0};

        if (a->bytes % 16 || a->offset % 16 || a->blocks.base % 16 || a->blocks.block_bytes % 16 || a->packed % 16) {
                snprintf(gpu->why, sizeof gpu->why, "gather: addresses and sizes are multiples of 16");
                return -EINVAL;
        }
        if (!pieces)
                return 0;
        if (!most)
                return -ENOSYS;
        return gpu_launch(gpu, GPU_KERNEL_gather, grid, stream, a);
}
