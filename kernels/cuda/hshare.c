/* SPDX-License-Identifier: Apache-2.0 */

/* HShare's operations: arguments are checked, grids chosen, workspaces laid out. */

#include "kernels/cuda/hshare.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "ipc/base/util.h"
#include "kernels/cuda/hshare_run.h"
#include "kernels/hshare.h"

enum { MOST_ROWS = 65535, MOST_POSITIONS = 1 << 30, ALIGNMENT = 256 };

_printf_(2, 3) static int refuse(struct gpu *gpu, const char *why, ...) {
        va_list list;

        va_start(list, why);
        vsnprintf(gpu->why, sizeof gpu->why, why, list);
        va_end(list);
        return -EINVAL;
}

static bool is_number(uint32_t number) {
        return number == KVD_NUMBER_F32 || number == KVD_NUMBER_F16 || number == KVD_NUMBER_BF16;
}

static int check_spans(struct gpu *gpu, const struct gpu_spans *s, uint64_t rows) {
        if (!s->n && s->n_sequences)
                return refuse(gpu, "hshare: an address is missing");
        if (s->most > MOST_POSITIONS || s->n_sequences * rows > MOST_ROWS)
                return refuse(gpu, "hshare: %u sequences of %u positions and %llu rows are too many for one call",
                              s->n_sequences, s->most, (unsigned long long)rows);
        return 0;
}

static int check_slots(struct gpu *gpu, const struct gpu_slots *s, uint32_t size) {
        uint64_t places = s->blocks.base | s->blocks.block_bytes | s->offset | s->head_stride | s->token_stride;

        if (!s->blocks.ids || s->block_tokens == 0 || s->block_tokens > MOST_POSITIONS || places % size)
                return refuse(gpu, "hshare: blocks of %u tokens, places at multiples of %u, a table", s->block_tokens,
                              size);
        return 0;
}

static int check_workspace(struct gpu *gpu, cu_address at, uint64_t bytes, uint64_t wanted) {
        if (bytes >= wanted && (wanted == 0 || (at && at % ALIGNMENT == 0)))
                return 0;
        refuse(gpu, "hshare: a workspace of %llu bytes is wanted, aligned to %d", (unsigned long long)wanted,
               ALIGNMENT);
        return -ENOBUFS;
}

static uint32_t element(uint32_t number) {
        return number == KVD_NUMBER_F32 ? 4 : 2;
}

/* ---- labels ---- */

static int check_channels(struct gpu *gpu, const struct gpu_channels *c, uint32_t number, uint32_t kv_heads) {
        if (!is_number(number) || kv_heads == 0)
                return refuse(gpu, "hshare: no such type, %u, or no heads", number);
        if (!c->channels || c->n_channels == 0 || c->n_channels > KVD_LABEL_CHANNELS_MAX)
                return refuse(gpu, "hshare: labels have 1 to %d channels, not %u", KVD_LABEL_CHANNELS_MAX,
                              c->n_channels);
        return 0;
}

int gpu_label(struct gpu *gpu, cu_stream stream, const struct gpu_label *a) {
        uint32_t warps = GPU_LABEL_THREADS / 32;
        struct gpu_grid grid = {MIN(DIV_UP(a->spans.most, warps), 4096u), a->spans.n_sequences * a->kv_heads, 1,
                                GPU_LABEL_THREADS, 0};
        int r = check_channels(gpu, &a->channels, a->number, a->kv_heads);

        if (r == 0)
                r = check_spans(gpu, &a->spans, a->kv_heads);
        if (r == 0)
                r = check_slots(gpu, &a->keys, element(a->number));
        if (r == 0)
                r = check_slots(gpu, &a->labels, 1);
        if (r < 0 || a->spans.n_sequences == 0 || a->spans.most == 0)
                return r;
        return gpu_launch(gpu, GPU_KERNEL_label, grid, stream, a);
}

