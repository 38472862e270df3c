/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/sketch.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/sketch.h"

enum { THREADS = 256, COLUMNS_MOST = 1 << 30 };

static int refuse(struct gpu *gpu, const char *why) {
        snprintf(gpu->why, sizeof gpu->why, "sketch: %s", why);
        return -EINVAL;
}

static uint32_t element_bytes(uint32_t number) {
        return number == KVD_NUMBER_F32 ? 4 : 2;
}

static bool are_rows(uint32_t rows, uint32_t columns) {
        return rows > 0 && rows <= KVD_SKETCH_ROWS_MAX && columns > 0 && columns <= COLUMNS_MOST;
}

/* Each thread one thing after the other. */
static struct gpu_grid over(uint64_t things) {
        return (struct gpu_grid){(uint32_t)MIN(DIV_UP(things, THREADS), 65536), 1, 1, THREADS, 0};
}

int gpu_sketch_place(struct gpu *gpu, cu_stream stream, const struct gpu_sketch_place *a) {
        if (!are_rows(a->rows, a->columns))
                return refuse(gpu, "no such rows or columns");
        if (a->family != KVD_SKETCH_UNIFORM && a->family != KVD_SKETCH_PERMUTATION)
                return refuse(gpu, "an unknown family of hash functions");
        if (a->n == 0)
                return 0;
        if (!a->ordinals || !a->places)
                return refuse(gpu, "no ordinals, or no places");
        return gpu_launch(gpu, GPU_KERNEL_sketch_place, over((uint64_t)a->n * a->rows), stream, a);
}

/* ---- the plan ---------------------------------------------------------------------------------------------------- */

static uint32_t cell_of(const uint32_t *places, uint32_t i, uint32_t r, uint32_t rows, uint32_t columns) {
        return r * columns + (places[(size_t)i * rows + r] & KVD_SKETCH_COLUMN);
}

/* Counts become where each cell's tokens begin. */
static uint32_t begin_runs(uint32_t *counts, uint32_t cells, struct gpu_sketch_run *runs) {
        uint32_t at = 0, n = 0;

        for (uint32_t c = 0; c < cells; c++) {
                uint32_t count = counts[c];

                if (count)
                        runs[n++] = (struct gpu_sketch_run){c, at};
                counts[c] = at;
                at += count;
        }
        runs[n] = (struct gpu_sketch_run){0, at};
        return n;
}

uint32_t gpu_sketch_plan(const uint32_t *places, const struct gpu_sketch_token *tokens, uint32_t n, uint32_t rows,
                         uint32_t columns, struct gpu_sketch_run *runs, struct gpu_sketch_token *planned,
                         uint32_t *counts) {
        uint32_t n_runs;

        memset(counts, 0, (size_t)rows * columns * sizeof *counts);
        for (uint32_t i = 0; i < n; i++)
                for (uint32_t r = 0; r < rows; r++)
                        counts[cell_of(places, i, r, rows, columns)]++;
        n_runs = begin_runs(counts, rows * columns, runs);
        for (uint32_t i = 0; i < n; i++)
                for (uint32_t r = 0; r < rows; r++) {
                        uint32_t signs = places[(size_t)i * rows + r] & ~KVD_SKETCH_COLUMN;

                        planned[counts[cell_of(places, i, r, rows, columns)]++] =
                                (struct gpu_sketch_token){tokens[i].block, tokens[i].slot | signs};
                }
        return n_runs;
}

/* ---- insert, query ----------------------------------------------------------------------------------------------- */

static int check_planes(struct gpu *gpu, const struct gpu_sketch_parts *s) {
        for (uint32_t i = 0; i < s->n_planes; i++)
                if (!s->planes[i].cells || s->planes[i].cells % 4 || s->planes[i].mean % 4 ||
                    s->planes[i].offset % element_bytes(s->number))
                        return refuse(gpu, "cells, means or vectors at no address for their numbers");
        return 0;
}

