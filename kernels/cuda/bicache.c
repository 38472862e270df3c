/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Launches BiCache's kernels. A token is processed by a team of two threads, or of four unless its
 * numbers have 16 bits.
 */

#include "kernels/cuda/bicache.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/cuda/images.h"
#include "kernels/ops.h"

GPU_USES(bicache);

enum { THREADS = 256, MOST_BLOCKS = 65535 };

int gpu_products(struct gpu *gpu, cu_stream stream, const struct gpu_products *a) {
        uint64_t rows = (uint64_t)a->planes * a->tokens;
        bool narrow = a->number >= KVD_NUMBER_Q8 && a->number <= KVD_NUMBER_E5M2;
        uint64_t threads = rows * (narrow || a->number == KVD_NUMBER_F32 ? 4 : 2);

        if (rows == 0 || a->heads == 0 || a->dim == 0)
                return 0;
        if (a->per_block == 0 || a->number < KVD_NUMBER_F32 ||
            (!narrow && a->number > KVD_NUMBER_BF16) ||
            (kvd_is_quantised(a->number) && a->dim % 2)) {
                snprintf(
                        gpu->why, sizeof gpu->why,
                        "products: blocks of no tokens, an unknown element type, or an odd dimension");
                return -EINVAL;
        }
        return gpu_launch(gpu, narrow ? GPU_KERNEL_products_narrow : GPU_KERNEL_products,
                          (struct gpu_grid){(uint32_t)MIN(DIV_UP(threads, THREADS), MOST_BLOCKS), 1,
                                            1, THREADS, 0},
                          stream, a);
}
