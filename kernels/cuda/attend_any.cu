/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Attention for any type, dimension and alignment, without matrix units: one token and a few query
 * heads per thread block. A warp processes four columns at a time. Lane i holds elements i, i + 32,
 * ... of queries, keys and values. The scores of four columns and the heads are summed crosswise,
 * so that each lane ends up with one of them: with 8 heads, lane 8 c + g has column c and head g;
 * with 4 heads, lanes 4 c + g and 16 + 4 c + g have it.
 *
 * Numbers of less than 16 bits have kernels of their own (NARROW), so that the others stay as fast.
 *
 * The kernels that turn scores and totals into masses are here, too.
 */

#include "kernels/cuda/attend_join.cuh"
#include "kernels/cuda/narrow.cuh"

#define COLUMNS 4
/* query heads at a time, with N numbers of a row per lane */
#define HEADS (N > 4 ? GPU_ATTEND_HEADS_256 : GPU_ATTEND_HEADS_128)

template <int N> struct any_state {
        float q[HEADS][N], sums[HEADS][N];
        uint32_t rotation;          /* the rotation that q has now */
        float largest, weights; /* of the lane's head; weights: sum over the lane's columns */
};

/* The four columns that a warp is processing. */
struct any_columns {
        const uint8_t *at[COLUMNS];
        uint32_t position, rotation; /* those of the lane's column */
};

template <int N>
ATTEND struct any_columns columns_at(const struct gpu_attend_launch &r, const struct head &h,
                                     uint32_t from, uint32_t to) {
        struct place mine = place_of(r, h, from + lane_id() / HEADS % COLUMNS, to);
        struct any_columns c;

#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
                c.at[i] = reinterpret_cast<const uint8_t *>(
                        warp_from(reinterpret_cast<uint64_t>(mine.at), i * HEADS));
        c.position = mine.position;
        c.rotation = mine.rotation;
        return c;
}

template <int NUMBER, int N>
ATTEND void load_typed(const struct gpu_attend_launch &r, const struct any_columns &c,
                       uint64_t plane, float to[COLUMNS][N]) {
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
                const uint8_t *from = c.at[i] + plane;

#pragma unroll
                for (uint32_t j = 0; j < N; j++) {
                        uint32_t d = 32 * j + lane_id();

                        to[i][j] = c.at[i] && d < r.a.dim ? row_number<NUMBER>(from, d, r.a.dim) :
                                                            0.0f;
                }
        }
}

template <int N>
ATTEND void load_narrow(const struct gpu_attend_launch &r, const struct any_columns &c,
                        uint64_t plane, float to[COLUMNS][N]) {
        if (r.a.number == NUMBER_Q8)
                load_typed<NUMBER_Q8>(r, c, plane, to);
        else if (r.a.number == NUMBER_Q4)
                load_typed<NUMBER_Q4>(r, c, plane, to);
        else if (r.a.number == NUMBER_E4M3)
                load_typed<NUMBER_E4M3>(r, c, plane, to);
        else
                load_typed<NUMBER_E5M2>(r, c, plane, to);
}

template <bool NARROW, int N>
ATTEND void load_rows(const struct gpu_attend_launch &r, const struct any_columns &c,
                      uint64_t plane, float to[COLUMNS][N]) {
        if (NARROW)
                load_narrow(r, c, plane, to);
        else if (r.a.number == NUMBER_F32)
                load_typed<NUMBER_F32>(r, c, plane, to);
        else if (r.a.number == NUMBER_F16)
                load_typed<NUMBER_F16>(r, c, plane, to);
        else
                load_typed<NUMBER_BF16>(r, c, plane, to);
}

template <int N>
ATTEND float query_number(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                          uint32_t first_head, uint32_t rotation, uint32_t i) {
        uint32_t g = first_head + i / (N * 32);

        return g < r.a.group ?
                       load_query(r, query_at(r, h, token, g), i % (N * 32), rotation) :
                       0.0f;
}

