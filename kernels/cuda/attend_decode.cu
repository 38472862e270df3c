/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One token per sequence, keys and values of 16 bits. A thread block has a split of a sequence's
 * columns. Each warp takes every n-th tile of it, with a few tiles in flight to its own shared
 * memory. Warps do not wait for each other before the end, where their sums are merged; attend_sum
 * merges splits.
 *
 * The kernel is bound by memory: the 32 products of 16 x 8 x 16 for 8 KiB of keys and values (dim
 * 128, 8 heads) take a quarter of the matrix units' time on an H200.
 */

#include "kernels/cuda/attend_join.cuh"
#include "kernels/cuda/attend_warp.cuh"

/* ---- a warp's way over its columns ---- */

/* Stores scores, from which the masses are computed later. */
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
 * A warp's way over its columns: every step-th tile before to. A block table entry is as far away
 * as a key, so the address of the next tile to copy is looked up one tile ahead, and its position,
 * if positions are chosen, two tiles ahead.
 */
struct way {
        uint32_t next, step, to; /* next: first column of the next tile to copy */
        uint32_t position;       /* position of the lane's row in the tile after that */
        struct place place;      /* address of the lane's row in the next tile */
};

ATTEND void look_ahead(const struct gpu_attend_launch &r, const struct head &h, struct way &y) {
        y.place = place_at(r, h, y.position);
        y.position = position_before(r, h, y.next + y.step + lane_id() % GPU_ATTEND_TILE, y.to);
}

template <int DIM>
ATTEND void copy_next(const struct gpu_attend_launch &r, const struct head &h, struct way &y,
                      uint8_t *shared, uint32_t number) {
        struct stage<DIM> tile = {shared + number * stage<DIM>::BYTES};

        if (y.next < y.to)
                copy_tile(r, tile, y.place);
        copy_commit();
        y.next += y.step;
        look_ahead(r, h, y);
}

/* Starts on columns [from, to): when this returns, copies to all stages but one are in flight. */
template <int DIM>
ATTEND struct way set_out(const struct gpu_attend_launch &r, const struct head &h, uint8_t *shared,
                          uint32_t from, uint32_t to) {
        uint32_t first = from + threadIdx.x / 32 * GPU_ATTEND_TILE;
        struct way y = {first, GPU_ATTEND_TILE * (blockDim.x / 32), to,
                        position_before(r, h, first + lane_id() % GPU_ATTEND_TILE, to),
                        {nullptr, NOWHERE, 0}};

        look_ahead(r, h, y);
#pragma unroll 1
        for (uint32_t i = 0; i + 1 < r.stages; i++)
                copy_next<DIM>(r, h, y, shared, i);
        return y;
}

