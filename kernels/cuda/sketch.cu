/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Threads are numbered over pieces (N numbers of a head: 16 bytes of a vector), then cells or tokens; blocks' y is a
 * plane of a layer, whose vectors come from memory once, and for the other rows from the L2.
 */

#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/sketch.h"

#define THREADS 256
#define ROWS_MOST 8
#define AHEAD 3

#define COLUMN 0x3fffffffu /* of a place, as in kernels/sketch.h */
#define SLOT 0x3fffffffu

/* ---- places: kernels/sketch_place.c ------------------------------------------------------------------------------ */

#define PRIME ((1ull << 61) - 1)
#define GOLDEN 0x9e3779b97f4a7c15ull

enum { UNIFORM = 1, PERMUTATION = 2, DEGREE = 3, STREAM_ROUND = 4, STEPS = 4 };

static __device__ __forceinline__ uint64_t mix(uint64_t x) {
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 27) * 0x94d049bb133111ebull;
        return x ^ x >> 31;
}

static __device__ __forceinline__ uint64_t draw(uint64_t salt, uint32_t row, uint64_t i) {
        return mix(mix(salt + GOLDEN * (row + 1)) + GOLDEN * (i + 1));
}

/* high 2^64 + low, modulo 2^61 - 1 */
static __device__ __forceinline__ uint64_t reduce(uint64_t high, uint64_t low) {
        uint64_t sum = (low & PRIME) + (high << 3 | low >> 61);

        return sum >= PRIME ? sum - PRIME : sum;
}

static __device__ __forceinline__ uint64_t multiply_add(uint64_t a, uint64_t b, uint64_t c) {
        uint64_t low = a * b, sum = low + c;

        return reduce(__umul64hi(a, b) + (sum < low), sum);
}

static __device__ uint64_t polynomial(uint64_t salt, uint32_t row, uint64_t u) {
        uint64_t y = 0;

        u = reduce(0, u);
        for (int i = DEGREE; i >= 0; i--)
                y = multiply_add(y, u, reduce(0, draw(salt, row, (uint64_t)i)));
        return y;
}

static __device__ uint32_t permuted_column(const struct gpu_sketch_place &a, uint32_t row, uint64_t u) {
        uint64_t key = draw(a.salt, row, STREAM_ROUND) + u / a.columns;
        uint32_t bits = a.columns > 1 ? 32 - __clz((int)(a.columns - 1)) : 0, mask = (1u << bits) - 1;
        uint32_t x = (uint32_t)(u % a.columns);
        uint64_t random[STEPS];

        for (int i = 0; i < STEPS; i++)
                random[i] = draw(key, (uint32_t)i, 0);
        do {
                for (int i = 0; i < STEPS; i++) {
                        x = (x * ((uint32_t)random[i] | 1) + (uint32_t)(random[i] >> 32)) & mask;
                        x ^= x >> (bits / 2 + 1);
                }
        } while (x >= a.columns);
        return x;
}

KVD_KERNEL(sketch_place, struct gpu_sketch_place, THREADS) {
        for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < (uint64_t)a.n * a.rows;
             i += (uint64_t)gridDim.x * THREADS) {
                uint64_t u = reinterpret_cast<const uint64_t *>(a.ordinals)[i / a.rows];
                uint32_t row = (uint32_t)(i % a.rows);
                uint64_t h = polynomial(a.salt, row, u);
                uint32_t column = (uint32_t)(__umul64hi(h, a.columns) << 3 | h * a.columns >> 61);

                if (a.family == PERMUTATION)
                        column = permuted_column(a, row, u);
                reinterpret_cast<uint32_t *>(a.places)[i] = (uint32_t)h << 30 | column;
        }
}

/* ---- where a thread is ------------------------------------------------------------------------------------------- */

struct piece {
        uint32_t layer, plane, item, d; /* item: a run, or a token; d: of the head, the first of N */
        uint64_t number;                /* of the cell, likewise */
        uint64_t in_block;              /* bytes */
};

template <int NUMBER> static __device__ __forceinline__ uint64_t bytes_of(uint64_t elements) {
        return elements * sizeof(typename element<NUMBER>::type);
}

/* Of one layer and plane; fewer than 2^32. */
template <int NUMBER>
static __device__ __forceinline__ uint32_t pieces_of(const struct gpu_sketch_parts &s, uint32_t items) {
        return (s.dim + vector<NUMBER>::N - 1) / vector<NUMBER>::N * s.heads * items;
}

