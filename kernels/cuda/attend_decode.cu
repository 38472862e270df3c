/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One token a sequence, keys and values of 16 bits. A block of threads has a split of a sequence's
 * columns; of those, each warp takes every n-th tile, with a few tiles under way to its own shared
 * memory. Nobody waits for another warp before the end, where their sums are put together; splits
 * are by attend_sum.
 *
 * The memory is what this waits for: 32 products of 16 x 8 x 16 for 8 KiB of keys and values (dim
 * 128, 8 heads) take a quarter of the matrix units' time on an H200.
 */

#include "kernels/cuda/attend_join.cuh"
#include "kernels/cuda/attend_warp.cuh"

/* ---- a warp's way over its columns ---- */

/* Scores that the masses are made of later. */
template <int NUMBER, int DIM, int FORM>
ATTEND void keep_scores(const struct gpu_attend_launch &r, const struct head &h,
                        uint32_t first_head, uint32_t column, uint32_t to, const float x[2][4]) {
        uint32_t g = first_head + lane_id() / 4, t = lane_id() % 4;

        for (uint32_t row = 0; row < (FORM == GPU_ATTEND_NARROW ? 1 : 2); row++, g += 8) {
                float *scores = reinterpret_cast<float *>(r.scores) +
                                row_of(r, h, 0, g) * r.ld_scores;

                for (uint32_t i = 0; i < 4; i++) {
                        uint32_t c = column + i / 2 * 8 + 2 * t + i % 2;

                        if (g < r.a.group && c < to)
                                scores[c] = x[row][i];
                }
        }
}

/*
 * Columns [from, to). The place of the row that is copied next is looked up a tile ahead: a table's
 * entry is as far away as a key.
 */
template <int NUMBER, int DIM, int FORM, int STAGES>
ATTEND void walk(const struct gpu_attend_launch &r, const struct head &h,
                 struct warp_state<NUMBER, DIM, FORM> &w, uint8_t *shared, uint32_t first_head,
                 uint32_t from, uint32_t to) {
        uint32_t step = GPU_ATTEND_TILE * (blockDim.x / 32), row = lane_id() % GPU_ATTEND_TILE,
                 ahead;
        struct stage<DIM> tile;
        struct place next;
        float x[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};

        from += threadIdx.x / 32 * GPU_ATTEND_TILE;
        ahead = from;
        next = place_of(r, h, ahead + row, to);
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) {
                tile.at = shared + i * tile.BYTES;
                if (ahead < to)
                        copy_tile(r, tile, next);
                copy_commit();
                ahead += step;
                next = place_of(r, h, ahead + row, to);
        }
#pragma unroll 1
        for (uint32_t i = 0; from < to; from += step, i = i + 1 < STAGES ? i + 1 : 0) {
                copy_wait<STAGES - 2>();
                __syncwarp();
                tile.at = shared + (i > 0 ? i - 1 : STAGES - 1) * tile.BYTES;
                if (ahead < to)
                        copy_tile(r, tile, next);
                copy_commit();
                ahead += step;
                next = place_of(r, h, ahead + row, to);
                tile.at = shared + i * tile.BYTES;
                score_tile(r, w, tile, x);
                if (r.scores)
                        keep_scores<NUMBER, DIM, FORM>(r, h, first_head, from, to, x);
                weigh_tile(w, x);
                mix_tile(w, tile, x);
        }
        copy_wait<0>();
}

/* ---- the warps of a block ---- */

/* What each warp leaves: sums[warp][row][dim], then largest score and weights[warp][row]. */
template <int NUMBER, int DIM, int FORM>
ATTEND void leave(const struct warp_state<NUMBER, DIM, FORM> &w, float *sums, float *ends) {
        const uint32_t rows = 8 * w.ROWS;

#pragma unroll
        for (int row = 0; row < w.ROWS; row++) {
                uint32_t number = threadIdx.x / 32 * rows + 8 * row + lane_id() / 4;
                float weights = sum_quad(w.weights[row]);

                put_sums(w, row, 1.0f, sums + number * DIM);
                if (lane_id() % 4 == 0) {
                        ends[number * 2] = w.largest[row];
                        ends[number * 2 + 1] = weights;
                }
        }
}

/* ---- the kernels ---- */