/* The same queries in shared memory, transformed as quantised keys are. */
template <int N>
ATTEND void put_turned(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                       uint32_t first_head, uint32_t rotation, float *shared) {
#pragma unroll 1
        for (uint32_t i = lane_id(); i < HEADS * N * 32; i += KVD_GROUP) {
                float low = query_number<N>(r, h, token, first_head, rotation, i),
                      high = query_number<N>(r, h, token, first_head, rotation, i + 32);
                uint32_t d = i % (N * 32) / KVD_GROUP * KVD_GROUP;

                turn_group(&low, &high, d < r.a.dim ? min(r.a.dim - d, KVD_GROUP) : 0);
                shared[i] = low;
                shared[i + 32] = high;
        }
}

/*
 * Loads queries through the warp's own shared memory, HEADS rows of N * 32, so that one copy of the
 * code is enough.
 */
template <bool NARROW, int N>
ATTEND void load_heads(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                       uint32_t first_head, uint32_t rotation, float *shared, float q[HEADS][N]) {
        __syncwarp();
        if (NARROW && is_quantised(r.a.number)) {
                put_turned<N>(r, h, token, first_head, rotation, shared);
        } else {
#pragma unroll 1
                for (uint32_t i = lane_id(); i < HEADS * N * 32; i += 32)
                        shared[i] = query_number<N>(r, h, token, first_head, rotation, i);
        }
        __syncwarp();
#pragma unroll
        for (uint32_t g = 0; g < HEADS; g++)
#pragma unroll
                for (uint32_t j = 0; j < N; j++)
                        q[g][j] = shared[(g * N + j) * 32 + lane_id()];
}

/* ---- scores ---- */

/*
 * Each step halves the number of sums that a lane has a part of; after five steps it has all of
 * one.
 */
template <int HALF> ATTEND void sum_crosswise(float x[32]) {
        bool upper = lane_id() & HALF;

#pragma unroll
        for (int i = 0; i < HALF; i++) {
                float other = warp_xor(upper ? x[i] : x[i + HALF], HALF);

                x[i] = (upper ? x[i + HALF] : x[i]) + other;
        }
}

template <int N> ATTEND float products(const float q[HEADS][N], const float k[COLUMNS][N]) {
        float x[32];

#pragma unroll
        for (int i = 0; i < COLUMNS * HEADS; i++) {
                x[i] = 0.0f;
#pragma unroll
                for (int j = 0; j < N; j++)
                        x[i] = fmaf(q[i % HEADS][j], k[i / HEADS][j], x[i]);
        }
        if (COLUMNS * HEADS == 32)
                sum_crosswise<16>(x);
        sum_crosswise<8>(x);
        sum_crosswise<4>(x);
        sum_crosswise<2>(x);
        sum_crosswise<1>(x);
        return COLUMNS * HEADS == 32 ? x[0] : x[0] + warp_xor(x[0], 16);
}

/*
 * The lane's score, as an exponent of two. The columns are processed once for each rotation among
 * them.
 */
template <bool NARROW, int N>
ATTEND float score(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                   uint32_t first_head, uint32_t limit, struct any_state<N> &w,
                   const struct any_columns &c, const float k[COLUMNS][N], float *shared) {
        uint32_t todo = warp_ballot(c.position < limit);
        float x = -INFINITY, part;

#pragma unroll 1
        while (todo) {
                uint32_t rotation = warp_from(c.rotation, __ffs((int)todo) - 1);

                if (rotation != w.rotation)
                        load_heads<NARROW>(r, h, token, first_head, rotation, shared, w.q);
                w.rotation = rotation;
                part = products(w.q, k);
                if (c.rotation == rotation && c.position < limit)
                        x = part * r.exponent;
                todo &= ~warp_ballot(c.rotation == rotation);
        }
        return x;
}