template <int NUMBER>
static __device__ __forceinline__ struct piece piece_of(const struct gpu_sketch_parts &s, uint32_t i) {
        uint32_t each = (s.dim + vector<NUMBER>::N - 1) / vector<NUMBER>::N, head = i / each;
        struct piece p = {blockIdx.y / s.n_planes, blockIdx.y % s.n_planes, head / s.heads,
                          (i - head * each) * vector<NUMBER>::N, 0, 0};

        head -= p.item * s.heads;
        p.number = ((uint64_t)p.layer * s.heads + head) * s.dim + p.d;
        p.in_block = s.planes[p.plane].offset + p.layer * s.layer_stride + bytes_of<NUMBER>(head * s.head_stride);
        return p;
}

template <int NUMBER> static __device__ __forceinline__ bool is_wide(const struct gpu_sketch_parts &s) {
        uint64_t bytes = s.blocks.base | s.blocks.block_bytes | s.layer_stride;

        bytes |= s.planes[0].offset | s.planes[0].cells | s.planes[0].mean;

        if (s.n_planes > 1)
                bytes |= s.planes[1].offset | s.planes[1].cells | s.planes[1].mean;
        return bytes % 16 == 0 && s.cell_stride % 4 == 0 &&
               (s.head_stride | s.token_stride | s.dim) % vector<NUMBER>::N == 0;
}

/* A token's vector in a block; NULL if that is not resident. */
template <int NUMBER>
static __device__ __forceinline__ uint8_t *vector_at(const struct gpu_sketch_parts &s, const struct piece &p,
                                                     struct gpu_sketch_token t) {
        uint32_t id = reinterpret_cast<const uint32_t *>(s.blocks.ids)[t.block];

        if (id == GPU_NO_BLOCK)
                return nullptr;
        return reinterpret_cast<uint8_t *>(s.blocks.base + id * s.blocks.block_bytes + p.in_block +
                                           bytes_of<NUMBER>((t.slot & SLOT) * s.token_stride));
}

template <int N, bool WIDE>
static __device__ __forceinline__ void load_numbers(float *to, const float *from, uint32_t n) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
                if (WIDE) {
                        vector<NUMBER_F32>::wide(to + i, load_16_written(from + i));
                } else {
#pragma unroll
                        for (int k = i; k < i + 4; k++)
                                to[k] = (uint32_t)k < n ? from[k] : 0.0f;
                }
        }
}

template <int N, bool WIDE>
static __device__ __forceinline__ void store_numbers(float *to, const float *from, uint32_t n) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
                if (WIDE) {
                        store_16(to + i, make_uint4(__float_as_uint(from[i]), __float_as_uint(from[i + 1]),
                                                    __float_as_uint(from[i + 2]), __float_as_uint(from[i + 3])));
                } else {
#pragma unroll
                        for (int k = i; k < i + 4; k++)
                                if ((uint32_t)k < n)
                                        to[k] = from[k];
                }
        }
}

template <int N, bool WIDE>
static __device__ __forceinline__ void load_mean(float *to, const struct gpu_sketch_plane &plane, const struct piece &p,
                                                 uint32_t n) {
        if (plane.mean)
                load_numbers<N, WIDE>(to, reinterpret_cast<const float *>(plane.mean) + p.number, n);
}

/* ---- insert ------------------------------------------------------------------------------------------------------ */

