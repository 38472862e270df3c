/* SPDX-License-Identifier: Apache-2.0 */

/* Launches the kernel that summarises blocks. Its shared memory depends on the block's shape. */

#include "kernels/cuda/summarise.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/cuda/images.h"
#include "kernels/hshare.h"

GPU_USES(summarise);

enum { THREADS = 256, WARPS = THREADS / 32, CHUNK = 1024, TILE = 16 /* as in summarise.cu */ };

static int refuse(struct gpu *gpu, const char *why) {
        snprintf(gpu->why, sizeof gpu->why, "summaries: %s", why);
        return -EINVAL;
}

static bool is_number(uint32_t number) {
        return (number >= KVD_NUMBER_F32 && number <= KVD_NUMBER_BF16) ||
               (number >= KVD_NUMBER_Q8 && number <= KVD_NUMBER_E5M2);
}

static uint32_t element_bytes(uint32_t number) {
        return number == KVD_NUMBER_F32 ? 4 : kvd_is_narrow(number) ? 1 : 2;
}

static uint64_t plane_elements(const struct gpu_block_shape *s) {
        return (uint64_t)s->heads * s->tokens * s->dim;
}

static int check(struct gpu *gpu, const struct gpu_summarise *a) {
        const struct gpu_block_shape *s = &a->shape;
        uint64_t misfit = a->blocks.base | a->blocks.block_bytes | a->offset;

        if (!is_number(s->number))
                return refuse(gpu, "numbers of an unknown type");
        if (s->order != GPU_ORDER_HND && s->order != GPU_ORDER_NHD)
                return refuse(gpu, "an unknown order");
        if (!s->layers || !s->heads || !s->tokens || !s->dim || s->dim > GPU_SUMMARISE_DIM ||
            plane_elements(s) > UINT32_MAX || (kvd_is_quantised(s->number) && s->dim % 2))
                return refuse(gpu, "no such layers, heads, tokens or dimensions");
        if (!a->n_channels || a->n_channels > KVD_LABEL_CHANNELS_MAX || !a->channels)
                return refuse(gpu, "no channels, or too many");
        if (!a->blocks.base || !a->blocks.ids || misfit % element_bytes(s->number))
                return refuse(gpu, "blocks have no address, or one not aligned to their elements");
        if (!a->rows || (a->rows | a->row_bytes | a->norms_off | a->anchors_off | a->labels_off) %
                                sizeof(float))
                return refuse(gpu, "no rows, or rows that are not aligned for floats");
        return 0;
}

/* Chunks of a plane. Those of quantised numbers have whole rows. */
static uint64_t chunks_of(const struct gpu_block_shape *s) {
        return kvd_is_quantised(s->number) ? DIV_UP(s->heads * s->tokens, CHUNK / s->dim) :
                                             DIV_UP(plane_elements(s), CHUNK);
}

/* Bytes of shared memory: sums of both planes' chunks, then a tile for each warp. */
static size_t shared_of(const struct gpu_block_shape *s) {
        size_t element = kvd_is_narrow(s->number) ? sizeof(float) : element_bytes(s->number),
               sums = ALIGN_UP(2 * chunks_of(s) * sizeof(float), 16);

        return sums + (size_t)WARPS * TILE * (ALIGN_UP(s->dim * element, 16) + 16);
}

int gpu_summarise(struct gpu *gpu, cu_stream stream, const struct gpu_summarise *a) {
        enum gpu_kernel kernel = kvd_is_narrow(a->shape.number) ? GPU_KERNEL_summarise_narrow :
                                                                  GPU_KERNEL_summarise;
        int r = check(gpu, a);

        if (r < 0 || a->n == 0)
                return r;
        if (shared_of(&a->shape) > gpu->shared_bytes ||
            (uint64_t)a->n * a->shape.layers > INT32_MAX)
                return refuse(gpu, "planes too large, or more blocks than one launch takes");
        return gpu_launch(gpu, kernel,
                          (struct gpu_grid){a->n * a->shape.layers, 1, 1, THREADS,
                                            shared_of(&a->shape)},
                          stream, a);
}
