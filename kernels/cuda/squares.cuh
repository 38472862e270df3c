/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_SQUARES_CUH
#define KVD_KERNELS_CUDA_SQUARES_CUH

/*
 * Sums of squares of planes of blocks, or of their differences, in the order of the processor:
 * chains of 16 lanes, several side by side depending on the form, each of which is the work of one
 * lane here. A group of lanes that together have all chains sums up one chunk. Groups work on
 * chunks that are one after the other, in whole sectors of memory.
 *
 *      FLAT     1024 elements of a plane in 4 x 16 chains
 *      ROWS     a row in 2 x 16 chains
 *      TURNED   as many rows as 1024 elements hold, or one, the second block's rotated, in 16 + 16 chains
 */

#include "kernels/cuda/rows.cuh"

#define CHUNK 1024u
#define AHEAD 4

enum square_form { FLAT, ROWS, TURNED };

/* The planes to sum up, of two blocks or of one. */
struct squares_of {
        const uint8_t *x, *y;         /* plane 0; planes are contiguous */
        uint64_t elements;            /* of a plane */
        uint32_t rows, dim;           /* of a plane */
        const float *cosine, *sine;
        uint32_t half, together;      /* TURNED: rotated pairs, and rows per chunk */
        bool norms;                   /* take the square root of each chunk's sum */
};

static __device__ __forceinline__ struct squares_of squares_of_one(const uint8_t *x, uint32_t rows,
                                                                   uint32_t dim) {
        return {x, nullptr, (uint64_t)rows * dim, rows, dim, nullptr, nullptr, 0, 1, false};
}

/* Number of lanes that together have all chains of a form. */
template <int FORM> static __device__ __forceinline__ uint32_t group_lanes(uint32_t number) {
        return (FORM == FLAT ? 64 : FORM == ROWS ? 32 : 16) / (number == NUMBER_F32 ? 4 : 8);
}

template <int NUMBER> static __device__ __forceinline__ uint64_t size_of(uint64_t elements) {
        return elements * sizeof(typename element<NUMBER>::type);
}

/* The sum of 16 lanes: j and j + 8, then j + 4, 2 and 1. */
template <int NUMBER>
static __device__ __forceinline__ float sum_of_16(float s[vector<NUMBER>::N]) {
        const int N = vector<NUMBER>::N;

#pragma unroll
        for (int mask = 8 / N; mask; mask /= 2)
#pragma unroll
                for (int i = 0; i < N; i++)
                        s[i] += warp_xor(s[i], mask);
#pragma unroll
        for (int width = N / 2; width; width /= 2)
#pragma unroll
                for (int i = 0; i < width; i++)
                        s[i] += s[i + width];
        return s[0];
}

template <int NUMBER>
static __device__ __forceinline__ void add_squares(float s[vector<NUMBER>::N], uint4 x, uint4 y,
                                                   bool pair) {
        float a[vector<NUMBER>::N], b[vector<NUMBER>::N];

        vector<NUMBER>::wide(a, x);
        if (pair)
                vector<NUMBER>::wide(b, y);
#pragma unroll
        for (int i = 0; i < vector<NUMBER>::N; i++) {
                float d = pair ? a[i] - b[i] : a[i];

                s[i] = fmaf(d, d, s[i]);
        }
}

/*
 * Adds vectors at at, at + STRIDE, ... below end, AHEAD loads of each row at a time. Without PAIR,
 * of x alone.
 */
template <int NUMBER, bool WIDE, bool PAIR, int STRIDE>
static __device__ __forceinline__ void add_strided(float s[vector<NUMBER>::N], const uint8_t *x,
                                                   const uint8_t *y, uint32_t at, uint32_t end) {
#pragma unroll 1
        for (; at < end; at += AHEAD * STRIDE) {
                uint4 v[AHEAD], w[AHEAD];

#pragma unroll
                for (int k = 0; k < AHEAD; k++)
                        v[k] = load_vector<NUMBER, WIDE>(x, at + k * STRIDE, end);
#pragma unroll
                for (int k = 0; k < AHEAD; k++)
                        w[k] = load_vector<NUMBER, WIDE>(y, at + k * STRIDE, PAIR ? end : 0);
#pragma unroll
                for (int k = 0; k < AHEAD; k++)
                        add_squares<NUMBER>(s, v[k], w[k], PAIR);
        }
}

