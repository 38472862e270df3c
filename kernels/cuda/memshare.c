/* SPDX-License-Identifier: Apache-2.0 */

/* Launches MemShare's kernels. */

#include "kernels/cuda/memshare.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/cuda/images.h"
#include "kernels/memshare.h"

GPU_USES(memshare);

enum {
        THREADS = 256,
        WARPS = THREADS / 32,
        CHUNK = 1024,
        LAYERS_MOST = 16 /* layers of a step: one plane per lane */,
        LAYERS_USUAL = 4
};

static int refuse(struct gpu *gpu, const char *why) {
        snprintf(gpu->why, sizeof gpu->why, "MemShare: %s", why);
        return -EINVAL;
}

static uint32_t element_bytes(uint32_t number) {
        return number == KVD_NUMBER_F32 ? 4 : kvd_is_narrow(number) ? 1 : 2;
}

static bool is_number(uint32_t number) {
        return (number >= KVD_NUMBER_F32 && number <= KVD_NUMBER_BF16) ||
               (number >= KVD_NUMBER_Q8 && number <= KVD_NUMBER_E5M2);
}

static int check(struct gpu *gpu, const struct gpu_blocks *blocks, uint64_t offset,
                 const struct gpu_block_shape *s) {
        if (!is_number(s->number))
                return refuse(gpu, "numbers of an unknown type");
        if (s->order != GPU_ORDER_HND && s->order != GPU_ORDER_NHD)
                return refuse(gpu, "an unknown order");
        if (!s->layers || !s->heads || !s->tokens || !s->dim)
                return refuse(gpu, "no layers, heads, tokens or dimensions");
        if (kvd_is_quantised(s->number) && s->dim % 2)
                return refuse(gpu, "quantised numbers of an odd dimension");
        if ((uint64_t)s->heads * s->tokens * s->dim > UINT32_MAX)
                return refuse(gpu, "planes of 2^32 or more elements");
        if (!blocks->base || !blocks->ids ||
            (blocks->base | blocks->block_bytes | offset) % element_bytes(s->number))
                return refuse(gpu, "blocks have no address, or one not aligned to their elements");
        return 0;
}

static uint64_t plane_elements(const struct gpu_block_shape *s) {
        return (uint64_t)s->heads * s->tokens * s->dim;
}

/* Rows of a chunk, if chunks have whole rows. */
static uint32_t rows_together(const struct gpu_block_shape *s) {
        return s->dim >= CHUNK ? 1 : CHUNK / s->dim;
}

/* Bytes of shared memory in which warps expand numbers of less than 16 bits. */
static size_t expansion_of(const struct gpu_block_shape *s) {
        return kvd_is_narrow(s->number) ? WARPS * 2 * sizeof(float) * MAX(s->dim, CHUNK) : 0;
}

/* ---- distances ------------------------------------------------------------------------------- */

/* Chunks of a plane, and lanes that sum up one chunk, as in squares.cuh. */
struct work {
        uint32_t chunks, lanes;
};

static struct work work_of(const struct gpu_distances *a, bool rotated) {
        bool norms = a->metric == KVD_MEMSHARE_MEAN_L2, narrow = kvd_is_narrow(a->shape.number);
        uint32_t rows = a->shape.heads * a->shape.tokens,
                 chain = narrow                            ? 32 :
                         a->shape.number == KVD_NUMBER_F32 ? 4 :
                                                             2;
        uint32_t together = norms ? 1 : rows_together(&a->shape);

        if (rotated || (kvd_is_quantised(a->shape.number) && !norms))
                return (struct work){DIV_UP(rows, together), chain};
        if (norms)
                return (struct work){rows, 2 * chain};
        return (struct work){(uint32_t)DIV_UP((uint64_t)rows * a->shape.dim, CHUNK), 4 * chain};
}

/* Enough layers per step to give all threads work; more if there is no limit to check. */
static uint32_t layers_together(const struct gpu_distances *a, struct work keys) {
        uint32_t enough = DIV_UP(THREADS, (a->half ? 1 : 2) * keys.chunks * keys.lanes);

        return MIN(MIN(a->shape.layers, LAYERS_MOST),
                   isinf(a->limit) ? MAX(enough, LAYERS_USUAL) : enough);
}

