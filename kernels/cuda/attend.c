/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chooses the kernels of an attention call and their numbers of threads, and lays out the
 * workspace.
 */

#include "kernels/cuda/attend.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/images.h"
#include "kernels/ops.h"

GPU_USES(attend_any);
GPU_USES(attend_decode);
GPU_USES(attend_prefill);

enum {
        /* columns that the warps of a thread block process in one turn */
        TURN = GPU_ATTEND_TILE * GPU_ATTEND_WARPS,
        /* the cost, in turns, of beginning, ending and merging a split */
        SPLIT_COST = 1,
        WAVES = 4,       /* maximum number of waves of thread blocks for the sake of more splits, */
        MANY_SPLITS = 8, /* unless there are fewer splits than this */
        NEAR = 32,       /* take more splits if the time grows by at most a 32nd */
        MOST_COLUMNS = 1 << 30,
        MOST_ROWS = 65535, /* maximum grid size in y and z */
        MOST_GROUP = 128,
        MOST_DIM = 256,
        ALIGNMENT = 256,
};

struct plan {
        struct gpu_attend_launch launch;
        enum gpu_kernel kernel;
        struct gpu_grid grid;
        uint64_t workspace;
};

/* ---- arguments ---- */

_printf_(2, 3) static int refuse(struct gpu *gpu, const char *why, ...) {
        va_list list;

        va_start(list, why);
        vsnprintf(gpu->why, sizeof gpu->why, why, list);
        va_end(list);
        return -EINVAL;
}

/* What rows are aligned to. */
static uint32_t size_of(uint32_t number) {
        return number == KVD_NUMBER_F32 ? 4 : kvd_is_narrow(number) ? 1 : 2;
}

static bool is_wide(uint32_t number) {
        return number == KVD_NUMBER_F32 || number == KVD_NUMBER_F16 || number == KVD_NUMBER_BF16;
}

static bool is_number(uint32_t number) {
        return is_wide(number) || (number >= KVD_NUMBER_Q8 && number <= KVD_NUMBER_E5M2);
}

static int check_cache(struct gpu *gpu, const struct gpu_attend *a) {
        uint64_t places = a->blocks.base | a->blocks.block_bytes | a->k_offset | a->v_offset |
                          a->head_stride | a->token_stride;

        if (!is_number(a->number) || !is_wide(a->q_number) || !is_wide(a->out_number))
                return refuse(gpu, "attention: no such types: %u, %u, %u", a->number, a->q_number,
                              a->out_number);
        if (a->dim == 0 || a->dim > MOST_DIM || a->group == 0 || a->group > MOST_GROUP ||
            a->kv_heads == 0 || (kvd_is_quantised(a->number) && a->dim % 2))
                return refuse(gpu, "attention: %u dimensions, %u KV heads of %u query heads",
                              a->dim, a->kv_heads, a->group);
        if (places % size_of(a->number))
                return refuse(
                        gpu,
                        "attention: offsets and strides in a block must be multiples of the element size");
        if (a->block_tokens == 0 || a->block_tokens > MOST_COLUMNS ||
            a->max_length > MOST_COLUMNS || a->ld_blocks * a->block_tokens < a->max_length)
                return refuse(gpu, "attention: %u positions, but %llu blocks of %u", a->max_length,
                              (unsigned long long)a->ld_blocks, a->block_tokens);
        return 0;
}

static int check_options(struct gpu *gpu, const struct gpu_attend *a) {
        if (!a->lengths || !a->q || !a->out || (a->max_length && !a->blocks.ids))
                return refuse(gpu, "attention: an address is missing");
        if (!(a->scale > 0.0f))
                return refuse(gpu, "attention: the scale must be above 0");
        if (a->chosen &&
            (!a->n_chosen || a->ld_chosen < a->max_chosen || a->max_chosen > MOST_COLUMNS))
                return refuse(
                        gpu,
                        "attention: lists of chosen positions are too long, or have no lengths");
        if (a->rotation && (!a->rotations || a->dim % 2))
                return refuse(gpu, "attention: rotations of %u dimensions", a->dim);
        if ((a->block_mass && a->ld_block_mass * a->block_tokens < a->max_length) ||
            (a->token_mass && a->ld_token_mass < a->max_length))
                return refuse(gpu, "attention: no room for masses of %u positions", a->max_length);
        if (a->split % GPU_ATTEND_TILE)
                return refuse(gpu, "attention: splits of %u columns are not multiples of %d",
                              a->split, GPU_ATTEND_TILE);
        return 0;
}

/* ---- which kernel ---- */