/* The same for a whole aligned chunk, without checks between the loads. */
template <int NUMBER, bool PAIR>
static __device__ __forceinline__ void add_whole(float s[vector<NUMBER>::N], const uint8_t *x,
                                                 const uint8_t *y, uint32_t at) {
#pragma unroll 1
        for (; at < CHUNK; at += AHEAD * 64) {
                uint4 v[AHEAD], w[AHEAD];

#pragma unroll
                for (int k = 0; k < AHEAD; k++)
                        v[k] = load_16(x + size_of<NUMBER>(at + k * 64));
#pragma unroll
                for (int k = 0; k < AHEAD; k++)
                        w[k] = PAIR ? load_16(y + size_of<NUMBER>(at + k * 64)) : v[k];
#pragma unroll
                for (int k = 0; k < AHEAD; k++)
                        add_squares<NUMBER>(s, v[k], w[k], PAIR);
        }
}

/* Sums 4 x 16 chains that are spread over a group. */
template <int NUMBER>
static __device__ __forceinline__ float sum_of_64(float s[vector<NUMBER>::N]) {
        const int N = vector<NUMBER>::N, LANES = 16 / N;

#pragma unroll
        for (int mask = LANES; mask <= 2 * LANES; mask *= 2)
#pragma unroll
                for (int i = 0; i < N; i++)
                        s[i] += warp_xor(s[i], mask);
        return sum_of_16<NUMBER>(s);
}

template <int NUMBER, bool WIDE, bool PAIR>
static __device__ __forceinline__ float flat_chunk(const struct squares_of &q, const uint8_t *x,
                                                   const uint8_t *y, uint64_t chunk,
                                                   uint32_t lane) {
        const int N = vector<NUMBER>::N;
        uint64_t first = chunk * CHUNK, at = size_of<NUMBER>(first),
                 left = first < q.elements ? q.elements - first : 0;
        float s[N] = {};

        if (WIDE && left >= CHUNK)
                add_whole<NUMBER, PAIR>(s, x + at, y + at, lane * N);
        else
                add_strided<NUMBER, WIDE, PAIR, 64>(s, x + at, y + at, lane * N,
                                                    left < CHUNK ? (uint32_t)left : CHUNK);
        return sum_of_64<NUMBER>(s);
}

template <int NUMBER, bool WIDE>
static __device__ __forceinline__ float row_chunk(const struct squares_of &q, const uint8_t *x,
                                                  const uint8_t *y, uint64_t row, uint32_t lane) {
        const int N = vector<NUMBER>::N, LANES = 16 / N;
        uint64_t at = size_of<NUMBER>(row * q.dim);
        float s[N] = {};

        add_strided<NUMBER, WIDE, true, 32>(s, x + at, y + at, lane * N, row < q.rows ? q.dim : 0);
#pragma unroll
        for (int i = 0; i < N; i++)
                s[i] += warp_xor(s[i], LANES);
        return sum_of_16<NUMBER>(s);
}

/* Adds elements i to i + N - 1, and those half further, of both rows; y's are rotated. */
template <int NUMBER, bool WIDE>
static __device__ __forceinline__ void add_rotated(float low[vector<NUMBER>::N],
                                                   float high[vector<NUMBER>::N],
                                                   const struct squares_of &q, const uint8_t *x,
                                                   const uint8_t *y, uint32_t i) {
        const int N = vector<NUMBER>::N;
        uint64_t up = size_of<NUMBER>(q.half);
        uint4 v[4] = {load_vector<NUMBER, WIDE>(x, i, q.half),
                      load_vector<NUMBER, WIDE>(x + up, i, q.half),
                      load_vector<NUMBER, WIDE>(y, i, q.half),
                      load_vector<NUMBER, WIDE>(y + up, i, q.half)};
        float a[N], b[N], l[N], h[N];

        vector<NUMBER>::wide(a, v[0]);
        vector<NUMBER>::wide(b, v[1]);
        vector<NUMBER>::wide(l, v[2]);
        vector<NUMBER>::wide(h, v[3]);
#pragma unroll
        for (int k = 0; k < N; k++) {
                float cosine = i + k < q.half ? q.cosine[i + k] : 0.0f,
                      sine = i + k < q.half ? q.sine[i + k] : 0.0f;
                float x_low = a[k] - fmaf(-h[k], sine, l[k] * cosine),
                      x_high = b[k] - fmaf(l[k], sine, h[k] * cosine);

                low[k] = fmaf(x_low, x_low, low[k]);
                high[k] = fmaf(x_high, x_high, high[k]);
        }
}