template <int NUMBER, int DIM, int FORM>
ATTEND void decode(const struct gpu_attend_launch &r, uint8_t *shared) {
        const int STAGES = GPU_ATTEND_STAGES(DIM), ROWS = FORM == GPU_ATTEND_NARROW ? 8 : 16;
        const uint32_t stages = STAGES * stage<DIM>::BYTES, warps = blockDim.x / 32,
                       warp = threadIdx.x / 32;
        const uint32_t queries = GPU_ATTEND_QUERY_BYTES(DIM, FORM);
        uint32_t split = blockIdx.x % r.n_splits, g = lane_id() / 4,
                 first_head = blockIdx.y % r.head_tiles * ROWS;
        struct head h = head_of(r, blockIdx.x / r.n_splits, blockIdx.y / r.head_tiles);
        uint32_t from = split * r.split, to = min(h.columns, from + r.split);
        struct warp_state<NUMBER, DIM, FORM> w;

        if (split > 0 && from >= h.columns)
                return;
        clear_state(w);
        w.q = reinterpret_cast<uint4 *>(shared + warps * stages +
                                        (r.a.rotation ? warp * queries : 0));
        for (int row = 0; row < w.ROWS; row++) {
                w.rows[row].there = first_head + 8 * row + g < r.a.group;
                w.rows[row].at = query_at(r, h, 0, first_head + 8 * row + g);
                w.rows[row].limit = h.length;
        }
        if (!r.a.rotation && warp == 0)
                load_queries(r, w, 0);
        __syncthreads();
        walk<NUMBER, DIM, FORM, STAGES>(r, h, w, shared + warp * stages, first_head, from, to);
        __syncthreads();
        leave(w, reinterpret_cast<float *>(shared),
              reinterpret_cast<float *>(shared + warps * stages));
        __syncthreads();
        join<DIM, ROWS>(r, h, 0, first_head, split, reinterpret_cast<const float *>(shared),
                        reinterpret_cast<const float *>(shared + warps * stages));
}

#define DECODE(type, dim, heads, number, form) \
        KVD_KERNEL_ROOMY(attend_##type##_##dim##_##heads, struct gpu_attend_launch, \
                         GPU_ATTEND_WARPS * 32) { \
                KVD_SHARED(uint8_t, shared); \
\
                decode<number, dim, form>(a, shared); \
        }
#define DECODES(type, number) \
        DECODE(type, 64, 8, number, GPU_ATTEND_NARROW) \
        DECODE(type, 64, 16, number, GPU_ATTEND_WIDE) \
        DECODE(type, 128, 8, number, GPU_ATTEND_NARROW) \
        DECODE(type, 128, 16, number, GPU_ATTEND_WIDE) \
        DECODE(type, 256, 8, number, GPU_ATTEND_NARROW) \
        DECODE(type, 256, 16, number, GPU_ATTEND_WIDE)

DECODES(f16, NUMBER_F16)
DECODES(bf16, NUMBER_BF16)

/* ---- splits ---- */

/*
 * A block of threads for each row, of prefills, too. What a row does not see of a split is summed
 * as nothing.
 */
KVD_KERNEL(attend_sum, struct gpu_attend_launch, 128) {
        uint32_t heads = a.a.kv_heads * a.a.group, head = blockIdx.x % heads, g = head % a.a.group;
        uint32_t token = blockIdx.x / heads % a.tokens;
        struct head h = head_of(a, blockIdx.x / heads / a.tokens, head / a.a.group);
        uint64_t row = row_of(a, h, token, g);
        const float *stats = reinterpret_cast<const float *>(a.stats) + row * a.n_splits * 2;
        const float *sums = reinterpret_cast<const float *>(a.sums) + row * a.n_splits * a.a.dim;
        uint32_t n = h.columns > 0 ? (h.columns + a.split - 1) / a.split : 1;
        float largest = -INFINITY, weights = 0.0f;

        if (token >= h.tokens)
                return;
        for (uint32_t i = 0; i < n; i++)
                largest = fmaxf(largest, stats[2 * i]);
        for (uint32_t i = 0; i < n; i++)
                weights = fmaf(stats[2 * i + 1], shrink(stats[2 * i], largest), weights);
        for (uint32_t d = threadIdx.x; d < a.a.dim; d += blockDim.x) {
                float sum = 0.0f;

                for (uint32_t i = 0; i < n; i++)
                        sum = fmaf(sums[i * a.a.dim + d], shrink(stats[2 * i], largest), sum);
                store_number(a.a.out, result_at(a, h, token, g) + d, a.a.out_number,
                             weights == 0.0f ? 0.0f : sum / weights);
        }
        if (threadIdx.x == 0)
                store_total(a, row, largest, weights);
}
