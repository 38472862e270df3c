/* SPDX-License-Identifier: Apache-2.0 */

/* Launches HShare's kernel. A warp counts the bits of one row of one pair. */

#include "kernels/cuda/hshare.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/util.h"
#include "kernels/cuda/images.h"

GPU_USES(hshare);

enum { THREADS = 256, WARPS = THREADS / 32 };

static int refuse(struct gpu *gpu, const char *why) {
        snprintf(gpu->why, sizeof gpu->why, "HShare: %s", why);
        return -EINVAL;
}

int gpu_overlap(struct gpu *gpu, cu_stream stream, const struct gpu_overlap *a) {
        struct gpu_grid grid = {DIV_UP(a->end - a->first, (uint32_t)WARPS), a->n, 1, THREADS, 0};

        if (!a->pairs || !a->to || !a->blocks.ids || !a->blocks.block_bytes ||
            (a->blocks.base | a->blocks.block_bytes) % sizeof(uint64_t))
                return refuse(gpu, "an address is missing, or blocks are not aligned to 8 bytes");
        if (a->first > a->end || a->n > GPU_OVERLAP_PAIRS)
                return refuse(gpu, "rows that end before they begin, or too many pairs");
        return a->n == 0 || a->first == a->end ?
                       0 :
                       gpu_launch(gpu, GPU_KERNEL_overlap, grid, stream, a);
}