template <int NUMBER, int DIM, int FORM>
ATTEND void walk(const struct gpu_attend_launch &r, const struct head &h,
                 struct warp_state<NUMBER, DIM, FORM> &w, struct way &y, uint8_t *shared,
                 uint32_t first_head, uint32_t from) {
        struct stage<DIM> tile;
        float x[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
        uint32_t i = 0;

#pragma unroll 1
        for (from += threadIdx.x / 32 * GPU_ATTEND_TILE; from < y.to; from += y.step) {
                if (r.stages < GPU_ATTEND_STAGES(DIM))
                        copy_wait<GPU_ATTEND_LEAST_STAGES - 2>();
                else
                        copy_wait<GPU_ATTEND_STAGES(DIM) - 2>();
                __syncwarp();
                copy_next<DIM>(r, h, y, shared, (i > 0 ? i : r.stages) - 1);
                tile.at = shared + i * tile.BYTES;
                score_tile(r, w, tile, x);
                if (r.scores)
                        keep_scores<NUMBER, DIM, FORM>(r, h, first_head, from, y.to, x);
                weigh_tile(w, x);
                mix_tile(w, tile, x);
                i = i + 1 < r.stages ? i + 1 : 0;
        }
        copy_wait<0>();
}

/* ---- the warps of a block ---- */

/* Stores a warp's results: sums[warp][row][dim]; ends[warp][row]: largest score, sum of weights. */
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
        const int ROWS = FORM == GPU_ATTEND_NARROW ? 8 : 16;
        const uint32_t stages = r.stages * stage<DIM>::BYTES, warps = blockDim.x / 32,
                       warp = threadIdx.x / 32;
        const uint32_t queries = GPU_ATTEND_QUERY_BYTES(DIM, FORM);
        uint32_t split = blockIdx.x % r.n_splits, g = lane_id() / 4,
                 first_head = blockIdx.y % r.head_tiles * ROWS;
        struct head h = head_of(r, blockIdx.x / r.n_splits, blockIdx.y / r.head_tiles);
        uint32_t from = split * r.split, to = min(h.columns, from + r.split);
        struct warp_state<NUMBER, DIM, FORM> w;
        struct way y;

        if (split > 0 && from >= h.columns)
                return;
        y = set_out<DIM>(r, h, shared + warp * stages, from, to);
        clear_state(w);
        w.q = reinterpret_cast<uint4 *>(shared + warps * stages +
                                        (r.a.rotation ? warp * queries : 0));
        for (int row = 0; row < w.ROWS; row++) {
                w.rows[row].there = first_head + 8 * row + g < r.a.group;
                w.rows[row].at = query_at(r, h, 0, first_head + 8 * row + g);
                w.rows[row].limit = h.length;
        }
        if (!r.a.rotation)
                load_queries(r, w, 0, warp, warps);
        __syncthreads();
        walk(r, h, w, y, shared + warp * stages, first_head, from);
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

enum { SUM_WARPS = GPU_ATTEND_SUM_THREADS / 32, SUM_DIMS = 256 / 32 };

/* The splits of a row. */
struct parts {
        const float *stats, *sums;
        uint32_t n, dim;
};

ATTEND float largest_of(const struct parts &p) {
        float x = -INFINITY;

        for (uint32_t i = lane_id(); i < p.n; i += 32)
                x = fmaxf(x, p.stats[2 * i]);
        for (int mask = 16; mask; mask /= 2)
                x = fmaxf(x, warp_xor(x, mask));
        return x;
}

/*
 * A warp adds up every SUM_WARPS-th split, 32 at a time: each lane has the factor of one split, and
 * some dimensions of all of them. Returns the weights of the lane's splits.
 */
ATTEND float add_parts(const struct parts &p, float largest, float to[SUM_DIMS]) {
        float weights = 0.0f;

        for (uint32_t first = threadIdx.x / 32; first < p.n; first += 32 * SUM_WARPS) {
                uint32_t mine = first + lane_id() * SUM_WARPS;
                float by = mine < p.n ? shrink(p.stats[2 * mine], largest) : 0.0f;

                if (mine < p.n)
                        weights = fmaf(p.stats[2 * mine + 1], by, weights);
#pragma unroll 4
                for (uint32_t i = 0; i < 32 && first + i * SUM_WARPS < p.n; i++) {
                        const float *from = p.sums + (uint64_t)(first + i * SUM_WARPS) * p.dim;
                        float of_split = warp_from(by, (int)i);

#pragma unroll
                        for (uint32_t k = 0; k < SUM_DIMS; k++)
                                if (32 * k + lane_id() < p.dim)
                                        to[k] = fmaf(from[32 * k + lane_id()], of_split, to[k]);
                }
        }
        return weights;
}

/*
 * One thread block per row, for decodes and prefills. A split of which a row sees nothing counts as
 * zeros.
 */
KVD_KERNEL(attend_sum, struct gpu_attend_launch, GPU_ATTEND_SUM_THREADS) {
        __shared__ float sums[SUM_WARPS][32 * SUM_DIMS];
        __shared__ float weights[SUM_WARPS];
        uint32_t heads = a.a.kv_heads * a.a.group, head = blockIdx.x % heads, g = head % a.a.group;
        uint32_t token = blockIdx.x / heads % a.tokens, d = threadIdx.x, warp = d / 32;
        struct head h = head_of(a, blockIdx.x / heads / a.tokens, head / a.a.group);
        uint64_t row = row_of(a, h, token, g);
        const struct parts p = {reinterpret_cast<const float *>(a.stats) + row * a.n_splits * 2,
                                reinterpret_cast<const float *>(a.sums) +
                                        row * a.n_splits * a.a.dim,
                                h.columns > 0 ? (h.columns + a.split - 1) / a.split : 1, a.a.dim};
        float largest, of_warp, mine[SUM_DIMS] = {}, sum = 0.0f, weight = 0.0f;

        if (token >= h.tokens)
                return;
        largest = largest_of(p);
        of_warp = warp_sum(add_parts(p, largest, mine));
        for (uint32_t k = 0; k < SUM_DIMS; k++)
                sums[warp][32 * k + lane_id()] = mine[k];
        if (lane_id() == 0)
                weights[warp] = of_warp;
        __syncthreads();
        for (uint32_t w = 0; w < SUM_WARPS; w++) {
                sum += sums[w][d];
                weight += weights[w];
        }
        if (d < a.a.dim)
                store_number(a.a.out, result_at(a, h, token, g) + d, a.a.out_number,
                             weight == 0.0f ? 0.0f : sum / weight);
        if (d == 0)
                store_total(a, row, largest, weight);
}