/* ---- softmax and values ---- */

/* Turns the lane's score into its weight. */
template <int N> ATTEND float weigh(struct any_state<N> &w, float x) {
        float most = fmaxf(x, warp_xor(x, HEADS)), by;
        bool more;

        most = fmaxf(fmaxf(most, warp_xor(most, 2 * HEADS)), w.largest);
        more = most > w.largest;
        by = shrink(w.largest, most);
        w.largest = most;
        x = x == -INFINITY ? 0.0f : exp2f(x - most);
        w.weights = w.weights * by + x;
        if (!warp_ballot(more))
                return x;
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
                float head_by = warp_from(by, g);

                for (int j = 0; j < N; j++)
                        w.sums[g][j] *= head_by;
        }
        return x;
}

template <int N> ATTEND void mix(struct any_state<N> &w, float x, const float v[COLUMNS][N]) {
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
#pragma unroll
                for (int g = 0; g < HEADS; g++) {
                        float weight = warp_from(x, i * HEADS + g);

#pragma unroll
                        for (int j = 0; j < N; j++)
                                w.sums[g][j] = fmaf(weight, v[i][j], w.sums[g][j]);
                }
}

template <int N>
ATTEND void keep_score(const struct gpu_attend_launch &r, const struct head &h, uint32_t first_head,
                       uint32_t column, uint32_t to, float x) {
        uint32_t g = first_head + lane_id() % HEADS, c = column + lane_id() / HEADS % COLUMNS;

        /* of 4 heads, two lanes have each score */
        if (r.scores && lane_id() < COLUMNS * HEADS && g < r.a.group && c < to)
                reinterpret_cast<float *>(r.scores)[row_of(r, h, 0, g) * r.ld_scores + c] = x;
}

template <bool NARROW, int N>
ATTEND void walk(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                 uint32_t first_head, struct any_state<N> &w, uint32_t from, uint32_t to,
                 float *shared) {
        uint32_t limit = limit_of(r, h, token), step = COLUMNS * (blockDim.x / 32);
        float k[COLUMNS][N], v[COLUMNS][N], x;

        shared += threadIdx.x / 32 * HEADS * N * 32;
#pragma unroll 1
        for (from += threadIdx.x / 32 * COLUMNS; from < to; from += step) {
                struct any_columns c = columns_at<N>(r, h, from, to);

                load_rows<NARROW>(r, c, r.a.k_offset, k);
                load_rows<NARROW>(r, c, r.a.v_offset, v);
                x = score<NARROW>(r, h, token, first_head, limit, w, c, k, shared);
                keep_score<N>(r, h, first_head, from, to, x);
                x = weigh(w, x);
                mix(w, x, v);
        }
}

/* ---- the kernels ---- */

template <int N> ATTEND void leave(const struct any_state<N> &w, float *sums, float *ends) {
        uint32_t lane = lane_id(), warp = threadIdx.x / 32;
        float weights = w.weights + warp_xor(w.weights, HEADS);

        weights += warp_xor(weights, 2 * HEADS);
#pragma unroll
        for (int g = 0; g < HEADS; g++)
                for (int j = 0; j < N; j++)
                        sums[(warp * HEADS + g) * N * 32 + j * 32 + lane] = w.sums[g][j];
        if (lane < HEADS) {
                ends[(warp * HEADS + lane) * 2] = w.largest;
                ends[(warp * HEADS + lane) * 2 + 1] = weights;
        }
}

