/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Launches the kernel that compacts tokens. Each plane of a head is processed by a row of thread
 * blocks, which divide its bytes among them.
 */

#include "kernels/cuda/block.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/util.h"
#include "kernels/cuda/images.h"

GPU_USES(block);

enum { THREADS = 256, AHEAD = 4 };

static int refuse(struct gpu *gpu, const char *why) {
        snprintf(gpu->why, sizeof gpu->why, "compact: %s", why);
        return -EINVAL;
}

static uint64_t places(const struct gpu_compact *a) {
        return a->blocks.base | a->blocks.block_bytes | a->offset | a->layer_stride | a->plane |
               a->head_stride | a->slot_stride | a->bytes;
}

int gpu_compact(struct gpu *gpu, cu_stream stream, const struct gpu_compact *a) {
        uint64_t rows = 2 * (uint64_t)a->layers * a->heads, units;
        struct gpu_compact prepared = *a;

        if (rows == 0 || a->n == 0 || a->bytes == 0)
                return 0;
        prepared.unit = places(a) % 16 == 0 ? 16 : places(a) % 2 == 0 ? 2 : 1;
        units = (uint64_t)a->n * (a->bytes / prepared.unit);
        if (!a->blocks.ids || !a->index || a->per_block == 0)
                return refuse(gpu, "an address is missing, or a block has no tokens");
        if (rows > 2 * GPU_COMPACT_HEADS || units > UINT32_MAX / 2)
                return refuse(gpu, "more rows or tokens than one launch takes");
        return gpu_launch(gpu, GPU_KERNEL_compact,
                          (struct gpu_grid){(uint32_t)MIN(DIV_UP(units, THREADS * AHEAD), 4096),
                                            (uint32_t)rows, 1, THREADS, 0},
                          stream, &prepared);
}