template <int NUMBER, bool WIDE>
static __device__ __forceinline__ float rotated_chunk(const struct squares_of &q, const uint8_t *x,
                                                      const uint8_t *y, uint64_t chunk,
                                                      uint32_t lane) {
        const int N = vector<NUMBER>::N;
        uint64_t row = chunk * q.together,
                 end = row + q.together < q.rows ? row + q.together : q.rows;
        float low[N] = {}, high[N] = {};

#pragma unroll 1
        for (; row < end; row++) {
                const uint8_t *a = x + size_of<NUMBER>(row * q.dim),
                              *b = y + size_of<NUMBER>(row * q.dim);

#pragma unroll 1
                for (uint32_t i = lane * N; i < q.half; i += 16)
                        add_rotated<NUMBER, WIDE>(low, high, q, a, b, i);
#pragma unroll 1
                for (uint32_t i = 2 * q.half + lane * N; i < q.dim; i += 32) {
                        add_squares<NUMBER>(low, load_vector<NUMBER, WIDE>(a, i, q.dim),
                                            load_vector<NUMBER, WIDE>(b, i, q.dim), true);
                        add_squares<NUMBER>(high, load_vector<NUMBER, WIDE>(a, i + 16, q.dim),
                                            load_vector<NUMBER, WIDE>(b, i + 16, q.dim), true);
                }
        }
#pragma unroll
        for (int i = 0; i < N; i++)
                low[i] += high[i];
        return sum_of_16<NUMBER>(low);
}

template <int FORM>
static __device__ __forceinline__ uint32_t chunks_of(const struct squares_of &q) {
        return FORM == FLAT   ? (uint32_t)((q.elements + CHUNK - 1) / CHUNK)
               : FORM == ROWS ? q.rows
                              : (q.rows + q.together - 1) / q.together;
}

template <int NUMBER, bool WIDE, int FORM, bool PAIR>
static __device__ __forceinline__ float sum_chunk(const struct squares_of &q, uint64_t plane,
                                                  uint32_t chunk, uint32_t lane) {
        uint64_t at = size_of<NUMBER>(plane * q.elements);
        const uint8_t *x = q.x + at, *y = PAIR ? q.y + at : x;

        if (FORM == FLAT)
                return flat_chunk<NUMBER, WIDE, PAIR>(q, x, y, chunk, lane);
        return FORM == ROWS ? row_chunk<NUMBER, WIDE>(q, x, y, chunk, lane)
                            : rotated_chunk<NUMBER, WIDE>(q, x, y, chunk, lane);
}

/*
 * Computes to[i * stride + chunk] for the planes plane(0) to plane(n - 1), with all threads of a
 * block. Without PAIR, of x alone, and FLAT. plane: a function of i, the same on every thread.
 */
template <bool WIDE, int FORM, bool PAIR, typename PLANE>
static __device__ __forceinline__ void sum_chunks(float *to, uint32_t stride,
                                                  const struct squares_of &q, uint32_t number,
                                                  uint32_t n, uint32_t threads, PLANE plane) {
        uint32_t group = group_lanes<FORM>(number), chunks = chunks_of<FORM>(q),
                 lane = lane_id() % group;

#pragma unroll 1
        for (uint32_t first = threadIdx.x / 32 * (32 / group); first < n * chunks;
             first += threads / group) {
                uint32_t job = first + lane_id() / group, i = job / chunks,
                         chunk = i < n ? job % chunks : chunks;
                /* lanes without a job have chunk beyond the last one */
                uint64_t of_job = i < n ? plane(i) : 0;
                float sum;

                if (number == NUMBER_F32)
                        sum = sum_chunk<NUMBER_F32, WIDE, FORM, PAIR>(q, of_job, chunk, lane);
                else if (number == NUMBER_F16)
                        sum = sum_chunk<NUMBER_F16, WIDE, FORM, PAIR>(q, of_job, chunk, lane);
                else
                        sum = sum_chunk<NUMBER_BF16, WIDE, FORM, PAIR>(q, of_job, chunk, lane);
                if (lane == 0 && i < n)
                        to[i * stride + chunk] = q.norms ? sqrtf(sum) : sum;
        }
}

#endif
