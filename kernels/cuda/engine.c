/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Launches the transformer operations other than matrix products and attention. Each is one kernel
 * over rows.
 */

#include "kernels/cuda/engine.h"

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/cuda/images.h"

GPU_USES(engine);

enum { THREADS = 256, MOST_BLOCKS = 65535 };

/* A grid over all numbers, one per thread at a time. */
static struct gpu_grid over(uint64_t numbers) {
        return (struct gpu_grid){(uint32_t)MIN(DIV_UP(numbers, THREADS), MOST_BLOCKS), 1, 1,
                                 THREADS, 0};
}

static struct gpu_grid over_rows(uint32_t rows) {
        return (struct gpu_grid){MIN(rows, MOST_BLOCKS), 1, 1, THREADS, 0};
}

int gpu_embed(struct gpu *gpu, cu_stream stream, const struct gpu_embed *a) {
        return a->n == 0 ? 0 :
                           gpu_launch(gpu, GPU_KERNEL_embed, over((uint64_t)a->n * a->width),
                                      stream, a);
}

int gpu_norm(struct gpu *gpu, cu_stream stream, const struct gpu_norm *a) {
        return a->n == 0 ? 0 : gpu_launch(gpu, GPU_KERNEL_norm, over_rows(a->n), stream, a);
}

int gpu_rotate(struct gpu *gpu, cu_stream stream, const struct gpu_rotate *a) {
        enum gpu_kernel kernel = kvd_is_narrow(a->number) ? GPU_KERNEL_rotate_narrow :
                                                            GPU_KERNEL_rotate;

        return a->n == 0 ? 0 : gpu_launch(gpu, kernel, over_rows(a->n), stream, a);
}

int gpu_swiglu(struct gpu *gpu, cu_stream stream, const struct gpu_swiglu *a) {
        return a->n == 0 ? 0 :
                           gpu_launch(gpu, GPU_KERNEL_swiglu, over((uint64_t)a->n * a->width),
                                      stream, a);
}
