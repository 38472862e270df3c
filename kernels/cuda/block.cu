/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/block.h"
#include "kernels/cuda/device.cuh"

/* ---- top-k ------------------------------------------------------------------------------------------------------- */

/*
 * A block of threads takes a row. The k-th largest is found by its digits as in kernels/block.c; each warp then counts
 * what it takes of its part of the row, and writes it behind what the warps before it take.
 */
#define TOPK_THREADS 1024
#define TOPK_WARPS (TOPK_THREADS / 32)
#define DIGITS 2048 /* 11 bits, 11 bits, 10 bits */

struct topk {
        uint32_t counts[DIGITS];
        uint32_t warps[2][TOPK_WARPS];
        uint32_t digit, rank;
};

/* Grows with the score, unsigned; 0 for NaN. */
static __device__ __forceinline__ uint32_t order_of(float score) {
        uint32_t bits = __float_as_uint(score + 0.0f);

        return score != score ? 0 : bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

static __device__ __forceinline__ uint32_t sum_of_lanes_before(uint32_t x) {
        uint32_t sum = x, lane = lane_id();

        for (int by = 1; by < 32; by *= 2) {
                uint32_t other = warp_up(sum, by);

                sum += lane >= (uint32_t)by ? other : 0;
        }
        return sum - x;
}

/* Replaces numbers of all warps by the sum of those before each; the first warp does, between two barriers. */
static __device__ void sum_of_warps_before(uint32_t *warps) {
        if (threadIdx.x < 32)
                warps[threadIdx.x] = sum_of_lanes_before(warps[threadIdx.x]);
}

/* Lanes whose digit is that of the first one that counts add once: scores often begin alike. */
static __device__ __forceinline__ void count_digit(uint32_t *counts, uint32_t digit, bool counts_too) {
        uint32_t all = warp_ballot(counts_too), first = all ? (uint32_t)__ffs((int)all) - 1 : 0;
        uint32_t of_first = warp_from(digit, (int)first), alike = warp_ballot(counts_too && digit == of_first);

        if (counts_too && digit != of_first)
                atomicAdd(&counts[digit], 1u);
        else if (alike && lane_id() == first)
                atomicAdd(&counts[digit], (uint32_t)__popc(alike));
}

/* Finds the digit of the k-th largest among what was counted: digits of k's rank are rank and more from above. */
static __device__ void find_digit(struct topk *t, uint32_t k) {
        uint32_t first = (TOPK_THREADS - 1 - threadIdx.x) * 2; /* thread 0 has the two largest digits */
        uint32_t high = t->counts[first + 1], low = t->counts[first], above = sum_of_lanes_before(high + low);

        if (lane_id() == 31)
                t->warps[0][threadIdx.x / 32] = above + high + low;
        __syncthreads();
        sum_of_warps_before(t->warps[0]);
        __syncthreads();
        above += t->warps[0][threadIdx.x / 32];
        if (above < k && k <= above + high) {
                t->digit = first + 1;
                t->rank = k - above;
        } else if (above + high < k && k <= above + high + low) {
                t->digit = first;
                t->rank = k - above - high;
        }
        __syncthreads();
}

/* Of the numbers that begin with known, one digit more: returns both. *k becomes its rank among its equals. */
static __device__ uint32_t next_digit(struct topk *t, const float *scores, uint32_t n, uint32_t known, int known_shift,
                                      int shift, uint32_t *k) {
        uint32_t digit;

        for (uint32_t i = threadIdx.x; i < DIGITS; i += TOPK_THREADS)
                t->counts[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i - lane_id() < n; i += TOPK_THREADS) { /* whole warps */
                uint32_t order = i < n ? order_of(scores[i]) : 0, mask = known_shift - shift == 10 ? 1023 : 2047;

                count_digit(t->counts, order >> shift & mask,
                            i < n && (known_shift == 32 || order >> known_shift == known));
        }
        __syncthreads();
        find_digit(t, *k);
        digit = t->digit;
        *k = t->rank;
        __syncthreads();
        return known << (known_shift - shift) | digit;
}

/* This warp's part of the row: whole groups of 32. */
static __device__ __forceinline__ void part_of_warp(uint32_t n, uint32_t *from, uint32_t *to) {
        uint32_t groups = (n + 31) / 32, each = (groups + TOPK_WARPS - 1) / TOPK_WARPS, warp = threadIdx.x / 32;

        *from = min(warp * each, groups) * 32;
        *to = min((warp + 1) * each, groups) * 32;
}

static __device__ void write_largest(struct topk *t, uint32_t *indices, const float *scores, uint32_t n, uint32_t cut,
                                     uint32_t wanted, bool later) {
        uint32_t warp = threadIdx.x / 32, from, to, larger = 0, equal = 0, skip = 0, before = (1u << lane_id()) - 1;

        part_of_warp(n, &from, &to);
#pragma unroll 2 /* more would be kept in memory */
        for (uint32_t i = from; i < to; i += 32) {
                uint32_t order = i + lane_id() < n ? order_of(scores[i + lane_id()]) : 0;
                bool there = i + lane_id() < n;

                larger += __popc(warp_ballot(there && order > cut));
                equal += __popc(warp_ballot(there && order == cut));
        }
        if (lane_id() == 0) {
                t->warps[0][warp] = larger;
                t->warps[1][warp] = equal;
        }
        __syncthreads();
        if (later)
                for (uint32_t w = 0; w < TOPK_WARPS; w++)
                        skip += t->warps[1][w];
        skip -= later ? wanted : 0;
        __syncthreads();
        sum_of_warps_before(t->warps[0]);
        sum_of_warps_before(t->warps[1]);
        __syncthreads();
        larger = t->warps[0][warp];
        equal = t->warps[1][warp];
#pragma unroll 2 /* more would be kept in memory */
        for (uint32_t i = from; i < to; i += 32) {
                uint32_t order = i + lane_id() < n ? order_of(scores[i + lane_id()]) : 0;
                bool there = i + lane_id() < n;
                uint32_t more = warp_ballot(there && order > cut), same = warp_ballot(there && order == cut);
                uint32_t rank = equal + __popc(same & before); /* among all equals */
                uint32_t behind = rank < skip ? 0 : min(rank - skip, wanted);

                if (there && (order > cut || (order == cut && rank >= skip && rank - skip < wanted)))
                        indices[larger + __popc(more & before) + behind] = i + lane_id();
                larger += __popc(more);
                equal += __popc(same);
        }
}

KVD_KERNEL(topk, struct gpu_topk, TOPK_THREADS) {
        __shared__ struct topk t;

        for (uint32_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
                const float *scores = reinterpret_cast<const float *>(a.scores) + row * a.stride;
                uint32_t *indices = reinterpret_cast<uint32_t *>(a.indices) + (uint64_t)row * a.k, wanted = a.k;
                uint32_t known = next_digit(&t, scores, a.n, 0, 32, 21, &wanted);

                known = next_digit(&t, scores, a.n, known, 21, 10, &wanted);
                known = next_digit(&t, scores, a.n, known, 10, 0, &wanted);
                write_largest(&t, indices, scores, a.n, known, wanted, a.later != 0);
                __syncthreads();
        }
}

/* ---- compaction -------------------------------------------------------------------------------------------------- */

/*
 * A block of threads takes some columns of one plane's and head's tokens, tile by tile: a tile is read whole before it
 * is written, and what later tiles read lies behind it, because indices ascend. That is what makes it work in place.
 */
#define COMPACT_THREADS 256
#define COMPACT_AHEAD 4
#define COMPACT_TILE (COMPACT_THREADS * COMPACT_AHEAD) /* units */
#define COMPACT_COLUMNS 64

static __device__ uint8_t *slot_of(const struct gpu_slots &s, uint64_t at, uint32_t token) {
        uint32_t block = token / s.per_block, id = reinterpret_cast<const uint32_t *>(s.blocks.ids)[block];

        if (id == GPU_NO_BLOCK)
                return nullptr;
        return reinterpret_cast<uint8_t *>(s.blocks.base + id * s.blocks.block_bytes + at +
                                           (token - block * s.per_block) * s.slot);
}

static __device__ __forceinline__ void store_unit(void *to, uint4 v) { store_16(to, v); }
static __device__ __forceinline__ void store_unit(void *to, uint8_t v) { *static_cast<uint8_t *>(to) = v; }
static __device__ __forceinline__ void load_unit(uint4 *v, const void *from) { *v = load_16_written(from); }
static __device__ __forceinline__ void load_unit(uint8_t *v, const void *from) {
        *v = *static_cast<const volatile uint8_t *>(from);
}

template <typename UNIT> static __device__ void compact(const struct gpu_compact &a) {
        uint32_t plane = blockIdx.x / a.heads, head = blockIdx.x % a.heads, first = blockIdx.y * COMPACT_COLUMNS;
        uint32_t columns = min(COMPACT_COLUMNS, a.bytes / (uint32_t)sizeof(UNIT) - first);
        uint32_t per_tile = COMPACT_TILE / columns, tiles = (a.n + per_tile - 1) / per_tile;
        uint64_t to = a.to.offset + plane * a.to.plane + head * a.to.head;
        uint64_t from = a.from.offset + plane * a.from.plane + head * a.from.head;
        const uint32_t *index = reinterpret_cast<const uint32_t *>(a.index) +
                                (plane / a.planes_per_index * (uint64_t)a.heads + head) * a.index_stride;

        for (uint32_t tile = blockIdx.z; tile < tiles; tile += gridDim.z) {
                UNIT v[COMPACT_AHEAD];
                uint8_t *target[COMPACT_AHEAD];

#pragma unroll
                for (int i = 0; i < COMPACT_AHEAD; i++) {
                        uint32_t unit = i * COMPACT_THREADS + threadIdx.x, token = unit / columns;
                        uint32_t column = (first + unit % columns) * sizeof(UNIT);
                        const uint8_t *source = nullptr;

                        target[i] = nullptr;
                        if (token < per_tile && tile * per_tile + token < a.n) {
                                source = slot_of(a.from, from, index[tile * per_tile + token]);
                                target[i] = slot_of(a.to, to, tile * per_tile + token);
                        }
                        if (source && target[i]) {
                                load_unit(&v[i], source + column);
                                target[i] += column;
                        } else {
                                target[i] = nullptr;
                        }
                }
                __syncthreads();
#pragma unroll
                for (int i = 0; i < COMPACT_AHEAD; i++)
                        if (target[i])
                                store_unit(target[i], v[i]);
                __syncthreads();
        }
}

KVD_KERNEL(compact_16, struct gpu_compact, COMPACT_THREADS) {
        compact<uint4>(a);
}

KVD_KERNEL(compact_1, struct gpu_compact, COMPACT_THREADS) {
        compact<uint8_t>(a);
}

/* ---- four bits --------------------------------------------------------------------------------------------------- */

/*
 * Half a warp takes a group: its lanes are those of kernels/lanes.h, so that even of -0 and 0 the same one is the
 * least. Where a group has no more numbers, its last sixteen are filled up with their first.
 */
#define PACK_THREADS 256
#define LARGEST_F16 65504.0f

struct place {
        uint64_t row, packed_row;   /* bytes */
        uint32_t from, length;      /* of the group: in numbers */
        uint64_t codes, range;      /* where its codes and its least number and step lie */
};

static __device__ uint64_t packed_bytes(uint32_t dim, uint32_t groups) {
        return ((uint64_t)dim + 1) / 2 + groups * 4ull;
}

static __device__ struct place place_of(const struct gpu_pack_4 &a, uint64_t group_at, uint32_t groups) {
        uint32_t length = a.group ? a.group : a.dim;
        uint64_t row = group_at / groups;
        uint32_t g = (uint32_t)(group_at - row * groups);
        uint64_t packed = a.packed + row * packed_bytes(a.dim, groups);
        struct place p;

        p.row = row * a.stride;
        p.from = g * length;
        p.length = min(length, a.dim - p.from);
        p.codes = packed + p.from / 2;
        p.range = packed + ((uint64_t)a.dim + 1) / 2 + g * 4ull;
        return p;
}

static __device__ __forceinline__ float lesser(float a, float b) { return a < b ? a : b; }
static __device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

static __device__ __forceinline__ uint32_t code_of(float x) {
        float code = rintf(15.0f < x ? 15.0f : x);

        return code > 0.0f ? (uint32_t)code : 0;
}

/* A row of packed numbers may begin at any byte. */
static __device__ __forceinline__ void store_f16(uint64_t at, uint16_t x) {
        reinterpret_cast<uint8_t *>(at)[0] = (uint8_t)x;
        reinterpret_cast<uint8_t *>(at)[1] = (uint8_t)(x >> 8);
}

static __device__ __forceinline__ float load_f16(uint64_t at) {
        const uint8_t *bytes = reinterpret_cast<const uint8_t *>(at);

        return f16_to_float((uint16_t)(bytes[0] | bytes[1] << 8));
}

/* turns: numbers of the longest group, the same for both halves of a warp. */
template <int NUMBER>
static __device__ void pack_group(const struct gpu_pack_4 &a, struct place p, uint32_t turns, bool there) {
        typedef typename element<NUMBER>::type type;
        const type *numbers = reinterpret_cast<const type *>(a.rows) + p.row + p.from;
        uint32_t lane = lane_id() & 15, length = there ? p.length : 0;
        float least = INFINITY, most = -INFINITY, step, inverse;
        uint16_t least_16, step_16;

        for (uint32_t i = 0; i < length; i += 16) {
                float x = element<NUMBER>::wide(numbers[i + lane < length ? i + lane : i]);

                least = lesser(x, least);
                most = larger(x, most);
        }
        for (int by = 8; by; by /= 2) {
                least = lesser(least, warp_xor(least, by));
                most = larger(most, warp_xor(most, by));
        }
        least = larger(warp_from(least, (int)(lane_id() & 16)), -LARGEST_F16);
        most = lesser(warp_from(most, (int)(lane_id() & 16)), LARGEST_F16);
        least = most < least ? 0.0f : least; /* nothing but NaN */
        least_16 = float_to_f16(least);
        least = f16_to_float(least_16);
        step = larger((most - least) * (1.0f / 15.0f), 0.0f);
        step_16 = float_to_f16(step);
        step = f16_to_float(step_16);
        inverse = 0.0f < step ? 1.0f / step : 0.0f;
        for (uint32_t i = 0; i < turns; i += 16) {
                float x = i + lane < length ? element<NUMBER>::wide(numbers[i + lane]) : 0.0f;
                uint32_t code = i + lane < length ? code_of((x - least) * inverse) : 0, next = warp_xor(code, 1);

                if (lane % 2 == 0 && i + lane < length)
                        reinterpret_cast<uint8_t *>(p.codes)[(i + lane) / 2] = (uint8_t)(code | next << 4);
        }
        if (there && lane == 0) {
                store_f16(p.range, least_16);
                store_f16(p.range + 2, step_16);
        }
}

/* A step that was rounded up must not leave fp16. */
template <int NUMBER> static __device__ void unpack_group(const struct gpu_pack_4 &a, struct place p) {
        typedef typename element<NUMBER>::type type;
        type *numbers = reinterpret_cast<type *>(a.rows) + p.row + p.from;
        const uint8_t *codes = reinterpret_cast<const uint8_t *>(p.codes);
        float least = load_f16(p.range), step = load_f16(p.range + 2);

        for (uint32_t i = lane_id() & 15; i < p.length; i += 16) {
                float x = fmaf((float)(codes[i / 2] >> i % 2 * 4 & 15), step, least);

                numbers[i] = element<NUMBER>::narrow(lesser(x, LARGEST_F16));
        }
}

template <int NUMBER> static __device__ void pack_rows(const struct gpu_pack_4 &a) {
        uint32_t length = min(a.group ? a.group : a.dim, a.dim), groups = a.group ? (a.dim + a.group - 1) / a.group : 1;
        uint64_t at = (blockIdx.x * (uint64_t)PACK_THREADS + threadIdx.x) / 16, all = (uint64_t)a.n * groups;

        for (; (at & ~1ull) < all; at += gridDim.x * (uint64_t)PACK_THREADS / 16) { /* whole warps */
                bool there = at < all;
                struct place p = place_of(a, there ? at : 0, groups);

                if (!a.unpack)
                        pack_group<NUMBER>(a, p, length, there);
                else if (there)
                        unpack_group<NUMBER>(a, p);
        }
}

KVD_KERNEL(pack_4, struct gpu_pack_4, PACK_THREADS) {
        if (a.number == NUMBER_F32)
                pack_rows<NUMBER_F32>(a);
        else if (a.number == NUMBER_F16)
                pack_rows<NUMBER_F16>(a);
        else
                pack_rows<NUMBER_BF16>(a);
}