static size_t room_of(const struct gpu_distances *a) {
        struct work keys = work_of(a, a->half > 0), values = work_of(a, false);

        return (size_t)2 * 2 * a->together * MAX(keys.chunks, values.chunks) * sizeof(float) +
               expansion_of(&a->shape);
}

static enum gpu_kernel kernel_of(const struct gpu_distances *a) {
        uint32_t vector = 16 / element_bytes(a->shape.number);

        if (kvd_is_narrow(a->shape.number))
                return GPU_KERNEL_memshare_expanded;
        if ((a->blocks.base | a->blocks.block_bytes | a->offset) % 16 || a->shape.dim % vector ||
            a->half % vector)
                return GPU_KERNEL_memshare_narrow;
        return a->half || a->metric == KVD_MEMSHARE_MEAN_L2 ? GPU_KERNEL_memshare_rows :
                                                              GPU_KERNEL_memshare_plain;
}

/* At most as many thread blocks as run at once; each takes one pair after the other. */
static int launch(struct gpu *gpu, cu_stream stream, enum gpu_kernel kernel,
                  const struct gpu_distances *a, size_t shared) {
        uint32_t most;

        if (shared > gpu->shared_bytes)
                return refuse(gpu, "planes have more chunks than fit into shared memory");
        most = gpu_resident_blocks(gpu, kernel, THREADS, shared);
        if (!most)
                return -ENOSYS;
        return gpu_launch(gpu, kernel, (struct gpu_grid){MIN(a->n, most), 1, 1, THREADS, shared},
                          stream, a);
}

static int check_pairs(struct gpu *gpu, const struct gpu_distances *a) {
        if (a->metric < KVD_MEMSHARE_FRO_NORM || a->metric > KVD_MEMSHARE_RELATIVE)
                return refuse(gpu, "an unknown metric");
        if (a->metric == KVD_MEMSHARE_RELATIVE && !a->norms)
                return refuse(gpu, "relative distances need norms");
        if (a->half && (2 * (uint64_t)a->half > a->shape.dim || !a->angles))
                return refuse(gpu,
                              "a rotation of more dimensions than there are, or without angles");
        if (!a->pairs || !a->distances || a->distances % sizeof(double))
                return refuse(gpu, "no address of pairs, or none for distances");
        return 0;
}

int gpu_distances(struct gpu *gpu, cu_stream stream, const struct gpu_distances *a) {
        struct gpu_distances prepared = *a;
        int r = check(gpu, &a->blocks, a->offset, &a->shape);

        if (r == 0)
                r = check_pairs(gpu, a);
        if (r < 0 || a->n == 0)
                return r;
        prepared.together = layers_together(a, work_of(a, a->half > 0));
        prepared.bounded = a->norms && !isinf(a->limit);
        if (prepared.bounded)
                r = launch(gpu, stream, GPU_KERNEL_memshare_bound, &prepared, 0);
        return r < 0 ? r : launch(gpu, stream, kernel_of(a), &prepared, room_of(&prepared));
}

/* ---- norms ----------------------------------------------------------------------------------- */

static uint64_t chunks_of(const struct gpu_block_shape *s) {
        return kvd_is_quantised(s->number) ? DIV_UP(s->heads * s->tokens, rows_together(s)) :
                                             DIV_UP(plane_elements(s), CHUNK);
}

int gpu_norms(struct gpu *gpu, cu_stream stream, const struct gpu_norms *a) {
        enum gpu_kernel kernel = kvd_is_narrow(a->shape.number) ?
                                         GPU_KERNEL_memshare_norms_expanded :
                                         GPU_KERNEL_memshare_norms;
        int r = check(gpu, &a->blocks, a->offset, &a->shape);
        size_t shared;

        if (r < 0 || a->n == 0)
                return r;
        shared = 2 * chunks_of(&a->shape) * sizeof(float) + expansion_of(&a->shape);
        if (!a->to || shared > gpu->shared_bytes || (uint64_t)a->n * a->shape.layers > INT32_MAX)
                return refuse(
                        gpu,
                        "norms: no address for them, planes too large, or more than one launch makes");
        return gpu_launch(gpu, kernel,
                          (struct gpu_grid){a->n * a->shape.layers, 1, 1, THREADS, shared}, stream,
                          a);
}
