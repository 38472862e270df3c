/* SPDX-License-Identifier: Apache-2.0 */

/* In a file of its own: kvctl doctor launches this kernel as a test, and contains no other. */

#include "kernels/cuda/keydiff.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/util.h"
#include "kernels/cuda/images.h"

GPU_USES(keydiff_blocks);

enum { THREADS = 256, WARPS = THREADS / 32 };

int gpu_keydiff_blocks(struct gpu *gpu, cu_stream stream, const struct gpu_keydiff_blocks *a) {
        struct gpu_grid grid = {.y = 1, .z = 1, .threads = THREADS};

        if (a->heads == 0 || a->per_block == 0 || !a->mean || !a->best || !a->scores ||
            a->stride < a->n) {
                snprintf(gpu->why, sizeof gpu->why,
                         "KeyDiff: no heads, tokens, addresses, or too short a stride");
                return -EINVAL;
        }
        grid.x = DIV_UP(DIV_UP(a->n, a->per_block), (uint32_t)WARPS);
        return a->n == 0 ? 0 : gpu_launch(gpu, GPU_KERNEL_keydiff_blocks, grid, stream, a);
}
