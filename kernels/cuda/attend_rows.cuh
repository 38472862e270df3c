/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_ATTEND_ROWS_CUH
#define KVD_KERNELS_CUDA_ATTEND_ROWS_CUH

/* Addresses of keys, values and queries, and which positions a row sees. */

#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/device.cuh"

#define NOWHERE 0xffffffffu /* position of a masked column: beyond every limit */
#define ATTEND static __device__ __forceinline__

/* A key and its value. */
struct place {
        /* the head's slot in the block, to which k_offset or v_offset is added; nullptr: masked */
        const uint8_t *at;
        uint32_t position, rotation;
};

/* A sequence's KV head. */
struct head {
        uint32_t s, h;
        uint32_t length;  /* positions */
        uint32_t columns;
        uint32_t tokens;  /* tokens of this call */
        uint32_t start;   /* first of those tokens */
};

ATTEND struct head head_of(const struct gpu_attend_launch &r, uint32_t s, uint32_t h) {
        const uint32_t *starts = reinterpret_cast<const uint32_t *>(r.a.starts);
        const uint32_t *n_chosen = reinterpret_cast<const uint32_t *>(r.a.n_chosen);
        struct head to;

        to.s = s;
        to.h = h;
        to.length = min(reinterpret_cast<const uint32_t *>(r.a.lengths)[s], r.a.max_length);
        to.columns = to.length;
        if (r.a.chosen)
                to.columns = min(n_chosen[s * r.a.kv_heads + h], r.a.max_chosen);
        to.start = starts ? starts[s] : s;
        to.tokens = starts ? min(starts[s + 1] - to.start, r.a.max_tokens) : 1;
        return to;
}

/* The limit of a token: it sees the positions below. */
ATTEND uint32_t limit_of(const struct gpu_attend_launch &r, const struct head &h, uint32_t token) {
        uint32_t later = h.tokens - 1 - token;

        return r.a.bidirectional ? h.length : h.length > later ? h.length - later : 0;
}

ATTEND uint32_t position_of(const struct gpu_attend_launch &r, const struct head &h,
                            uint32_t column) {
        if (!r.a.chosen)
                return column;
        return reinterpret_cast<const uint32_t *>(
                r.a.chosen)[(h.s * r.a.kv_heads + h.h) * r.a.ld_chosen + column];
}

ATTEND struct place place_at(const struct gpu_attend_launch &r, const struct head &h,
                             uint32_t position) {
        const uint32_t *ids = reinterpret_cast<const uint32_t *>(r.a.blocks.ids) +
                              h.s * r.a.ld_blocks;
        struct place p = {nullptr, NOWHERE, 0};
        uint32_t block, id;

        if (position >= h.length)
                return p;
        block = position / r.a.block_tokens;
        id = ids[block];
        if (id == GPU_NO_BLOCK)
                return p;
        p.at = reinterpret_cast<const uint8_t *>(
                r.a.blocks.base + id * r.a.blocks.block_bytes + h.h * r.a.head_stride +
                (position - block * r.a.block_tokens) * r.a.token_stride);
        p.position = position;
        if (r.a.rotation)
                p.rotation = reinterpret_cast<const uint32_t *>(
                        r.a.rotation)[h.s * r.a.ld_blocks + block];
        return p;
}

/* NOWHERE for columns from to on. */
ATTEND uint32_t position_before(const struct gpu_attend_launch &r, const struct head &h,
                                uint32_t column, uint32_t to) {
        return column < to ? position_of(r, h, column) : NOWHERE;
}

ATTEND struct place place_of(const struct gpu_attend_launch &r, const struct head &h,
                             uint32_t column, uint32_t to) {
        return place_at(r, h, position_before(r, h, column, to));
}

/* ---- queries and results ---- */

ATTEND float load_number(cu_address at, uint64_t i, uint32_t number) {
        if (number == NUMBER_F32)
                return reinterpret_cast<const float *>(at)[i];
        if (number == NUMBER_F16)
                return f16_to_float(reinterpret_cast<const uint16_t *>(at)[i]);
        return bf16_to_float(reinterpret_cast<const uint16_t *>(at)[i]);
}

ATTEND void store_number(cu_address at, uint64_t i, uint32_t number, float x) {
        if (number == NUMBER_F32)
                reinterpret_cast<float *>(at)[i] = x;
        else if (number == NUMBER_F16)
                reinterpret_cast<uint16_t *>(at)[i] = float_to_f16(x);
        else
                reinterpret_cast<uint16_t *>(at)[i] = float_to_bf16(x);
}

/* Element d of the query at index at, rotated. */
ATTEND float load_query(const struct gpu_attend_launch &r, uint64_t at, uint32_t d,
                        uint32_t rotation) {
        uint32_t half = r.a.dim / 2, first = d < half ? d : d - half;
        float x = d < r.a.dim ? load_number(r.a.q, at + d, r.a.q_number) : 0.0f, other;
        const float *angles;

        if (rotation == 0 || d >= r.a.dim)
                return x;
        angles = reinterpret_cast<const float *>(r.a.rotations) +
                 (uint64_t)(rotation - 1) * r.a.dim + first;
        other = load_number(r.a.q, at + (d < half ? d + half : first), r.a.q_number);
        return x * angles[0] + (d < half ? -other : other) * angles[half];
}

ATTEND uint64_t query_at(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                         uint32_t g) {
        return (h.start + token) * r.a.q_token + (h.h * r.a.group + g) * r.a.q_head;
}

ATTEND uint64_t result_at(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                          uint32_t g) {
        return (h.start + token) * r.a.out_token + (h.h * r.a.group + g) * r.a.out_head;
}

/* The number of a row in sums, stats and totals. */
ATTEND uint64_t row_of(const struct gpu_attend_launch &r, const struct head &h, uint32_t token,
                       uint32_t g) {
        return ((uint64_t)h.s * r.tokens + token) * r.a.kv_heads * r.a.group + h.h * r.a.group + g;
}

/* ---- softmax in parts ---- */

/*
 * The factor for the weights of a part when its largest score from is replaced by to; both are -inf
 * if nothing was seen.
 */
ATTEND float shrink(float from, float to) {
        return from == -INFINITY ? 0.0f : exp2f(from - to);
}

/* A row is complete: keeps its largest score and sum of weights for the masses. */
ATTEND void store_total(const struct gpu_attend_launch &r, uint64_t row, float largest, float sum) {
        float *to = reinterpret_cast<float *>(r.totals) + 2 * row;

        if (r.totals) {
                to[0] = largest;
                to[1] = sum;
        }
}

#endif