#define FORMS(image, type, name) \
        { \
                GPU_KERNEL_##image##_##type##_64##name, GPU_KERNEL_##image##_##type##_128##name, \
                        GPU_KERNEL_##image##_##type##_256##name \
        }

static const enum gpu_kernel narrow[2][3] = {FORMS(attend, f16, _8), FORMS(attend, bf16, _8)},
                             wide[2][3] = {FORMS(attend, f16, _16), FORMS(attend, bf16, _16)},
                             many[2][3] = {FORMS(attend_many, f16, ), FORMS(attend_many, bf16, )},
                             many_plain[2][3] = {FORMS(attend_many, f16, _plain),
                                                 FORMS(attend_many, bf16, _plain)};

/* The matrix units take 16-bit numbers, and rows are loaded 16 bytes at a time. */
static bool suits_matrix_units(const struct gpu_attend *a) {
        uint64_t places = a->blocks.base | a->blocks.block_bytes | a->k_offset | a->v_offset |
                          a->head_stride | a->token_stride | a->dim * 2;

        return a->number != KVD_NUMBER_F32 && is_wide(a->number) && places % 16 == 0;
}

static uint32_t dim_of(const struct gpu_attend *a) {
        return a->dim <= 64 ? 64 : a->dim <= 128 ? 128 : 256;
}

/*
 * As many warps as shared memory allows, 0 if not even one. each: bytes per warp; common: bytes
 * shared by all.
 */
static uint32_t warps_in(const struct gpu *gpu, size_t each, size_t common) {
        return gpu->shared_bytes < common ?
                       0 :
                       (uint32_t)MIN((gpu->shared_bytes - common) / each, GPU_ATTEND_WARPS);
}

/*
 * Tiles per warp: the number that keeps more tiles in flight over all warps; on a tie, the one with
 * more warps.
 */
static uint32_t stages_in(const struct gpu *gpu, uint32_t dim, size_t each, size_t common) {
        size_t tile = GPU_ATTEND_STAGE_BYTES(dim);
        uint32_t most = GPU_ATTEND_STAGES(dim), least = GPU_ATTEND_LEAST_STAGES;

        return warps_in(gpu, most * tile + each, common) * (most - 1) >
                               warps_in(gpu, least * tile + each, common) * (least - 1) ?
                       most :
                       least;
}

static bool plan_decode(struct gpu *gpu, struct plan *p) {
        const struct gpu_attend *a = &p->launch.a;
        enum gpu_attend_form form = a->group <= 8 ? GPU_ATTEND_NARROW : GPU_ATTEND_WIDE;
        uint32_t dim = dim_of(a), rows = form == GPU_ATTEND_NARROW ? 8 : 16, warps;
        size_t queries = GPU_ATTEND_QUERY_BYTES(dim, form);
        size_t each = a->rotation ? queries : 0,
               common = GPU_ATTEND_WARPS * (size_t)rows * 8 + queries - each;

        p->launch.stages = stages_in(gpu, dim, each, common);
        each += p->launch.stages * (size_t)GPU_ATTEND_STAGE_BYTES(dim);
        warps = warps_in(gpu, each, common);
        if (!suits_matrix_units(a) || warps == 0)
                return false;
        p->kernel = (form == GPU_ATTEND_NARROW ? narrow :
                                                 wide)[a->number - KVD_NUMBER_F16][dim / 128];
        p->launch.head_tiles = DIV_UP(a->group, rows);
        p->grid.threads = warps * 32;
        p->grid.shared = warps * each + common;
        return true;
}

static bool plan_prefill(struct gpu *gpu, struct plan *p) {
        const struct gpu_attend *a = &p->launch.a;
        bool plain = a->q_number == a->number && a->out_number != KVD_NUMBER_F32 && !a->rotation;
        uint32_t dim = dim_of(a), warps;
        size_t each = GPU_ATTEND_PREFILL_STAGES * (size_t)GPU_ATTEND_STAGE_BYTES(dim) +
                      GPU_ATTEND_QUERY_BYTES(dim, plain ? GPU_ATTEND_PLAIN : GPU_ATTEND_WIDE);

        warps = warps_in(gpu, each, 0);
        if (!suits_matrix_units(a) || warps == 0)
                return false;
        p->kernel = (plain ? many_plain : many)[a->number - KVD_NUMBER_F16][dim / 128];
        p->launch.row_tiles = (uint32_t)DIV_UP((uint64_t)a->max_tokens * a->group,
                                               warps * GPU_ATTEND_TILE);
        p->grid = (struct gpu_grid){a->n_sequences * p->launch.row_tiles * p->launch.n_splits,
                                    a->kv_heads, 1, warps * 32, warps * each};
        return true;
}

