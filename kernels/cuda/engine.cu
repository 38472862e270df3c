/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/bytes.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/engine.h"
#include "kernels/cuda/narrow.cuh"
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

static __device__ __forceinline__ void rotate_pair(float *low, float *high, float cosine,
                                                   float sine) {
        float turned = fmaf(-*high, sine, *low * cosine);

        *high = fmaf(*low, sine, *high * cosine);
        *low = turned;
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

                if (head < a.heads + a.kv_heads)
                        rotate_pair(&low, &high, cosine[d], sine[d]);
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

/* ---- keys and values of less than 16 bits: kernels/rows.h ------------------------------------ */

struct token {
        float *qkv;
        const float *cosine, *sine;
        cu_address slot;
};

static __device__ struct token token_of(const struct gpu_rotate &a, uint32_t row) {
        uint64_t width = (uint64_t)(a.heads + 2 * a.kv_heads) * 2 * a.half;

        return {reinterpret_cast<float *>(a.qkv) + row * width,
                reinterpret_cast<const float *>(a.cosine) + (uint64_t)row * a.half,
                reinterpret_cast<const float *>(a.sine) + (uint64_t)row * a.half, slot_of(a, row)};
}

static __device__ void rotate_queries(const struct gpu_rotate &a, const struct token &t) {
        for (uint32_t i = threadIdx.x; i < a.heads * a.half; i += THREADS) {
                uint32_t d = i % a.half;
                float *low = t.qkv + i / a.half * 2 * a.half + d;

                rotate_pair(low, low + a.half, t.cosine[d], t.sine[d]);
        }
}

/* Element d of a key, rotated, or of a value. 0 beyond the end. */
static __device__ float number_of(const struct gpu_rotate &a, const struct token &t,
                                  const float *head, uint32_t d, bool is_key) {
        uint32_t i = d < a.half ? d : d - a.half;
        float low, high;

        if (d >= 2 * a.half)
                return 0.0f;
        low = head[i];
        high = head[i + a.half];
        if (is_key)
                rotate_pair(&low, &high, t.cosine[i], t.sine[i]);
        return d < a.half ? low : high;
}

static __device__ __forceinline__ float limited(float x) {
        return fminf(fmaxf(x, -65504.0f), 65504.0f);
}

static __device__ __forceinline__ float code_of(float x, uint16_t scale, uint16_t least,
                                                float most_code) {
        float code = rintf((x - f16_to_float(least)) / f16_to_float(scale));

        return fminf(fmaxf(code, 0.0f), most_code);
}

static __device__ void put_scale(uint8_t *to, uint16_t scale, uint16_t least) {
        if (lane_id() == 0) {
                to[0] = (uint8_t)scale;
                to[1] = (uint8_t)(scale >> 8);
                to[2] = (uint8_t)least;
                to[3] = (uint8_t)(least >> 8);
        }
}

/* Turns a group into codes, and stores its scale and least number. NaN if a number is not finite. */
static __device__ void quantise(float *low, float *high, uint8_t *to, float most_code) {
        float least = fminf(*low, *high), most = fmaxf(*low, *high);
        uint16_t stored, scale;

        if (warp_ballot(*low - *low != 0.0f || *high - *high != 0.0f)) {
                put_scale(to, 0, 0x7e00);
                *low = *high = 0.0f;
                return;
        }
        for (int mask = 16; mask; mask /= 2) {
                least = fminf(least, warp_xor(least, mask));
                most = fmaxf(most, warp_xor(most, mask));
        }
        stored = float_to_f16(limited(least) + 0.0f); /* -0 becomes 0 */
        scale = float_to_f16(
                fmaxf(limited((most - f16_to_float(stored)) / most_code), 0x1p-14f));
        put_scale(to, scale, stored);
        *low = code_of(*low, scale, stored, most_code);
        *high = code_of(*high, scale, stored, most_code);
}

/* Two lanes have the codes of a byte. */
static __device__ void put_codes(uint8_t *codes, float code, uint32_t i, uint32_t n, bool halves) {
        uint32_t mine = (uint32_t)code, other = warp_xor(mine, 1);

        if (i < n && !halves)
                codes[i] = (uint8_t)mine;
        else if (i < n && i % 2 == 0)
                codes[i / 2] = (uint8_t)(mine | other << 4);
}

/* Stores numbers d + lane and d + 32 + lane of a row, of which the last ones may be beyond its end. */
static __device__ void put_quantised(const struct gpu_rotate &a, uint8_t *row, uint32_t d,
                                     float low, float high, bool is_key) {
        uint32_t dim = 2 * a.half, n = min(dim - d, KVD_GROUP), lane = lane_id();
        bool halves = a.number == NUMBER_Q4;
        float first;
        uint8_t *codes = row + (halves ? d / 2 : d),
                *scales = row + (halves ? dim / 2 : dim) + d / KVD_GROUP * KVD_SCALE_BYTES;

        if (is_key)
                turn_group(&low, &high, n);
        first = warp_from(low, 0);
        low = lane < n ? low : first;
        high = lane + 32 < n ? high : first;
        quantise(&low, &high, scales, halves ? 15.0f : 255.0f);
        put_codes(codes, low, lane, n, halves);
        put_codes(codes, high, lane + 32, n, halves);
}

static __device__ void put_byte(const struct gpu_rotate &a, uint8_t *row, uint32_t d, float x) {
        if (d < 2 * a.half)
                row[d] = a.number == NUMBER_E4M3 ? e4m3_of(x) : e5m2_of(x);
}

/* A warp stores a group of a key or a value at a time. */
static __device__ void store_groups(const struct gpu_rotate &a, const struct token &t) {
        uint32_t dim = 2 * a.half, groups = (dim + KVD_GROUP - 1) / KVD_GROUP, lane = lane_id();

        for (uint32_t i = threadIdx.x / 32; i < 2 * a.kv_heads * groups; i += WARPS) {
                uint32_t head = i / groups, d = i % groups * KVD_GROUP, of_kind = head % a.kv_heads;
                bool is_key = head < a.kv_heads;
                const float *from = t.qkv + (a.heads + head) * dim;
                float low = number_of(a, t, from, d + lane, is_key),
                      high = number_of(a, t, from, d + 32 + lane, is_key);
                uint8_t *row = reinterpret_cast<uint8_t *>(t.slot + of_kind * a.head_stride +
                                                           (is_key ? a.k_offset : a.v_offset));

                if (is_quantised(a.number)) {
                        put_quantised(a, row, d, low, high, is_key);
                        continue;
                }
                put_byte(a, row, d + lane, low);
                put_byte(a, row, d + 32 + lane, high);
        }
}

KVD_KERNEL(rotate_narrow, struct gpu_rotate, THREADS) {
        for (uint32_t row = blockIdx.x; row < a.n; row += gridDim.x) {
                struct token t = token_of(a, row);

                rotate_queries(a, t);
                if (t.slot)
                        store_groups(a, t);
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
