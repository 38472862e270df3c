/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Many tokens, keys and values of 16 bits. Rows are the tokens of a sequence and the query heads of
 * a KV head: head by head of token by token. Each warp has 16 rows. The warps of a thread block
 * load keys and values together, one tile each, and all process all of them while the next tiles
 * are loaded. Columns that no row of the thread block sees are not loaded; a warp skips those that
 * none of its rows sees.
 */

#include "kernels/cuda/attend_warp.cuh"

/* A warp's rows. */
struct warp_rows {
        uint32_t first, limit; /* no row sees positions from limit on */
};

template <int NUMBER, int DIM, int FORM>
ATTEND struct warp_rows name_rows(const struct gpu_attend_launch &r, const struct head &h,
                                  uint32_t first, struct warp_state<NUMBER, DIM, FORM> &w) {
        uint32_t n = h.tokens * r.a.group, last = min(first + GPU_ATTEND_TILE, n);
        struct warp_rows rows = {first, first < n ? limit_of(r, h, (last - 1) / r.a.group) : 0};

        for (int i = 0; i < w.ROWS; i++) {
                uint32_t row = first + 8 * i + lane_id() / 4;

                w.rows[i].there = row < n;
                w.rows[i].at = row < n ? query_at(r, h, row / r.a.group, row % r.a.group) : 0;
                w.rows[i].limit = row < n ? limit_of(r, h, row / r.a.group) : 0;
        }
        return rows;
}

/* Processes columns [from, to). at: two stages of one tile per warp. */
template <int NUMBER, int DIM, int FORM>
ATTEND void walk(const struct gpu_attend_launch &r, const struct head &h,
                 struct warp_state<NUMBER, DIM, FORM> &w, const struct warp_rows &rows, uint8_t *at,
                 uint32_t from, uint32_t to) {
        uint32_t warps = blockDim.x / 32, warp = threadIdx.x / 32, column = warp * GPU_ATTEND_TILE;
        uint32_t step = warps * GPU_ATTEND_TILE, row = lane_id() % GPU_ATTEND_TILE;
        struct stage<DIM> tile;
        float x[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};

        tile.at = at + warp * tile.BYTES;
        copy_tile(r, tile, place_of(r, h, from + column + row, to));
        copy_commit();
        for (uint32_t i = 0; from < to; from += step, i ^= 1) {
                tile.at = at + ((i ^ 1) * warps + warp) * tile.BYTES;
                if (from + step < to)
                        copy_tile(r, tile, place_of(r, h, from + step + column + row, to));
                copy_commit();
                copy_wait<1>();
                __syncthreads();
                for (uint32_t j = 0; j < warps; j++) {
                        if (!r.a.chosen && from + j * GPU_ATTEND_TILE >= rows.limit)
                                break;
                        tile.at = at + (i * warps + j) * tile.BYTES;
                        score_tile(r, w, tile, x);
                        weigh_tile(w, x);
                        mix_tile(w, tile, x);
                }
                __syncthreads();
        }
        copy_wait<0>();
}

/* Stores a row's largest score and sum of weights: of a split, or of the whole row. */
ATTEND void store_ends(const struct gpu_attend_launch &r, uint64_t row, uint32_t split,
                       float largest, float weights) {
        float *to = reinterpret_cast<float *>(r.stats) + (row * r.n_splits + split) * 2;

        if (r.n_splits == 1) {
                store_total(r, row, largest, weights);
        } else {
                to[0] = largest;
                to[1] = weights;
        }
}

/*
 * Stores results through shared memory, 16 rows of DIM, so that each row is written contiguously.
 */