int gpu_label_query(struct gpu *gpu, cu_stream stream, const struct gpu_label_query *a) {
        uint64_t queries = (uint64_t)a->rows * a->kv_heads * a->group;
        struct gpu_grid grid = {(uint32_t)DIV_UP(queries, GPU_LABEL_THREADS / 32), 1, 1, GPU_LABEL_THREADS, 0};
        int r = check_channels(gpu, &a->channels, a->q_number, a->kv_heads);

        if (r == 0 && (!a->q || !a->to || a->group == 0 || queries > MOST_POSITIONS))
                r = refuse(gpu, "hshare: no queries, or too many: %llu", (unsigned long long)queries);
        if (r < 0 || queries == 0)
                return r;
        return gpu_launch(gpu, GPU_KERNEL_label_query, grid, stream, a);
}

int gpu_weigh(struct gpu *gpu, cu_stream stream, const struct gpu_weigh *a) {
        struct gpu_grid grid = {DIV_UP(a->dim, 32), a->kv_heads, 1, GPU_LABEL_THREADS, 0};
        int r;

        if (!is_number(a->number) || !is_number(a->q_number) || a->kv_heads > MOST_ROWS || !a->q || !a->weights)
                return refuse(gpu, "hshare: no such types, %u and %u, or an address is missing", a->number,
                              a->q_number);
        r = check_slots(gpu, &a->keys, element(a->number));
        if (r < 0 || a->n == 0 || a->dim == 0 || a->kv_heads == 0)
                return r;
        return gpu_launch(gpu, GPU_KERNEL_weigh, grid, stream, a);
}

/* ---- scores ---- */

int gpu_label_scores(struct gpu *gpu, cu_stream stream, const struct gpu_label_scores *a) {
        uint64_t places = a->labels.blocks.base | a->labels.blocks.block_bytes | a->labels.offset |
                          a->labels.head_stride;
        bool usual = a->n_channels == 32 && places % 4 == 0;
        uint32_t each = GPU_SCORE_THREADS * (usual ? GPU_SCORE_EACH : 1);
        struct gpu_grid grid = {DIV_UP(a->spans.most, each), a->spans.n_sequences * a->kv_heads, 1, GPU_SCORE_THREADS,
                                0};
        int r = check_spans(gpu, &a->spans, a->kv_heads);

        if (r == 0)
                r = check_slots(gpu, &a->labels, 1);
        if (r == 0 && (a->n_channels == 0 || a->n_channels > KVD_LABEL_CHANNELS_MAX || a->group == 0 || !a->queries ||
                       !a->to || a->ld < a->spans.most))
                r = refuse(gpu, "hshare: scores of %u channels for %u positions, in rows of %llu", a->n_channels,
                           a->spans.most, (unsigned long long)a->ld);
        if (r < 0 || grid.x == 0 || grid.y == 0)
                return r;
        return gpu_launch(gpu, usual ? GPU_KERNEL_label_scores_32 : GPU_KERNEL_label_scores_any, grid, stream, a);
}

uint64_t gpu_aggregate_workspace(const struct gpu_aggregate *a) {
        uint64_t rows = (uint64_t)a->spans.n_sequences * a->kv_heads * a->group;

        if (a->group <= 1)
                return 0;
        return ALIGN_UP(rows * DIV_UP(a->spans.most, GPU_AGGREGATE_PART) * 2 * sizeof(float), ALIGNMENT);
}

int gpu_aggregate(struct gpu *gpu, cu_stream stream, const struct gpu_aggregate *a) {
        uint32_t parts = DIV_UP(a->spans.most, GPU_AGGREGATE_PART), rows = a->spans.n_sequences * a->kv_heads;
        struct gpu_grid by_part = {parts, rows, a->group, GPU_SCORE_THREADS, 0};
        struct gpu_grid grid = {parts, rows, 1, GPU_SCORE_THREADS, 0};
        int r = check_spans(gpu, &a->spans, a->kv_heads);

        if (r == 0 && (a->group == 0 || a->group > GPU_AGGREGATE_GROUP || !(a->scale > 0.0f) || !a->scores || !a->to ||
                       a->ld < a->spans.most || a->ld_to < a->spans.most))
                r = refuse(gpu, "hshare: one score for %u query heads of %u positions", a->group, a->spans.most);
        if (r == 0)
                r = check_workspace(gpu, a->workspace, a->workspace_bytes, gpu_aggregate_workspace(a));
        if (r < 0 || rows == 0 || parts == 0)
                return r;
        if (a->group > 1)
                r = gpu_launch(gpu, GPU_KERNEL_aggregate_parts, by_part, stream, a);
        return r < 0 ? r : gpu_launch(gpu, GPU_KERNEL_aggregate, grid, stream, a);
}

