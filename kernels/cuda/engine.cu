/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/engine.h"
#include "kernels/variants.h"

#define THREADS 256
#define WARPS (THREADS / 32)

template <int NUMBER> static __device__ __forceinline__ float load(cu_address from, uint64_t i) {
        return element<NUMBER>::wide(
                reinterpret_cast<const typename element<NUMBER>::type *>(from)[i]);
}

template <int NUMBER>
static __device__ __forceinline__ void store(cu_address to, uint64_t i, float x) {
        reinterpret_cast<typename element<NUMBER>::type *>(to)[i] = element<NUMBER>::narrow(x);
}

static __device__ __forceinline__ float load_number(cu_address from, uint64_t i, uint32_t number) {
        return number == NUMBER_F32   ? load<NUMBER_F32>(from, i)
               : number == NUMBER_F16 ? load<NUMBER_F16>(from, i)
                                      : load<NUMBER_BF16>(from, i);
}

static __device__ __forceinline__ void store_number(cu_address to, uint64_t i, float x,
                                                    uint32_t number) {
        if (number == NUMBER_F32)
                store<NUMBER_F32>(to, i, x);
        else if (number == NUMBER_F16)
                store<NUMBER_F16>(to, i, x);
        else
                store<NUMBER_BF16>(to, i, x);
}

/* ---- embedding ------------------------------------------------------------------------------- */

KVD_KERNEL(embed, struct gpu_embed, THREADS) {
        const uint32_t *tokens = reinterpret_cast<const uint32_t *>(a.tokens);
        float *to = reinterpret_cast<float *>(a.to);

        for (uint64_t i = blockIdx.x * (uint64_t)THREADS + threadIdx.x; i < (uint64_t)a.n * a.width;
             i += (uint64_t)gridDim.x * THREADS)
                to[i] = load_number(a.table, tokens[i / a.width] * (uint64_t)a.width + i % a.width,
                                    a.number);
}

/* ---- norm ------------------------------------------------------------------------------------ */

/* Returns the sum of x over all threads, in every thread. */
static __device__ float block_sum(float x, float *partial) {
        float sum = 0;

        x = warp_sum(x);
        if (lane_id() == 0)
                partial[threadIdx.x / 32] = x;
        __syncthreads();
        for (int i = 0; i < WARPS; i++)
                sum += partial[i];
        __syncthreads();
        return sum;
}

/* In the second pass, each thread reads the numbers that it wrote itself. */
KVD_KERNEL(norm, struct gpu_norm, THREADS) {
        __shared__ float partial[WARPS];
        const float *weights = reinterpret_cast<const float *>(a.weights);

        for (uint32_t row = blockIdx.x; row < a.n; row += gridDim.x) {
                uint64_t first = (uint64_t)row * a.width;
                float *x = reinterpret_cast<float *>(a.x) + first, squares = 0, scale;
                const float *change = reinterpret_cast<const float *>(a.change) + first;

                for (uint32_t i = threadIdx.x; i < a.width; i += THREADS) {
                        float v = x[i];

                        if (a.change) {
                                v += change[i];
                                x[i] = v;
                        }
                        squares = fmaf(v, v, squares);
                }
                scale = 1.0f / sqrtf(block_sum(squares, partial) / (float)a.width + a.eps);
                for (uint32_t i = threadIdx.x; a.to && i < a.width; i += THREADS)
                        store_number(a.to, first + i, x[i] * scale * weights[i], a.to_number);
        }
}

/* ---- queries, keys and values ---------------------------------------------------------------- */

/* A row's address in the blocks; 0 if its block is not resident or the row is already stored. */
static __device__ cu_address slot_of(const struct gpu_rotate &a, uint32_t row) {
        uint32_t position = a.first + row;
        uint32_t id = reinterpret_cast<const uint32_t *>(a.blocks.ids)[position / a.block_tokens];

        if (position < a.stored || id == GPU_NO_BLOCK)
                return 0;
        return a.blocks.base + id * a.blocks.block_bytes +
               position % a.block_tokens * a.slot_stride;
}

template <int NUMBER> static __device__ void rotate_row(const struct gpu_rotate &a, uint32_t row) {
        uint32_t dim = 2 * a.half, all = a.heads + 2 * a.kv_heads;
        float *qkv = reinterpret_cast<float *>(a.qkv) + (uint64_t)row * all * dim;
        const float *cosine = reinterpret_cast<const float *>(a.cosine) + (uint64_t)row * a.half;
        const float *sine = reinterpret_cast<const float *>(a.sine) + (uint64_t)row * a.half;
        cu_address slot = slot_of(a, row);

        for (uint32_t i = threadIdx.x; i < all * a.half; i += THREADS) {
                uint32_t head = i / a.half, d = i % a.half;
                float low = qkv[head * dim + d], high = qkv[head * dim + d + a.half];
                cu_address to;

                if (head < a.heads + a.kv_heads) {
                        float turned = fmaf(-high, sine[d], low * cosine[d]);

                        high = fmaf(low, sine[d], high * cosine[d]);
                        low = turned;
                }
                if (head < a.heads) {
                        qkv[head * dim + d] = low;
                        qkv[head * dim + d + a.half] = high;
                        continue;
                }
                head -= a.heads;
                to = slot + (head < a.kv_heads ? a.k_offset + head * a.head_stride
                                               : a.v_offset + (head - a.kv_heads) * a.head_stride);
                if (slot) {
                        store<NUMBER>(to, d, low);
                        store<NUMBER>(to, d + a.half, high);
                }
        }
}

KVD_KERNEL(rotate, struct gpu_rotate, THREADS) {
        for (uint32_t row = blockIdx.x; row < a.n; row += gridDim.x) {
                if (a.number == NUMBER_F32)
                        rotate_row<NUMBER_F32>(a, row);
                else if (a.number == NUMBER_F16)
                        rotate_row<NUMBER_F16>(a, row);
                else
                        rotate_row<NUMBER_BF16>(a, row);
        }
}

/* ---- feed-forward ---------------------------------------------------------------------------- */

/* e^x, in the same steps as kernels/variants.h. */
static __device__ __forceinline__ float exp_of(float x) {
        float clamped = EXP_HIGH < x ? EXP_HIGH : x;
        float shifted = fmaf(clamped, EXP_LOG2E, EXP_SHIFT);
        float n = shifted - EXP_SHIFT;
        float r = fmaf(n, -EXP_LN2_LOW, fmaf(n, -EXP_LN2_HIGH, clamped));
        float p = EXP_C5;

        p = fmaf(p, r, EXP_C4);
        p = fmaf(p, r, EXP_C3);
        p = fmaf(p, r, EXP_C2);
        p = fmaf(p, r, EXP_C1);
        p = fmaf(p, r, EXP_C0);
        p = fmaf(p, r * r, r + 1.0f);
        return clamped < EXP_LOW ? 0.0f :
                                   p * __uint_as_float((__float_as_uint(shifted) << 23) + EXP_ONE);
}

KVD_KERNEL(swiglu, struct gpu_swiglu, THREADS) {
        const float *gate_up = reinterpret_cast<const float *>(a.gate_up);

        for (uint64_t i = blockIdx.x * (uint64_t)THREADS + threadIdx.x; i < (uint64_t)a.n * a.width;
             i += (uint64_t)gridDim.x * THREADS) {
                uint64_t at = i / a.width * 2 * a.width + i % a.width;
                float gate = gate_up[at], up = gate_up[at + a.width];

                store_number(a.to, i, gate / (1.0f + exp_of(-gate)) * up, a.to_number);
        }
}
