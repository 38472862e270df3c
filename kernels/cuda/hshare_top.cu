/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The z largest of many, in the order of their positions. Most scores are far from the top, and a sample of a thousand
 * says how far (top_bound). One pass over all keeps what is not below that (top_collect); those few are ranked by one
 * block of threads (top_rank), digit by digit of their bits, and written in order. If the sample misled, or much of the
 * top lies close together, that block ranks all of them. What comes out is defined by the scores alone.
 */

#include "kernels/cuda/hshare.cuh"
#include "kernels/cuda/hshare_run.h"

#define DIGITS 2048 /* the bits of a key in three parts: 11, 11 and 10 */
#define LEAST_FINITE (-3.402823466e38f)

/* Whole numbers in the order of the scores, equal ones equal; 0 for what is never chosen. */
HSHARE uint32_t key_of(float x) {
        uint32_t bits = __float_as_uint(x + 0.0f); /* -0 becomes 0 */

        if (!(x >= LEAST_FINITE))
                return 0;
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

HSHARE float score_of(uint32_t key) {
        return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/* ---- the limit ---- */

struct ranking {
        uint32_t digits[DIGITS];
        uint32_t sums[32];     /* of warps */
        uint32_t digit, above; /* found: the digit of the limit, and how many have a higher one */
};

/* Sums of the threads before this one. */
HSHARE uint32_t sum_before(uint32_t x, uint32_t *sums) {
        uint32_t lane = lane_id(), warp = threadIdx.x / 32, sum = x, before = 0;

        for (int by = 1; by < 32; by *= 2) {
                uint32_t lower = warp_up(sum, by);

                sum += lane >= (uint32_t)by ? lower : 0;
        }
        __syncthreads();
        if (lane == 31)
                sums[warp] = sum;
        __syncthreads();
        for (uint32_t i = 0; i < warp; i++)
                before += sums[i];
        return before + sum - x;
}

/* Of the digits, from the highest down, the one that has number want; want starts at 1. Returns how many there are. */
HSHARE uint32_t find_digit(struct ranking *r, uint32_t want) {
        const uint32_t each = DIGITS / blockDim.x, first = DIGITS - 1 - threadIdx.x * each;
        uint32_t mine = 0, before;

        for (uint32_t i = 0; i < each; i++)
                mine += r->digits[first - i];
        before = sum_before(mine, r->sums);
        if (before < want && want <= before + mine) {
                uint32_t i = 0;

                for (; before + r->digits[first - i] < want; i++)
                        before += r->digits[first - i];
                r->digit = first - i;
                r->above = before;
        }
        if (threadIdx.x == blockDim.x - 1)
                r->sums[31] = before + mine;
        __syncthreads();
        return r->sums[31];
}

struct limit {
        uint32_t key;   /* what is above is chosen, and ... */
        uint32_t equal; /* ... so many of those at it */
        uint32_t found; /* in all */
};

/* Of the keys that each(f) calls f with, in all threads together, the want-th largest; want > 0. */
template <typename EACH> HSHARE struct limit limit_of(struct ranking *r, uint32_t want, const EACH &each) {
        uint32_t left = want, prefix = 0, n;

        for (int shift = 21, bits = 11; shift >= 0; shift -= bits) {
                uint32_t known = shift == 21 ? 0 : ~0u << (shift + bits), mask = (1u << bits) - 1;

                __syncthreads();
                for (uint32_t i = threadIdx.x; i < DIGITS; i += blockDim.x)
                        r->digits[i] = 0;
                __syncthreads();
                each([&](uint32_t key) {
                        if (key > 0 && ((key ^ prefix) & known) == 0)
                                atomicAdd(&r->digits[key >> shift & mask], 1u);
                });
                __syncthreads();
                n = find_digit(r, left);
                if (n < left) /* there are no more than are wanted: in the first round, if at all */
                        return {0, 0, n};
                prefix |= r->digit << shift;
                left -= r->above;
                if (shift == 10)
                        bits = 10;
        }
        return {prefix, left, want};
}

/* ---- what a sample says ---- */

/* How many of the sample should be at the limit or above, and some more: the top must not be missed. */
HSHARE uint32_t reach_of(uint32_t n, uint32_t z) {
        float expected = (float)z * GPU_TOP_SAMPLE / (float)n;

        return (uint32_t)(expected + 4.0f * sqrtf(expected) + 4.0f);
}

/* A block of threads for each row. */
KVD_KERNEL(top_bound, struct gpu_top_run, GPU_TOP_COLLECT_THREADS) {
        __shared__ struct ranking ranking;
        uint32_t row = blockIdx.x, n = span_n(a.a.spans, row / a.a.rows), reach = n > 0 ? reach_of(n, a.a.z) : 0;
        uint32_t stride = n / GPU_TOP_SAMPLE, sample[GPU_TOP_SAMPLE / GPU_TOP_COLLECT_THREADS];
        const float *scores = reinterpret_cast<const float *>(a.a.scores) + row * a.a.ld;
        struct limit limit = {0, 0, 0};

        if (n >= 4 * GPU_TOP_SAMPLE && reach <= GPU_TOP_SAMPLE / 2) {
#pragma unroll
                for (uint32_t i = 0; i < GPU_TOP_SAMPLE / GPU_TOP_COLLECT_THREADS; i++)
                        sample[i] = key_of(scores[(uint64_t)(i * GPU_TOP_COLLECT_THREADS + threadIdx.x) * stride]);
                limit = limit_of(&ranking, reach, [&](auto f) {
                        for (uint32_t key : sample)
                                f(key);
                });
        }
        if (threadIdx.x == 0)
                reinterpret_cast<float *>(a.bounds)[row] = limit.key > 0 ? score_of(limit.key) : LEAST_FINITE;
}

/* ---- what is near the top ---- */

/* x: tile; y: row. A warp has neighbouring scores, so that what is left stays in order. */
KVD_KERNEL(top_collect, struct gpu_top_run, GPU_TOP_COLLECT_THREADS) {
        const uint32_t steps = GPU_TOP_TILE / GPU_TOP_COLLECT_THREADS;
        __shared__ uint32_t sums[32];
        uint32_t row = blockIdx.y, n = span_n(a.a.spans, row / a.a.rows), lane = lane_id(), count = 0, before;
        uint32_t first = threadIdx.x / 32 * steps * 32, end = min(n - min(n, blockIdx.x * GPU_TOP_TILE), GPU_TOP_TILE);
        const float *scores = reinterpret_cast<const float *>(a.a.scores) + row * a.a.ld + blockIdx.x * GPU_TOP_TILE;
        uint64_t tile = (uint64_t)row * a.tiles + blockIdx.x;
        float *values = reinterpret_cast<float *>(a.values) + tile * GPU_TOP_ROOM;
        uint16_t *places = reinterpret_cast<uint16_t *>(a.places) + tile * GPU_TOP_ROOM;
        float bound = reinterpret_cast<const float *>(a.bounds)[row], x[steps];

#pragma unroll
        for (uint32_t i = 0; i < steps; i++)
                x[i] = first + i * 32 + lane < end ? scores[first + i * 32 + lane] : -INFINITY;
#pragma unroll
        for (uint32_t i = 0; i < steps; i++)
                count += __popc(warp_ballot(x[i] >= bound));
        before = warp_from(sum_before(lane == 0 ? count : 0, sums), 0);
#pragma unroll
        for (uint32_t i = 0; i < steps; i++) {
                uint32_t there = warp_ballot(x[i] >= bound), at = before + __popc(there & ((1u << lane) - 1));

                if (x[i] >= bound && at < GPU_TOP_ROOM) {
                        values[at] = x[i];
                        places[at] = (uint16_t)(first + i * 32 + lane);
                }
                before += __popc(there);
        }
        if (threadIdx.x == blockDim.x - 1)
                reinterpret_cast<uint32_t *>(a.counts)[tile] = before <= GPU_TOP_ROOM ? before : 0xffffffffu;
}

/* ---- the top of what is left ---- */

/* Scores to rank, in tiles of a row: those that were collected, or all of them. */
struct source {
        const float *values;
        const uint16_t *places; /* nullptr: value i is number i of its tile */
        const uint32_t *counts; /* nullptr: tiles are full, but for the last */
        uint32_t tiles, tile, stride, n;
};

HSHARE uint32_t count_of(const struct source &s, uint32_t tile) {
        return s.counts ? s.counts[tile] : min(s.n - tile * s.tile, s.tile);
}

HSHARE struct source all_of(const struct gpu_top_run &r, uint32_t row, uint32_t n) {
        const float *scores = reinterpret_cast<const float *>(r.a.scores) + row * r.a.ld;

        return {scores, nullptr, nullptr, (n + GPU_TOP_SHORT - 1) / GPU_TOP_SHORT, GPU_TOP_SHORT, GPU_TOP_SHORT, n};
}

/* All of them, if what was collected cannot be all of the top. */
HSHARE struct source source_of(const struct gpu_top_run &r, uint32_t row, uint32_t n, uint32_t *sums) {
        uint32_t tiles = (n + GPU_TOP_TILE - 1) / GPU_TOP_TILE, here = 0;
        const uint32_t *counts = reinterpret_cast<const uint32_t *>(r.counts) + (uint64_t)row * r.tiles;
        uint64_t first = (uint64_t)row * r.tiles * GPU_TOP_ROOM;
        bool full = false;

        if (!r.sampled)
                return all_of(r, row, n);
        for (uint32_t i = threadIdx.x; i < tiles; i += blockDim.x) {
                full = full || counts[i] == 0xffffffffu;
                here += counts[i];
        }
        here += sum_before(here, sums);
        if (threadIdx.x == blockDim.x - 1)
                sums[31] = here;
        full = __syncthreads_or(full);
        if (full || (sums[31] < r.a.z && reinterpret_cast<const float *>(r.bounds)[row] > LEAST_FINITE))
                return all_of(r, row, n);
        return {reinterpret_cast<const float *>(r.values) + first, reinterpret_cast<const uint16_t *>(r.places) + first,
                counts, tiles, GPU_TOP_TILE, GPU_TOP_ROOM, n};
}

/* How many of each tile are above the limit, and at it; then how many of the tiles before. */
HSHARE void mark_tiles(const struct source &s, const struct limit &limit, uint32_t *marks, uint32_t *sums) {
        uint32_t lane = lane_id(), above = 0, equal = 0;

        for (uint32_t t = threadIdx.x / 32; t < s.tiles; t += blockDim.x / 32) {
                uint32_t n = count_of(s, t), counts[2] = {0, 0};

                for (uint32_t i = 0; i < n; i += 32) {
                        uint32_t key = i + lane < n ? key_of(s.values[(uint64_t)t * s.stride + i + lane]) : 0;

                        counts[0] += __popc(warp_ballot(key > limit.key));
                        counts[1] += __popc(warp_ballot(key == limit.key && key > 0));
                }
                if (lane < 2)
                        marks[2 * t + lane] = counts[lane];
        }
        __syncthreads();
        for (uint32_t t = 0; t < s.tiles; t += blockDim.x) {
                uint32_t mine = t + threadIdx.x, x = mine < s.tiles ? marks[2 * mine] : 0;
                uint32_t y = mine < s.tiles ? marks[2 * mine + 1] : 0;
                uint32_t x_before = sum_before(x, sums), y_before;

                if (threadIdx.x == blockDim.x - 1)
                        sums[31] = x_before + x;
                __syncthreads();
                x_before += above;
                above += sums[31];
                y_before = sum_before(y, sums);
                if (threadIdx.x == blockDim.x - 1)
                        sums[31] = y_before + y;
                __syncthreads();
                y_before += equal;
                equal += sums[31];
                if (mine < s.tiles) {
                        marks[2 * mine] = x_before;
                        marks[2 * mine + 1] = y_before;
                }
        }
        __syncthreads();
}

HSHARE void write_top(const struct source &s, const struct limit &limit, const uint32_t *marks, uint32_t from,
                      uint32_t *to) {
        uint32_t lane = lane_id(), lower = (1u << lane) - 1;

        for (uint32_t t = threadIdx.x / 32; t < s.tiles; t += blockDim.x / 32) {
                uint32_t n = count_of(s, t), above = marks[2 * t], equal = marks[2 * t + 1];

                for (uint32_t i = 0; i < n; i += 32) {
                        uint64_t at = (uint64_t)t * s.stride + i + lane;
                        uint32_t key = i + lane < n ? key_of(s.values[at]) : 0;
                        bool is_equal = key == limit.key && key > 0;
                        uint32_t all_above = warp_ballot(key > limit.key), all_equal = warp_ballot(is_equal);
                        uint32_t mine = above + __popc(all_above & lower), same = equal + __popc(all_equal & lower);
                        uint32_t place = i + lane < n && s.places ? s.places[at] : i + lane;

                        if (key > limit.key || (is_equal && same < limit.equal))
                                to[mine + min(same, limit.equal)] = from + t * s.tile + place;
                        above += __popc(all_above);
                        equal += __popc(all_equal);
                }
        }
}

/* A block of threads for each row. */
KVD_KERNEL(top_rank, struct gpu_top_run, GPU_TOP_THREADS) {
        __shared__ struct ranking ranking;
        uint32_t row = blockIdx.x, s = row / a.a.rows, n = span_n(a.a.spans, s);
        uint32_t *to = reinterpret_cast<uint32_t *>(a.a.to) + row * a.a.ld_to;
        uint32_t *marks = reinterpret_cast<uint32_t *>(a.marks) + (uint64_t)row * a.shorts * 2;
        struct source from = source_of(a, row, n, ranking.sums);
        struct limit limit = limit_of(&ranking, a.a.z, [&](auto f) {
                for (uint32_t t = threadIdx.x / 32; t < from.tiles; t += blockDim.x / 32)
                        for (uint32_t i = lane_id(), end = count_of(from, t); i < end; i += 32)
                                f(key_of(from.values[(uint64_t)t * from.stride + i]));
        });

        mark_tiles(from, limit, marks, ranking.sums);
        write_top(from, limit, marks, span_from(a.a.spans, s), to);
        if (threadIdx.x == 0)
                reinterpret_cast<uint32_t *>(a.a.found)[row] = limit.found;
}