template <int NUMBER, bool WIDE>
static __device__ __forceinline__ void insert_piece(const struct gpu_sketch_insert &a, const struct piece &p) {
        const int N = vector<NUMBER>::N;
        const struct gpu_sketch_plane &plane = a.parts.planes[p.plane];
        const struct gpu_sketch_run *run = reinterpret_cast<const struct gpu_sketch_run *>(a.runs) + p.item;
        const struct gpu_sketch_token *tokens = reinterpret_cast<const struct gpu_sketch_token *>(a.planned);
        float *cell = reinterpret_cast<float *>(plane.cells) + run->cell * a.parts.cell_stride + p.number;
        uint32_t left = a.parts.dim - p.d, end = run[1].first;
        float sum[N], mean[N] = {};

        load_numbers<N, WIDE>(sum, cell, left);
        load_mean<N, WIDE>(mean, plane, p, left);
#pragma unroll 1
        for (uint32_t e = run->first; e < end; e += AHEAD) {
                float weight[AHEAD];
                uint4 v[AHEAD];

#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                        struct gpu_sketch_token t = e + k < end ? tokens[e + k] : tokens[e];
                        const uint8_t *at = vector_at<NUMBER>(a.parts, p, t);

                        weight[k] = !at || e + k >= end ? 0.0f : t.slot & plane.sign ? -a.weight : a.weight;
                        v[k] = load_vector<NUMBER, WIDE>(at, p.d, weight[k] != 0.0f ? a.parts.dim : 0);
                }
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                        float x[N];

                        vector<NUMBER>::wide(x, v[k]);
#pragma unroll
                        for (int i = 0; i < N; i++) {
                                float centred = plane.mean ? x[i] - mean[i] : x[i];

                                sum[i] = weight[k] != 0.0f ? fmaf(weight[k], centred, sum[i]) : sum[i];
                        }
                }
        }
        store_numbers<N, WIDE>(cell, sum, left);
}

template <int NUMBER> static __device__ __forceinline__ void insert_all(const struct gpu_sketch_insert &a) {
        uint64_t pieces = pieces_of<NUMBER>(a.parts, a.n_runs);
        bool wide = is_wide<NUMBER>(a.parts);

#pragma unroll 1
        for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < pieces; i += (uint64_t)gridDim.x * THREADS)
                if (wide)
                        insert_piece<NUMBER, true>(a, piece_of<NUMBER>(a.parts, (uint32_t)i));
                else
                        insert_piece<NUMBER, false>(a, piece_of<NUMBER>(a.parts, (uint32_t)i));
}

KVD_KERNEL(sketch_insert, struct gpu_sketch_insert, THREADS) {
        if (a.parts.number == NUMBER_F32)
                insert_all<NUMBER_F32>(a);
        else if (a.parts.number == NUMBER_F16)
                insert_all<NUMBER_F16>(a);
        else
                insert_all<NUMBER_BF16>(a);
}

/* ---- median ------------------------------------------------------------------------------------------------------ */

/* -0 where v is a number, NaN where it is not: x + (-0) is x, whatever x. */
static __device__ __forceinline__ float poison(float v) {
        return -1.0f < fabsf(v) ? -0.0f : v;
}

static __device__ __forceinline__ void order(float *a, float *b) {
        float least = lesser(*a, *b);

        *b = greater(*a, *b);
        *a = least;
}

/* The middle of rows numbers; unrolled for all there can be, so that they stay in registers. */
static __device__ __forceinline__ float median_of(float v[ROWS_MOST], uint32_t rows) {
        float high = v[0], low = v[0];

#pragma unroll
        for (uint32_t pass = 0; pass < ROWS_MOST; pass++)
#pragma unroll
                for (uint32_t r = pass % 2; r + 1 < ROWS_MOST; r += 2)
                        if (pass < rows && r + 1 < rows)
                                order(v + r, v + r + 1);
#pragma unroll
        for (uint32_t r = 0; r < ROWS_MOST; r++) {
                high = r == rows / 2 ? v[r] : high;
                low = r + 1 == rows / 2 ? v[r] : low;
        }
        return rows % 2 ? high : 0.5f * (low + high);
}

static __device__ __forceinline__ float median_of_three(float a, float b, float c) {
        return greater(lesser(a, b), lesser(greater(a, b), c));
}

static __device__ __forceinline__ float median(float v[ROWS_MOST], uint32_t rows) {
        float spoilt = poison(v[0]);

#pragma unroll
        for (uint32_t r = 1; r < ROWS_MOST; r++)
                spoilt = r < rows ? spoilt + poison(v[r]) : spoilt;
        return (rows == 3 ? median_of_three(v[0], v[1], v[2]) : median_of(v, rows)) + spoilt;
}

KVD_KERNEL(sketch_median, struct gpu_sketch_median, THREADS) {
        const float *x = reinterpret_cast<const float *>(a.x);

        for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += (uint64_t)gridDim.x * THREADS) {
                float v[ROWS_MOST];

#pragma unroll
                for (uint32_t r = 0; r < ROWS_MOST; r++)
                        v[r] = r < a.rows ? x[r * a.ld + i] : 0.0f;
                reinterpret_cast<float *>(a.out)[i] = median(v, a.rows);
        }
}

/* ---- query ------------------------------------------------------------------------------------------------------- */