template <int NUMBER, int DIM, int FORM>
ATTEND void deliver(const struct gpu_attend_launch &r, const struct head &h,
                    const struct warp_state<NUMBER, DIM, FORM> &w, const struct warp_rows &rows,
                    uint32_t split, float *shared) {
        uint32_t n = h.tokens * r.a.group, lane = lane_id();

#pragma unroll
        for (int i = 0; i < w.ROWS; i++) {
                uint32_t place = 8 * i + lane / 4, row = rows.first + place;
                float weights = sum_quad(w.weights[i]);

                put_sums(w, i,
                         r.n_splits > 1  ? 1.0f :
                         weights == 0.0f ? 0.0f :
                                           1.0f / weights,
                         shared + place * DIM);
                if (w.rows[i].there && lane % 4 == 0)
                        store_ends(r, row_of(r, h, row / r.a.group, row % r.a.group), split,
                                   w.largest[i], weights);
        }
        __syncwarp();
#pragma unroll 1
        for (uint32_t i = lane; i < GPU_ATTEND_TILE * DIM; i += 32) {
                uint32_t row = rows.first + i / DIM, d = i % DIM, token = row / r.a.group,
                         g = row % r.a.group;

                if (row >= n || d >= r.a.dim)
                        continue;
                if (r.n_splits > 1)
                        reinterpret_cast<float *>(
                                r.sums)[(row_of(r, h, token, g) * r.n_splits + split) * r.a.dim +
                                        d] = shared[i];
                else
                        store_number(r.a.out, result_at(r, h, token, g) + d, r.a.out_number,
                                     shared[i]);
        }
}

/* The last rows, which see most, come first. */
template <int NUMBER, int DIM, int FORM>
ATTEND void prefill(const struct gpu_attend_launch &r, uint8_t *shared) {
        const uint32_t warps = blockDim.x / 32, warp = threadIdx.x / 32,
                       rows = warps * GPU_ATTEND_TILE;
        const uint32_t stages = GPU_ATTEND_PREFILL_STAGES * warps * stage<DIM>::BYTES;
        uint32_t split = blockIdx.x % r.n_splits, tile = blockIdx.x / r.n_splits % r.row_tiles;
        struct head h = head_of(r, blockIdx.x / r.n_splits / r.row_tiles, blockIdx.y);
        uint32_t first = (r.row_tiles - 1 - tile) * rows, n = h.tokens * r.a.group;
        uint32_t from = split * r.split, to = min(h.columns, from + r.split);
        struct warp_state<NUMBER, DIM, FORM> w;
        struct warp_rows mine;

        if (first >= n || (split > 0 && from >= h.columns))
                return;
        if (!r.a.chosen)
                to = min(to, limit_of(r, h, (min(first + rows, n) - 1) / r.a.group));
        clear_state(w);
        w.q = reinterpret_cast<uint4 *>(shared + stages + warp * GPU_ATTEND_QUERY_BYTES(DIM, FORM));
        mine = name_rows(r, h, first + warp * GPU_ATTEND_TILE, w);
        if (!r.a.rotation)
                load_queries(r, w, 0, 0, 1);
        walk(r, h, w, mine, shared, from, to);
        __syncthreads();
        deliver(r, h, w, mine, split,
                reinterpret_cast<float *>(shared) + warp * GPU_ATTEND_TILE * DIM);
}

#define PREFILL(type, dim, name, number, form) \
        KVD_KERNEL_ROOMY(attend_many_##type##_##dim##name, struct gpu_attend_launch, \
                         GPU_ATTEND_WARPS * 32) { \
                KVD_SHARED(uint8_t, shared); \
\
                prefill<number, dim, form>(a, shared); \
        }
#define PREFILLS(type, number) \
        PREFILL(type, 64, _plain, number, GPU_ATTEND_PLAIN) \
        PREFILL(type, 64, , number, GPU_ATTEND_WIDE) \
        PREFILL(type, 128, _plain, number, GPU_ATTEND_PLAIN) \
        PREFILL(type, 128, , number, GPU_ATTEND_WIDE) \
        PREFILL(type, 256, _plain, number, GPU_ATTEND_PLAIN) \
        PREFILL(type, 256, , number, GPU_ATTEND_WIDE)

PREFILLS(f16, NUMBER_F16)
PREFILLS(bf16, NUMBER_BF16)
