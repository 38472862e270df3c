/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Launches BiCache's kernel. A token is processed by a team of two threads, or four for 32-bit
 * numbers.
 */

#include "kernels/cuda/bicache.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/util.h"
#include "kernels/cuda/images.h"
#include "kernels/ops.h"

GPU_USES(bicache);

enum { THREADS = 256, MOST_BLOCKS = 65535 };

int gpu_products(struct gpu *gpu, cu_stream stream, const struct gpu_products *a) {
        uint64_t rows = (uint64_t)a->planes * a->tokens;
        uint64_t threads = rows * (a->number == KVD_NUMBER_F32 ? 4 : 2);

        if (rows == 0 || a->heads == 0 || a->dim == 0)
                return 0;
        if (a->per_block == 0 || a->number < KVD_NUMBER_F32 || a->number > KVD_NUMBER_BF16) {
                snprintf(gpu->why, sizeof gpu->why,
                         "products: blocks of no tokens, or an unknown element type");
                return -EINVAL;
        }
        return gpu_launch(gpu, GPU_KERNEL_products,
                          (struct gpu_grid){(uint32_t)MIN(DIV_UP(threads, THREADS), MOST_BLOCKS), 1,
                                            1, THREADS, 0},
                          stream, a);
}
