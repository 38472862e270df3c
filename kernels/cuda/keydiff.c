/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Launches KeyDiff's kernels. How tokens are divided into slices depends on the shape alone, so
 * that sums do not depend on the GPU.
 */

#include "kernels/cuda/keydiff.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/cuda/images.h"
#include "kernels/ops.h"

GPU_USES(keydiff);

enum { THREADS = 256, WARPS = THREADS / 32, SUM_THREADS = 512 };

/*
 * Slices have enough tokens to make merging cheap, and few enough that a short sequence keeps a
 * device busy.
 */
enum { SLICE_LEAST = 64, SLICE_MOST = 1024, WARPS_WANTED = 8192 };

static int refuse(struct gpu *gpu, const char *why) {
        snprintf(gpu->why, sizeof gpu->why, "KeyDiff: %s", why);
        return -EINVAL;
}

static bool is_number(uint32_t number) {
        return (number >= KVD_NUMBER_F32 && number <= KVD_NUMBER_BF16) ||
               (number >= KVD_NUMBER_Q8 && number <= KVD_NUMBER_E5M2);
}

static uint32_t element_bytes(uint32_t number) {
        return number == KVD_NUMBER_F32 ? 4 : kvd_is_narrow(number) ? 1 : 2;
}

static int check_keys(struct gpu *gpu, const struct gpu_key_rows *k) {
        uint64_t misfit = k->blocks.base | k->blocks.block_bytes | k->offset | k->layer_stride;

        if (!is_number(k->number))
                return refuse(gpu, "numbers of an unknown type");
        if (k->dim == 0 || k->dim > GPU_SCORE_DIM || (kvd_is_quantised(k->number) && k->dim % 2))
                return refuse(gpu, "no such head dimension");
        if (k->layers == 0 || k->heads == 0 || k->per_block == 0)
                return refuse(gpu, "no layers, heads or tokens");
        if (!k->blocks.base || !k->blocks.ids || misfit % element_bytes(k->number))
                return refuse(gpu, "blocks have no address, or one not aligned to their elements");
        return 0;
}

static uint32_t slice_of(const struct gpu_scores *a) {
        uint64_t rows = (uint64_t)(a->to - a->from) * a->keys.heads * a->keys.layers;

        return (uint32_t)MIN(MAX(DIV_UP(rows, WARPS_WANTED * SLICE_LEAST) * SLICE_LEAST,
                                 SLICE_LEAST),
                             SLICE_MOST);
}

static uint32_t slices_of(const struct gpu_scores *a) {
        return (uint32_t)DIV_UP((uint64_t)(a->to - a->from), slice_of(a));
}

static uint64_t parts_of(const struct gpu_scores *a) {
        return (uint64_t)a->keys.layers * a->keys.heads * slices_of(a);
}

size_t gpu_score_scratch(const struct gpu_scores *a) {
        return parts_of(a) * (a->keys.dim + 1) * sizeof(float);
}

static int prepare(struct gpu *gpu, struct gpu_scores *a) {
        int r = check_keys(gpu, &a->keys);

        if (r < 0)
                return r;
        if (a->from > a->to || !a->sums)
                return refuse(gpu, "a range that ends before it begins, or no sums");
        a->slice = slice_of(a);
        a->slices = slices_of(a);
        if (DIV_UP(parts_of(a), WARPS) > INT32_MAX)
                return refuse(gpu, "more keys than one launch takes");
        return 0;
}

static struct gpu_grid grid_of_parts(const struct gpu_scores *a) {
        return (struct gpu_grid){(uint32_t)DIV_UP(parts_of(a), WARPS), 1, 1, THREADS, 0};
}

static int launch_anchor(struct gpu *gpu, cu_stream stream, const struct gpu_scores *a) {
        enum gpu_kernel parts = kvd_is_narrow(a->keys.number) ? GPU_KERNEL_keydiff_parts_narrow :
                                                                GPU_KERNEL_keydiff_parts;
        struct gpu_grid sum = {a->keys.layers * a->keys.heads * DIV_UP(a->keys.dim, 32u), 1, 1,
                               SUM_THREADS, 0};
        int r;

        if (!a->counts || !a->scratch || a->scratch % 16)
                return refuse(gpu, "no counts, or no aligned scratch memory");
        r = a->slices ? gpu_launch(gpu, parts, grid_of_parts(a), stream, a) : 0;
        return r < 0 ? r : gpu_launch(gpu, GPU_KERNEL_keydiff_sum, sum, stream, a);
}

static int launch_score(struct gpu *gpu, cu_stream stream, const struct gpu_scores *a) {
        enum gpu_kernel kernel = kvd_is_narrow(a->keys.number) ? GPU_KERNEL_keydiff_score_narrow :
                                                                 GPU_KERNEL_keydiff_score;

        if (!a->scores || a->stride < a->to - a->from)
                return refuse(gpu, "no scores, or too short a stride");
        return a->slices ? gpu_launch(gpu, kernel, grid_of_parts(a), stream, a) : 0;
}

int gpu_anchor(struct gpu *gpu, cu_stream stream, const struct gpu_scores *a) {
        struct gpu_scores prepared = *a;
        int r = prepare(gpu, &prepared);

        return r < 0 ? r : launch_anchor(gpu, stream, &prepared);
}

int gpu_score(struct gpu *gpu, cu_stream stream, const struct gpu_scores *a) {
        struct gpu_scores prepared = *a;
        int r = prepare(gpu, &prepared);

        return r < 0 ? r : launch_score(gpu, stream, &prepared);
}

int gpu_block_scores(struct gpu *gpu, cu_stream stream, const struct gpu_block_scores *a) {
        struct gpu_grid grid = {.y = 1, .z = 1, .threads = THREADS};

        if (a->heads == 0 || a->per_block == 0 || !a->mean || !a->best || !a->scores ||
            a->stride < a->n)
                return refuse(gpu, "no heads, tokens, addresses, or too short a stride");
        grid.x = DIV_UP(DIV_UP(a->n, a->per_block), (uint32_t)WARPS);
        return a->n == 0 ? 0 : gpu_launch(gpu, GPU_KERNEL_keydiff_blocks, grid, stream, a);
}