static void plan_any(struct plan *p) {
        const struct gpu_attend *a = &p->launch.a;
        uint32_t dim = MAX(dim_of(a), 128),
                 heads = dim > 128 ? GPU_ATTEND_HEADS_256 : GPU_ATTEND_HEADS_128;

        if (kvd_is_narrow(a->number))
                p->kernel = dim > 128 ? GPU_KERNEL_attend_any_256_narrow :
                                        GPU_KERNEL_attend_any_128_narrow;
        else
                p->kernel = dim > 128 ? GPU_KERNEL_attend_any_256 : GPU_KERNEL_attend_any_128;
        p->launch.head_tiles = DIV_UP(a->group, heads);
        p->grid.threads = GPU_ATTEND_WARPS * 32;
        p->grid.shared = GPU_ATTEND_WARPS * heads * (dim + 2) * sizeof(float);
}

/* ---- splits and workspace ---- */

static uint32_t columns_of(const struct gpu_attend *a) {
        return a->chosen ? a->max_chosen : a->max_length;
}

/*
 * The time, in turns, that the device takes with n splits: the number of times it must be filled
 * with thread blocks, times the time of one block.
 */
static uint64_t turns_in_all(uint64_t turns, uint64_t heads, uint64_t resident, uint64_t n) {
        uint64_t each = DIV_UP(turns, n);

        return DIV_UP(heads * DIV_UP(turns, each), resident) * (each + SPLIT_COST);
}

/*
 * Turns per split: the largest number of splits that takes hardly longer than the best number.
 * Sequences shorter than the longest leave thread blocks without work; with more splits, that
 * matters less.
 */
static uint64_t turns_of_split(uint64_t turns, uint64_t heads, uint64_t resident) {
        uint64_t most = MIN(turns, MAX(WAVES * resident / heads, MANY_SPLITS)), n = most,
                 best = UINT64_MAX;

        for (uint64_t i = 1; i <= most; i++)
                best = MIN(best, turns_in_all(turns, heads, resident, i));
        while (n > 1 && turns_in_all(turns, heads, resident, n) > best + best / NEAR)
                n--;
        return DIV_UP(turns, n);
}

static void plan_splits(struct gpu *gpu, struct plan *p) {
        const struct gpu_attend *a = &p->launch.a;
        uint64_t columns = columns_of(a), turns = MAX(DIV_UP(columns, TURN), 1u),
                 heads = (uint64_t)MAX(a->n_sequences, 1u) * a->kv_heads * p->launch.head_tiles;
        uint64_t resident = gpu_resident_blocks(gpu, p->kernel, p->grid.threads, p->grid.shared);

        resident = MAX(resident, MAX(gpu->multiprocessors, 1));
        p->launch.split = a->split ? ALIGN_UP(a->split, GPU_ATTEND_TILE) :
                                     (uint32_t)(TURN * turns_of_split(turns, heads, resident));
        p->launch.n_splits = (uint32_t)MAX(DIV_UP(columns, p->launch.split), 1);
        p->grid.x = a->n_sequences * p->launch.n_splits;
        p->grid.y = a->kv_heads * p->launch.head_tiles;
        p->grid.z = 1;
}

static cu_address take(struct plan *p, uint64_t bytes) {
        cu_address at = p->launch.a.workspace + p->workspace;

        p->workspace += ALIGN_UP(bytes, ALIGNMENT);
        return at;
}

static void lay_out(struct plan *p) {
        struct gpu_attend_launch *r = &p->launch;
        uint64_t heads = (uint64_t)r->a.n_sequences * r->a.kv_heads,
                 rows = heads * r->a.group * r->tokens;

        r->ld_scores = ALIGN_UP((uint64_t)columns_of(&r->a), 32);
        if (r->n_splits > 1) {
                r->sums = take(p, rows * r->n_splits * r->a.dim * sizeof(float));
                r->stats = take(p, rows * r->n_splits * 2 * sizeof(float));
        }
        if (!r->a.block_mass && !r->a.token_mass)
                return;
        r->totals = take(p, rows * 2 * sizeof(float));
        r->weights = take(p, heads * r->ld_scores * sizeof(float));
        if (!r->a.starts)
                r->scores = take(p, rows * r->ld_scores * sizeof(float));
}

static struct plan plan_for(struct gpu *gpu, const struct gpu_attend *a) {
        struct plan p = {
                .launch = {.a = *a, .n_splits = 1, .tokens = a->starts ? a->max_tokens : 1}};