/* The columns of a token are those of its sequence's last token, up to the last one it sees. */
template <int N, bool NARROW>
ATTEND void attend_any(const struct gpu_attend_launch &r, float *shared) {
        uint32_t split = blockIdx.x % r.n_splits, token = blockIdx.x / r.n_splits % r.tokens;
        uint32_t first_head = blockIdx.y % r.head_tiles * HEADS, from = split * r.split, to;
        struct head h = head_of(r, blockIdx.x / r.n_splits / r.tokens, blockIdx.y / r.head_tiles);
        float *ends = shared + blockDim.x / 32 * HEADS * N * 32;
        struct any_state<N> w;

        if (token >= h.tokens || (split > 0 && from >= h.columns))
                return;
        to = min(h.columns, from + r.split);
        if (!r.a.chosen)
                to = min(to, limit_of(r, h, token));
        w.rotation = NOWHERE;
        w.largest = -INFINITY;
        w.weights = 0.0f;
#pragma unroll
        for (int g = 0; g < HEADS; g++)
                for (int j = 0; j < N; j++)
                        w.sums[g][j] = w.q[g][j] = 0.0f;
        walk<NARROW>(r, h, token, first_head, w, from, to, shared);
        __syncthreads();
        leave(w, shared, ends);
        __syncthreads();
        join<N * 32, HEADS>(r, h, token, first_head, split, shared, ends);
}

KVD_KERNEL_ROOMY(attend_any_128, struct gpu_attend_launch, GPU_ATTEND_WARPS * 32) {
        KVD_SHARED(float, shared);

        attend_any<4, false>(a, shared);
}

KVD_KERNEL_ROOMY(attend_any_128_narrow, struct gpu_attend_launch, GPU_ATTEND_WARPS * 32) {
        KVD_SHARED(float, shared);

        attend_any<4, true>(a, shared);
}

KVD_KERNEL_ROOMY(attend_any_256, struct gpu_attend_launch, GPU_ATTEND_WARPS * 32) {
        KVD_SHARED(float, shared);

        attend_any<8, false>(a, shared);
}

KVD_KERNEL_ROOMY(attend_any_256_narrow, struct gpu_attend_launch, GPU_ATTEND_WARPS * 32) {
        KVD_SHARED(float, shared);

        attend_any<8, true>(a, shared);
}

/* ---- masses: the weights of columns ---- */

/* Weights of one token (decode), from its stored scores. */
KVD_KERNEL(attend_weigh, struct gpu_attend_launch, GPU_ATTEND_MASS_THREADS) {
        struct head h = head_of(a, blockIdx.y / a.a.kv_heads, blockIdx.y % a.a.kv_heads);
        const float *totals = reinterpret_cast<const float *>(a.totals) + 2 * row_of(a, h, 0, 0);
        const float *scores = reinterpret_cast<const float *>(a.scores) +
                              row_of(a, h, 0, 0) * a.ld_scores;
        float *weights = reinterpret_cast<float *>(a.weights) + blockIdx.y * a.ld_scores;

        for (uint32_t c = blockIdx.x * blockDim.x + threadIdx.x; c < h.columns;
             c += gridDim.x * blockDim.x) {
                float sum = 0.0f;

                for (uint32_t g = 0; g < a.a.group; g++)
                        if (totals[2 * g + 1] != 0.0f)
                                sum += shrink(scores[g * a.ld_scores + c], totals[2 * g]) /
                                       totals[2 * g + 1];
                weights[c] = sum;
        }
}

/* Weights of many tokens (prefill): scores are recomputed, four columns per warp. */
template <bool NARROW, int N>
ATTEND float weigh_rows(const struct gpu_attend_launch &r, const struct head &h,
                        const struct any_columns &c, const float k[COLUMNS][N], uint32_t first_head,
                        float *shared) {
        uint32_t g = first_head + lane_id() % HEADS;
        struct any_state<N> w;
        float sum = 0.0f;

#pragma unroll 1
        for (uint32_t token = 0; token < h.tokens; token++) {
                const float *total = reinterpret_cast<const float *>(r.totals) +
                                     2 * row_of(r, h, token, g);
                float x;

                w.rotation = NOWHERE;
                x = score<NARROW>(r, h, token, first_head, limit_of(r, h, token), w, c, k, shared);
                if (g < r.a.group && total[1] != 0.0f)
                        sum += shrink(x, total[0]) / total[1];
        }
        return sum;
}

