/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_SUMMARISE_NORMS_CUH
#define KVD_KERNELS_CUDA_SUMMARISE_NORMS_CUH

/* Norms of a layer's planes, for summaries: those of the processor, of all tokens that are written. */

#include "kernels/cuda/narrow.cuh"
#include "kernels/cuda/squares.cuh"
#include "kernels/cuda/summarise.h"

#define THREADS 256

enum { ORDER_HND = 1 };

struct layer {
        const uint8_t *keys; /* its K plane, followed by the V plane */
        uint8_t *row;
        uint32_t number, tokens; /* number of the layer; number of tokens that are written */
        bool wide;
};

static __device__ __forceinline__ uint64_t row_of(const struct gpu_block_shape &s, uint32_t head,
                                                  uint32_t token) {
        return s.order == ORDER_HND ? (uint64_t)head * s.tokens + token :
                                      (uint64_t)token * s.heads + head;
}

template <int NUMBER>
static __device__ __forceinline__ uint32_t row_bytes(const struct gpu_block_shape &s) {
        return NUMBER == NUMBER_NARROW ? narrow_bytes(s.dim, s.number) :
                                         (uint32_t)size_of<NUMBER>(s.dim);
}

static __device__ __forceinline__ bool is_written(const struct gpu_block_shape &s, uint64_t i,
                                                  uint32_t tokens) {
        uint64_t row = i / s.dim;

        return i < (uint64_t)s.heads * s.tokens * s.dim &&
               (s.order == ORDER_HND ? row % s.tokens : row / s.heads) < tokens;
}

/* Element i of a plane of plain numbers. */
template <int NUMBER>
static __device__ __forceinline__ float plane_number(const struct gpu_block_shape &s,
                                                     const uint8_t *plane, uint64_t i) {
        if constexpr (NUMBER == NUMBER_NARROW)
                return narrow_number(plane, (uint32_t)i, s.dim, s.number);
        else
                return element<NUMBER>::wide(
                        reinterpret_cast<const typename element<NUMBER>::type *>(plane)[i]);
}

/* Sums a chunk in which tokens that are not written count as zeros. */
template <int NUMBER>
static __device__ __forceinline__ float partial_chunk(const struct gpu_block_shape &s,
                                                      const uint8_t *plane, uint64_t first,
                                                      uint32_t tokens, uint32_t lane) {
        const int N = vector<NUMBER>::N;
        float sum[N] = {};

#pragma unroll 1
        for (uint64_t i = first + lane * N; i < first + CHUNK; i += 64)
#pragma unroll
                for (int k = 0; k < N; k++) {
                        float v = is_written(s, i + k, tokens) ?
                                          plane_number<NUMBER>(s, plane, i + k) :
                                          0.0f;

                        sum[k] = fmaf(v, v, sum[k]);
                }
        return sum_of_64<NUMBER>(sum);
}

/* Computes to[plane][chunk] as sum_chunks does, of planes that are not fully written. */
static __device__ __forceinline__ void sum_partial(float *to, uint32_t chunks,
                                                   const struct gpu_block_shape &s,
                                                   const struct layer &l) {
        uint32_t group = group_lanes<FLAT>(s.number), lane = lane_id() % group;
        uint64_t elements = (uint64_t)s.heads * s.tokens * s.dim;

#pragma unroll 1
        for (uint32_t first = threadIdx.x / 32 * (32 / group); first < 2 * chunks;
             first += THREADS / group) {
                uint32_t job = first + lane_id() / group;
                uint64_t at = job < 2 * chunks ? (uint64_t)(job % chunks) * CHUNK : elements;
                const uint8_t *plane =
                        l.keys +
                        (job / chunks == 1 ? elements * (s.number == NUMBER_F32 ? 4 : 2) : 0);
                float sum = s.number == NUMBER_F32 ?
                                    partial_chunk<NUMBER_F32>(s, plane, at, l.tokens, lane) :
                            s.number == NUMBER_F16 ?
                                    partial_chunk<NUMBER_F16>(s, plane, at, l.tokens, lane) :
                                    partial_chunk<NUMBER_BF16>(s, plane, at, l.tokens, lane);

                if (lane == 0 && job < 2 * chunks)
                        to[job] = sum;
        }
}

