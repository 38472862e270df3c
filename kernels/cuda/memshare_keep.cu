/* SPDX-License-Identifier: Apache-2.0 */

/* What MemShare keeps of blocks, and rotation. */

#include "kernels/cuda/memshare.h"
#include "kernels/cuda/squares.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)

enum { ORDER_HND = 1 };

static __device__ __forceinline__ bool is_wide(const struct gpu_memshare_keep &a) {
        return (a.blocks.base | a.blocks.block_bytes | a.offset) % 16 == 0 &&
               a.shape.dim % (a.shape.number == NUMBER_F32 ? 4 : 8) == 0;
}

static __device__ __forceinline__ const uint8_t *block_of(const struct gpu_memshare_keep &a, uint32_t index) {
        uint32_t id = reinterpret_cast<const uint32_t *>(a.blocks.ids)[index];

        return id == GPU_NO_BLOCK ? nullptr
                                  : reinterpret_cast<const uint8_t *>(a.blocks.base + id * a.blocks.block_bytes +
                                                                      a.offset);
}

/* ---- norms ------------------------------------------------------------------------------------------------------- */

/* A block of threads a layer of a block. */
KVD_KERNEL(memshare_norms, struct gpu_memshare_keep, THREADS) {
        KVD_SHARED(float, sums);
        uint32_t layer = blockIdx.x % a.shape.layers, rows = a.shape.heads * a.shape.tokens, v = threadIdx.x;
        const uint8_t *block = block_of(a, blockIdx.x / a.shape.layers);
        const struct squares_of q = squares_of_one(block, rows, a.shape.dim);
        float *to = reinterpret_cast<float *>(a.to) + 2 * (uint64_t)blockIdx.x;
        auto plane = [layer](uint32_t i) { return 2 * (uint64_t)layer + i; };
        uint32_t chunks = chunks_of<FLAT>(q);
        double total = 0.0;

        if (block && is_wide(a))
                sum_chunks<true, FLAT, false>(sums, chunks, q, a.shape.number, 2, THREADS, plane);
        else if (block)
                sum_chunks<false, FLAT, false>(sums, chunks, q, a.shape.number, 2, THREADS, plane);
        __syncthreads();
        for (uint32_t i = 0; i < chunks && v < 2 && block; i++)
                total += (double)sums[v * chunks + i];
        if (v < 2)
                to[v] = block ? (float)sqrt(total) : __uint_as_float(0x7fc00000u);
}

/* ---- means ------------------------------------------------------------------------------------------------------- */

/* Means of N dimensions of a head: a thread each, one token after the other, AHEAD loads at a time. */
template <int NUMBER, bool WIDE>
static __device__ __forceinline__ void mean_of(const struct gpu_memshare_shape &s, const uint8_t *head, uint64_t stride,
                                               uint32_t d, float *to) {
        const int N = vector<NUMBER>::N;
        float sum[N] = {}, x[N];

        for (uint32_t t = 0; t < s.tokens; t += AHEAD) {
                uint4 v[AHEAD];

#pragma unroll
                for (int k = 0; k < AHEAD; k++)
                        v[k] = load_vector<NUMBER, WIDE>(head + size_of<NUMBER>((t + k) * stride), d,
                                                         t + k < s.tokens ? s.dim : 0);
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                        vector<NUMBER>::wide(x, v[k]);
#pragma unroll
                        for (int i = 0; i < N; i++)
                                sum[i] = t + k < s.tokens ? sum[i] + x[i] : sum[i];
                }
        }
#pragma unroll
        for (int i = 0; i < N; i++)
                if (d + i < s.dim)
                        to[d + i] = sum[i] / (float)s.tokens;
}

template <int NUMBER> static __device__ void means_of(const struct gpu_memshare_keep &a) {
        const struct gpu_memshare_shape &s = a.shape;
        uint32_t pieces = (s.dim + vector<NUMBER>::N - 1) / vector<NUMBER>::N, heads = 2 * s.layers * s.heads;
        uint64_t token = s.order == ORDER_HND ? s.dim : (uint64_t)s.heads * s.dim;
        uint64_t head = s.order == ORDER_HND ? (uint64_t)s.tokens * s.dim : s.dim;

        for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < (uint64_t)a.n * heads * pieces;
             i += (uint64_t)gridDim.x * THREADS) {
                uint32_t d = i % pieces * vector<NUMBER>::N, h = i / pieces % heads;
                const uint8_t *block = block_of(a, (uint32_t)(i / pieces / heads));
                uint64_t at = h / s.heads * ((uint64_t)s.heads * s.tokens * s.dim) + h % s.heads * head;
                float *to = reinterpret_cast<float *>(a.to) + i / pieces * s.dim;

                if (!block)
                        for (uint32_t k = 0; k < vector<NUMBER>::N && d + k < s.dim; k++)
                                to[d + k] = __uint_as_float(0x7fc00000u);
                else if (is_wide(a))
                        mean_of<NUMBER, true>(s, block + size_of<NUMBER>(at), token, d, to);
                else
                        mean_of<NUMBER, false>(s, block + size_of<NUMBER>(at), token, d, to);
        }
}

KVD_KERNEL(memshare_means, struct gpu_memshare_keep, THREADS) {
        if (a.shape.number == NUMBER_F32)
                means_of<NUMBER_F32>(a);
        else if (a.shape.number == NUMBER_F16)
                means_of<NUMBER_F16>(a);
        else
                means_of<NUMBER_BF16>(a);
}

/* ---- rotation ---------------------------------------------------------------------------------------------------- */

/* A thread has both numbers of a pair, or one that is not rotated: in place if it must be. */
template <int NUMBER> static __device__ void rotate_rows(const struct gpu_memshare_rotate &a) {
        const float *cosine = reinterpret_cast<const float *>(a.cosine);
        const float *sine = reinterpret_cast<const float *>(a.sine);
        uint32_t each = a.dim - a.half;

        for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < (uint64_t)a.n * each;
             i += (uint64_t)gridDim.x * THREADS) {
                const auto *x = reinterpret_cast<const typename element<NUMBER>::type *>(a.x) + i / each * a.ldx;
                float *y = reinterpret_cast<float *>(a.y) + i / each * a.ldy;
                uint32_t d = i % each;

                if (d < a.half) {
                        float low = element<NUMBER>::wide(x[d]), high = element<NUMBER>::wide(x[d + a.half]);

                        y[d] = fmaf(-high, sine[d], low * cosine[d]);
                        y[d + a.half] = fmaf(low, sine[d], high * cosine[d]);
                } else {
                        y[d + a.half] = element<NUMBER>::wide(x[d + a.half]);
                }
        }
}

KVD_KERNEL(memshare_rotate, struct gpu_memshare_rotate, THREADS) {
        if (a.number == NUMBER_F32)
                rotate_rows<NUMBER_F32>(a);
        else if (a.number == NUMBER_F16)
                rotate_rows<NUMBER_F16>(a);
        else
                rotate_rows<NUMBER_BF16>(a);
}