template <int NUMBER, bool WIDE>
static __device__ __forceinline__ void store_piece(uint8_t *at, const float x[vector<NUMBER>::N], uint32_t n) {
        typename element<NUMBER>::type *to = reinterpret_cast<typename element<NUMBER>::type *>(at);

        if (WIDE) {
                uint32_t w[4];

#pragma unroll
                for (int i = 0; i < 4; i++)
                        w[i] = NUMBER == NUMBER_F32 ? __float_as_uint(x[i])
                                                    : (uint32_t)element<NUMBER>::narrow(x[2 * i % vector<NUMBER>::N]) |
                                                              (uint32_t)element<NUMBER>::narrow(
                                                                      x[(2 * i + 1) % vector<NUMBER>::N]) << 16;
                store_16(to, make_uint4(w[0], w[1], w[2], w[3]));
        } else {
#pragma unroll
                for (int i = 0; i < vector<NUMBER>::N; i++)
                        if ((uint32_t)i < n)
                                to[i] = element<NUMBER>::narrow(x[i]);
        }
}

/* ROWS: how many there are at most; all of their loads come first. */
template <int NUMBER, bool WIDE, int ROWS>
static __device__ __forceinline__ void query_piece(const struct gpu_sketch_query &a, const struct piece &p) {
        const int N = vector<NUMBER>::N;
        const struct gpu_sketch_parts &s = a.parts;
        const struct gpu_sketch_plane &plane = s.planes[p.plane];
        const uint32_t *places = reinterpret_cast<const uint32_t *>(a.places) + (uint64_t)p.item * s.rows;
        uint8_t *at = vector_at<NUMBER>(s, p, reinterpret_cast<const struct gpu_sketch_token *>(a.tokens)[p.item]);
        float cells[ROWS][N], sign[ROWS], mean[N] = {}, x[N];
        uint32_t left = s.dim - p.d;

        if (!at)
                return;
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
                uint32_t place = r < s.rows ? places[r] : places[0], row = r < s.rows ? r : 0;
                uint64_t cell = ((uint64_t)row * s.columns + (place & COLUMN)) * s.cell_stride + p.number;

                sign[r] = place & plane.sign ? -1.0f : 1.0f;
                load_numbers<N, WIDE>(cells[r], reinterpret_cast<const float *>(plane.cells) + cell, left);
        }
        load_mean<N, WIDE>(mean, plane, p, left);
#pragma unroll
        for (int i = 0; i < N; i++) {
                float v[ROWS_MOST] = {};

#pragma unroll
                for (int r = 0; r < ROWS; r++)
                        v[r] = sign[r] * cells[r][i];
                x[i] = a.shrink * median(v, ROWS == 3 ? 3 : s.rows);
                x[i] = plane.mean ? x[i] + mean[i] : x[i];
        }
        store_piece<NUMBER, WIDE>(at + bytes_of<NUMBER>(p.d), x, left);
}

template <int NUMBER, int ROWS> static __device__ __forceinline__ void query_all(const struct gpu_sketch_query &a) {
        uint64_t pieces = pieces_of<NUMBER>(a.parts, a.n);
        bool wide = is_wide<NUMBER>(a.parts);

#pragma unroll 1
        for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < pieces; i += (uint64_t)gridDim.x * THREADS)
                if (wide)
                        query_piece<NUMBER, true, ROWS>(a, piece_of<NUMBER>(a.parts, (uint32_t)i));
                else
                        query_piece<NUMBER, false, ROWS>(a, piece_of<NUMBER>(a.parts, (uint32_t)i));
}

KVD_KERNEL(sketch_query_3, struct gpu_sketch_query, THREADS) {
        if (a.parts.number == NUMBER_F32)
                query_all<NUMBER_F32, 3>(a);
        else if (a.parts.number == NUMBER_F16)
                query_all<NUMBER_F16, 3>(a);
        else
                query_all<NUMBER_BF16, 3>(a);
}

KVD_KERNEL(sketch_query_any, struct gpu_sketch_query, THREADS) {
        if (a.parts.number == NUMBER_F32)
                query_all<NUMBER_F32, ROWS_MOST>(a);
        else if (a.parts.number == NUMBER_F16)
                query_all<NUMBER_F16, ROWS_MOST>(a);
        else
                query_all<NUMBER_BF16, ROWS_MOST>(a);
}