/* As many rows of quantised numbers as 1024 elements hold, in 16 + 16 chains. */
static __device__ __forceinline__ float quantised_chunk(const struct gpu_block_shape &s,
                                                        const uint8_t *plane, uint32_t chunk,
                                                        uint32_t tokens, uint32_t lane) {
        uint32_t together = CHUNK / s.dim, end = min((chunk + 1) * together, s.heads * s.tokens);
        float low[4] = {}, high[4] = {};

#pragma unroll 1
        for (uint32_t row = chunk * together; row < end; row++) {
                const uint8_t *at = plane + (uint64_t)row * narrow_bytes(s.dim, s.number);
                uint32_t dim = is_written(s, (uint64_t)row * s.dim, tokens) ? s.dim : 0;

#pragma unroll 1
                for (uint32_t i = lane * 4; i < dim; i += 32) {
                        add_squares<NUMBER_NARROW>(low, load_narrow(at, i, dim, dim, s.number),
                                                   uint4(), false);
                        add_squares<NUMBER_NARROW>(
                                high, load_narrow(at, i + 16, dim, dim, s.number), uint4(), false);
                }
        }
#pragma unroll
        for (int k = 0; k < 4; k++)
                low[k] += high[k];
        return sum_of_16<NUMBER_NARROW>(low);
}

static __device__ __forceinline__ uint32_t narrow_chunks(const struct gpu_block_shape &s) {
        uint32_t rows = s.heads * s.tokens, together = CHUNK / s.dim;

        return is_quantised(s.number) ? (rows + together - 1) / together :
                                        (rows * s.dim + CHUNK - 1) / CHUNK;
}

static __device__ __forceinline__ void sum_narrow(float *to, const struct gpu_block_shape &s,
                                                  const struct layer &l) {
        bool quantised = is_quantised(s.number);
        uint32_t group = quantised ? 4 : 16, lane = lane_id() % group, chunks = narrow_chunks(s);
        uint64_t plane_bytes = (uint64_t)s.heads * s.tokens * narrow_bytes(s.dim, s.number);

#pragma unroll 1
        for (uint32_t first = threadIdx.x / 32 * (32 / group); first < 2 * chunks;
             first += THREADS / group) {
                uint32_t job = first + lane_id() / group,
                         chunk = job < 2 * chunks ? job % chunks : chunks;
                const uint8_t *plane = l.keys + (job / chunks == 1 ? plane_bytes : 0);
                float sum = quantised ? quantised_chunk(s, plane, chunk, l.tokens, lane) :
                                        partial_chunk<NUMBER_NARROW>(
                                                s, plane, (uint64_t)chunk * CHUNK, l.tokens, lane);

                if (lane == 0 && job < 2 * chunks)
                        to[job] = sum;
        }
}

template <bool NARROW>
static __device__ __forceinline__ void put_norms(const struct gpu_summarise &a,
                                                 const struct layer &l, float *sums) {
        uint32_t rows = a.shape.heads * a.shape.tokens, v = threadIdx.x;
        const struct squares_of q = squares_of_one(l.keys, rows, a.shape.dim);
        uint32_t chunks = NARROW ? narrow_chunks(a.shape) : chunks_of<FLAT>(q);
        double total = 0.0;

        if (NARROW)
                sum_narrow(sums, a.shape, l);
        else if (l.wide && l.tokens == a.shape.tokens)
                sum_chunks<true, FLAT, false>(sums, chunks, q, a.shape.number, 2, THREADS,
                                              [](uint32_t i) { return (uint64_t)i; });
        else
                sum_partial(sums, chunks, a.shape, l);
        __syncthreads();
        for (uint32_t i = 0; i < chunks && v < 2; i++)
                total += (double)sums[v * chunks + i];
        if (v < 2)
                reinterpret_cast<float *>(l.row +
                                          a.norms_off)[2 * l.number + v] = (float)sqrt(total);
}

#endif