        p.launch.exponent = a->scale * (float)M_LOG2E;
        if (a->starts) {
                p.launch.split = a->split ? a->split : MAX(columns_of(a), 1);
                p.launch.n_splits = MAX(DIV_UP(columns_of(a), p.launch.split), 1);
                if (!plan_prefill(gpu, &p)) {
                        plan_any(&p);
                        p.grid.x = a->n_sequences * a->max_tokens * p.launch.n_splits;
                        p.grid.y = a->kv_heads * p.launch.head_tiles;
                        p.grid.z = 1;
                }
        } else {
                if (!plan_decode(gpu, &p))
                        plan_any(&p);
                plan_splits(gpu, &p);
        }
        lay_out(&p);
        return p;
}

uint64_t gpu_attend_workspace(struct gpu *gpu, const struct gpu_attend *a) {
        struct gpu_attend sizes = *a;

        if (check_cache(gpu, a) < 0)
                return 0;
        sizes.workspace = 0;
        return plan_for(gpu, &sizes).workspace;
}

/* ---- launches ---- */

static enum gpu_kernel weighing_kernel(const struct gpu_attend *a) {
        if (kvd_is_narrow(a->number))
                return a->dim > 128 ? GPU_KERNEL_attend_weigh_256_narrow :
                                      GPU_KERNEL_attend_weigh_128_narrow;
        return a->dim > 128 ? GPU_KERNEL_attend_weigh_256 : GPU_KERNEL_attend_weigh_128;
}

static int launch_masses(struct gpu *gpu, cu_stream stream, const struct plan *p) {
        const struct gpu_attend *a = &p->launch.a;
        uint32_t columns = columns_of(a), threads = GPU_ATTEND_MASS_THREADS,
                 each = threads / 32 * 4;
        struct gpu_grid over = {DIV_UP(columns, threads), a->n_sequences * a->kv_heads, 1, threads,
                                0};
        uint32_t shared = threads / 32 *
                          (a->dim > 128 ? GPU_ATTEND_HEADS_256 * 256 : GPU_ATTEND_HEADS_128 * 128) *
                          4;
        struct gpu_grid over_tiles = {DIV_UP(columns, each), over.y, 1, threads, shared};
        int r;

        if (!p->launch.totals || columns == 0)
                return 0;
        if (a->starts)
                r = gpu_launch(gpu, weighing_kernel(a), over_tiles, stream, &p->launch);
        else
                r = gpu_launch(gpu, GPU_KERNEL_attend_weigh, over, stream, &p->launch);
        return r < 0 ? r : gpu_launch(gpu, GPU_KERNEL_attend_spread, over, stream, &p->launch);
}

static int launch(struct gpu *gpu, cu_stream stream, const struct plan *p) {
        const struct gpu_attend *a = &p->launch.a;
        struct gpu_grid rows = {a->n_sequences * p->launch.tokens * a->kv_heads * a->group, 1, 1,
                                GPU_ATTEND_SUM_THREADS, 0};
        int r;

        if (p->grid.y > MOST_ROWS ||
            (p->launch.totals && (uint64_t)a->n_sequences * a->kv_heads > MOST_ROWS))
                return refuse(gpu, "attention: too many heads for one call: %u of %u sequences",
                              a->kv_heads, a->n_sequences);
        if (p->workspace > a->workspace_bytes ||
            (p->workspace && (!a->workspace || a->workspace % ALIGNMENT))) {
                refuse(gpu, "attention: a workspace of %llu bytes is needed, aligned to %d",
                       (unsigned long long)p->workspace, ALIGNMENT);
                return -ENOBUFS;
        }
        r = gpu_launch(gpu, p->kernel, p->grid, stream, &p->launch);
        if (r == 0 && p->launch.n_splits > 1)
                r = gpu_launch(gpu, GPU_KERNEL_attend_sum, rows, stream, &p->launch);
        return r < 0 ? r : launch_masses(gpu, stream, p);
}

static int attend(struct gpu *gpu, cu_stream stream, const struct gpu_attend *a) {
        struct plan p;
        int r = check_cache(gpu, a);

        if (r == 0)
                r = check_options(gpu, a);
        if (r < 0 || a->n_sequences == 0)
                return r;
        p = plan_for(gpu, a);
        return launch(gpu, stream, &p);
}

int gpu_attend_decode(struct gpu *gpu, cu_stream stream, const struct gpu_attend *a) {
        if (a->starts)
                return refuse(gpu, "attention: a decode has one token per sequence, and no starts");
        return attend(gpu, stream, a);
}

int gpu_attend_prefill(struct gpu *gpu, cu_stream stream, const struct gpu_attend *a) {
        if (!a->starts)
                return refuse(
                        gpu, "attention: a prefill needs starts, the first token of each sequence");
        return a->max_tokens == 0 ? 0 : attend(gpu, stream, a);
}
