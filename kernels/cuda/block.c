/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/block.h"

#include <errno.h>
#include <stdio.h>

#include "ipc/base/util.h"

enum { TOPK_THREADS = 1024, COMPACT_THREADS = 256, COMPACT_COLUMNS = 64, COMPACT_TILE = 1024, PACK_THREADS = 256 };
enum { MOST_BLOCKS = 65535 };

static int refuse(struct gpu *gpu, const char *why) {
        snprintf(gpu->why, sizeof gpu->why, "%s", why);
        return -EINVAL;
}

int gpu_topk(struct gpu *gpu, cu_stream stream, const struct gpu_topk *a) {
        struct gpu_topk b = *a;

        b.k = MIN(a->k, a->n);
        if (b.k == 0 || b.rows == 0)
                return 0;
        if (b.rows > 1 && b.stride < b.n)
                return refuse(gpu, "topk: rows of scores overlap");
        return gpu_launch(gpu, GPU_KERNEL_topk, (struct gpu_grid){MIN(b.rows, MOST_BLOCKS), 1, 1, TOPK_THREADS, 0},
                          stream, &b);
}

/* ---- compaction ---- */

static bool in_sixteens(const struct gpu_slots *s) {
        return (s->blocks.base | s->blocks.block_bytes | s->offset | s->plane | s->head | s->slot) % 16 == 0;
}

int gpu_compact(struct gpu *gpu, cu_stream stream, const struct gpu_compact *a) {
        bool sixteens = a->bytes % 16 == 0 && in_sixteens(&a->to) && in_sixteens(&a->from);
        uint32_t units = sixteens ? a->bytes / 16 : a->bytes;
        uint32_t per_tile = COMPACT_TILE / MIN(MAX(units, 1), COMPACT_COLUMNS);
        uint64_t rows = (uint64_t)a->planes * a->heads;
        struct gpu_grid grid = {.y = DIV_UP(units, COMPACT_COLUMNS), .z = 1, .threads = COMPACT_THREADS};

        if (rows == 0 || a->n == 0 || a->bytes == 0)
                return 0;
        if (a->to.per_block == 0 || a->from.per_block == 0 || a->planes_per_index == 0 || rows > INT32_MAX ||
            grid.y > MOST_BLOCKS)
                return refuse(gpu, "compact: no tokens in a block, no planes of an index, or too many rows or bytes");
        grid.x = (uint32_t)rows;
        if (a->apart)
                grid.z = MIN(DIV_UP(a->n, per_tile), MOST_BLOCKS);
        return gpu_launch(gpu, sixteens ? GPU_KERNEL_compact_16 : GPU_KERNEL_compact_1, grid, stream, a);
}

/* ---- four bits ---- */

int gpu_pack_4(struct gpu *gpu, cu_stream stream, const struct gpu_pack_4 *a) {
        uint64_t groups = (uint64_t)a->n * (a->group ? DIV_UP(a->dim, a->group) : 1);

        if (groups == 0 || a->dim == 0)
                return 0;
        if (a->group % 2 || (a->n > 1 && a->stride < a->dim) || a->number < 1 || a->number > 3)
                return refuse(gpu, "pack_4: groups are of an even count, rows apart, numbers of a known type");
        return gpu_launch(gpu, GPU_KERNEL_pack_4,
                          (struct gpu_grid){(uint32_t)MIN(DIV_UP(groups * 16, PACK_THREADS), MOST_BLOCKS), 1, 1,
                                            PACK_THREADS, 0}, stream, a);
}