static int check(struct gpu *gpu, const struct gpu_sketch_parts *s) {
        uint64_t misfit = s->blocks.base | s->blocks.block_bytes | s->layer_stride;

        if (s->number != KVD_NUMBER_F32 && s->number != KVD_NUMBER_F16 && s->number != KVD_NUMBER_BF16)
                return refuse(gpu, "numbers of an unknown type");
        if (!are_rows(s->rows, s->columns) || !s->n_planes || s->n_planes > 2)
                return refuse(gpu, "no such rows, columns or planes");
        if (!s->layers || !s->heads || !s->dim || s->layers * s->n_planes > UINT16_MAX ||
            s->cell_stride < (uint64_t)s->layers * s->heads * s->dim)
                return refuse(gpu, "no such layers, heads or dimensions, or cells that overlap");
        if (!s->blocks.base || !s->blocks.ids || misfit % element_bytes(s->number))
                return refuse(gpu, "blocks at no address for their numbers");
        return check_planes(gpu, s);
}

static int launch(struct gpu *gpu, cu_stream stream, enum gpu_kernel kernel, const struct gpu_sketch_parts *s,
                  uint32_t items, const void *a) {
        uint64_t pieces = (uint64_t)DIV_UP(s->dim, 16 / element_bytes(s->number)) * s->heads * items;
        struct gpu_grid grid = {(uint32_t)DIV_UP(pieces, THREADS), s->layers * s->n_planes, 1, THREADS, 0};

        if (pieces > UINT32_MAX)
                return refuse(gpu, "more tokens than one launch takes");
        return gpu_launch(gpu, kernel, grid, stream, a);
}

int gpu_sketch_insert(struct gpu *gpu, cu_stream stream, const struct gpu_sketch_insert *a) {
        int r = check(gpu, &a->parts);

        if (r < 0 || a->n_runs == 0)
                return r;
        if (!a->runs || !a->planned || (a->weight != 1.0f && a->weight != -1.0f))
                return refuse(gpu, "no plan, or another weight than 1 and -1");
        return launch(gpu, stream, GPU_KERNEL_sketch_insert, &a->parts, a->n_runs, a);
}

int gpu_sketch_query(struct gpu *gpu, cu_stream stream, const struct gpu_sketch_query *a) {
        enum gpu_kernel kernel = a->parts.rows == 3 ? GPU_KERNEL_sketch_query_3 : GPU_KERNEL_sketch_query_any;
        int r = check(gpu, &a->parts);

        if (r < 0 || a->n == 0)
                return r;
        if (!a->tokens || !a->places)
                return refuse(gpu, "no tokens, or no places");
        return launch(gpu, stream, kernel, &a->parts, a->n, a);
}

/* Numbers of a token in all layers, heads and planes. */
static uint64_t numbers_of(const struct gpu_sketch_parts *s) {
        return (uint64_t)s->n_planes * s->layers * s->heads * s->dim;
}

uint64_t gpu_sketch_insert_bytes(const struct gpu_sketch_parts *s, uint32_t n, uint32_t cells) {
        return numbers_of(s) * ((uint64_t)n * element_bytes(s->number) + (uint64_t)cells * 2 * sizeof(float));
}

uint64_t gpu_sketch_query_bytes(const struct gpu_sketch_parts *s, uint32_t n) {
        return numbers_of(s) * n * (s->rows * sizeof(float) + element_bytes(s->number));
}

int gpu_sketch_median(struct gpu *gpu, cu_stream stream, const struct gpu_sketch_median *a) {
        if (!are_rows(a->rows, 1) || (a->rows > 1 && a->ld < a->n) || !a->x || !a->out)
                return refuse(gpu, "median: no such rows, or no numbers");
        return a->n == 0 ? 0 : gpu_launch(gpu, GPU_KERNEL_sketch_median, over(a->n), stream, a);
}