template <int N, bool NARROW>
ATTEND void weigh_many(const struct gpu_attend_launch &r, float *shared) {
        struct head h = head_of(r, blockIdx.y / r.a.kv_heads, blockIdx.y % r.a.kv_heads);
        uint32_t column = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * COLUMNS,
                 lane = lane_id();
        float k[COLUMNS][N], sum = 0.0f;
        struct any_columns c;

        if (column >= h.columns)
                return;
        c = columns_at<N>(r, h, column, h.columns);
        load_rows<NARROW>(r, c, r.a.k_offset, k);
        shared += threadIdx.x / 32 * HEADS * N * 32;
#pragma unroll 1
        for (uint32_t first_head = 0; first_head < r.a.group; first_head += HEADS)
                sum += weigh_rows<NARROW>(r, h, c, k, first_head, shared);
        for (int mask = HEADS / 2; mask; mask /= 2)
                sum += warp_xor(sum, mask);
        column += lane / HEADS;
        if (lane % HEADS == 0 && lane < COLUMNS * HEADS && column < h.columns)
                reinterpret_cast<float *>(r.weights)[blockIdx.y * r.ld_scores + column] = sum;
}

KVD_KERNEL(attend_weigh_128, struct gpu_attend_launch, GPU_ATTEND_MASS_THREADS) {
        KVD_SHARED(float, shared);

        weigh_many<4, false>(a, shared);
}

KVD_KERNEL(attend_weigh_128_narrow, struct gpu_attend_launch, GPU_ATTEND_MASS_THREADS) {
        KVD_SHARED(float, shared);

        weigh_many<4, true>(a, shared);
}

KVD_KERNEL(attend_weigh_256, struct gpu_attend_launch, GPU_ATTEND_MASS_THREADS) {
        KVD_SHARED(float, shared);

        weigh_many<8, false>(a, shared);
}

KVD_KERNEL(attend_weigh_256_narrow, struct gpu_attend_launch, GPU_ATTEND_MASS_THREADS) {
        KVD_SHARED(float, shared);

        weigh_many<8, true>(a, shared);
}

/* ---- masses: to blocks and positions ---- */

/* The first column whose position is not below position. */
ATTEND uint32_t column_of(const struct gpu_attend_launch &r, const struct head &h,
                          uint32_t position) {
        uint32_t low = 0, high = h.columns;

        if (!r.a.chosen)
                return min(position, h.columns);
        while (low < high) {
                uint32_t middle = low + (high - low) / 2;

                if (position_of(r, h, middle) < position)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

KVD_KERNEL(attend_spread, struct gpu_attend_launch, GPU_ATTEND_MASS_THREADS) {
        struct head h = head_of(a, blockIdx.y / a.a.kv_heads, blockIdx.y % a.a.kv_heads);
        const float *weights = reinterpret_cast<const float *>(a.weights) +
                               blockIdx.y * a.ld_scores;
        float *blocks = reinterpret_cast<float *>(a.a.block_mass) + blockIdx.y * a.a.ld_block_mass;
        float *tokens = reinterpret_cast<float *>(a.a.token_mass) + blockIdx.y * a.a.ld_token_mass;
        uint32_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;

        for (uint32_t c = first; a.a.token_mass && c < h.columns; c += step) {
                uint32_t position = position_of(a, h, c);

                if (position < h.length)
                        tokens[position] += weights[c];
        }
        for (uint32_t b = first; a.a.block_mass && b * a.a.block_tokens < h.length; b += step) {
                uint32_t end = column_of(a, h, min((b + 1) * a.a.block_tokens, h.length));
                float sum = 0.0f;

                for (uint32_t c = column_of(a, h, b * a.a.block_tokens); c < end; c++)
                        sum += weights[c];
                blocks[b] += sum;
        }
}