/* ---- the top ---- */

static cu_address take(cu_address *at, uint64_t bytes) {
        cu_address here = *at;

        *at += ALIGN_UP(bytes, ALIGNMENT);
        return here;
}

/* A sample tells something of many scores of which few are wanted, as in top_bound. */
static struct gpu_top_run plan_top(const struct gpu_top *a, uint64_t *workspace) {
        uint64_t rows = (uint64_t)a->spans.n_sequences * a->rows, most = a->spans.most;
        double expected = most ? (double)a->z * GPU_TOP_SAMPLE / (double)most : 0.0;
        struct gpu_top_run run = {.a = *a,
                                  .tiles = (uint32_t)DIV_UP(most, GPU_TOP_TILE),
                                  .shorts = (uint32_t)DIV_UP(most, GPU_TOP_SHORT)};
        cu_address at = a->workspace;

        run.sampled = most >= 4 * GPU_TOP_SAMPLE &&
                      expected + 4.0 * sqrt(expected) + 4.0 <= GPU_TOP_SAMPLE / 2;
        run.marks = take(&at, rows * run.shorts * 2 * sizeof(uint32_t));
        if (run.sampled) {
                run.bounds = take(&at, rows * sizeof(float));
                run.counts = take(&at, rows * run.tiles * sizeof(uint32_t));
                run.values = take(&at, rows * run.tiles * GPU_TOP_ROOM * sizeof(float));
                run.places = take(&at, rows * run.tiles * GPU_TOP_ROOM * sizeof(uint16_t));
        }
        *workspace = at - a->workspace;
        return run;
}

uint64_t gpu_top_workspace(const struct gpu_top *a) {
        uint64_t bytes;

        plan_top(a, &bytes);
        return bytes;
}

int gpu_top(struct gpu *gpu, cu_stream stream, const struct gpu_top *a) {
        uint64_t wanted;
        struct gpu_top_run run = plan_top(a, &wanted);
        uint32_t rows = a->spans.n_sequences * a->rows;
        struct gpu_grid by_row = {rows, 1, 1, GPU_TOP_COLLECT_THREADS, 0};
        struct gpu_grid by_tile = {run.tiles, rows, 1, GPU_TOP_COLLECT_THREADS, 0};
        struct gpu_grid ranks = {rows, 1, 1, GPU_TOP_THREADS, 0};
        int r = check_spans(gpu, &a->spans, a->rows);

        if (r == 0 && (!a->scores || !a->to || !a->found || a->z == 0 || a->z > a->ld_to || a->ld < a->spans.most))
                r = refuse(gpu, "hshare: the %u largest of %u, in rows of %llu", a->z, a->spans.most,
                           (unsigned long long)a->ld_to);
        if (r == 0)
                r = check_workspace(gpu, a->workspace, a->workspace_bytes, wanted);
        if (r < 0 || rows == 0)
                return r;
        if (run.sampled) {
                r = gpu_launch(gpu, GPU_KERNEL_top_bound, by_row, stream, &run);
                if (r == 0)
                        r = gpu_launch(gpu, GPU_KERNEL_top_collect, by_tile, stream, &run);
        }
        return r < 0 ? r : gpu_launch(gpu, GPU_KERNEL_top_rank, ranks, stream, &run);
}

/* ---- sets ---- */

int gpu_overlap(struct gpu *gpu, cu_stream stream, const struct gpu_overlap *a) {
        struct gpu_grid grid = {DIV_UP(a->rows, GPU_SCORE_THREADS / 32), 1, 1, GPU_SCORE_THREADS, 0};

        if (!a->to || !a->a || !a->b || (a->a | a->b) % 8)
                return refuse(gpu, "hshare: an address is missing, or words are not at multiples of 8");
        return a->rows == 0 ? 0 : gpu_launch(gpu, GPU_KERNEL_overlap, grid, stream, a);
}
