/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Labels of keys and queries, a warp each: lane i has the channels i, i + 32, ... Every operation is that of
 * kernels/hshare_label.c, and the order of those that have one does not matter: so labels are equal.
 */

#include "kernels/cuda/hshare.cuh"
#include "kernels/hshare.h"

#define THREADS 256
#define EACH (KVD_LABEL_CHANNELS_MAX / 32)
#define LARGEST 3.402823466e38f
#define LARGEST_F16 65504.0f

struct range {
        float least, step;
        bool finite;
};

/* -0 becomes 0. */
HSHARE float through_f16(float x) {
        return f16_to_float(float_to_f16(x)) + 0.0f;
}

HSHARE float warp_min(float x) {
        for (int mask = 16; mask; mask /= 2)
                x = fminf(x, warp_xor(x, mask));
        return x;
}

HSHARE struct range range_of(const float x[EACH], uint32_t n, bool stored) {
        float least = INFINITY, most = -INFINITY, bound = stored ? LARGEST_F16 : LARGEST;
        struct range r = {0.0f, 1.0f, false};
        bool finite = true;

#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
                if (32 * i + lane_id() < n) {
                        finite = finite && x[i] - x[i] == 0.0f;
                        least = fminf(least, x[i]);
                        most = fmaxf(most, x[i]);
                }
        least = warp_min(least);
        most = warp_max(most);
        r.finite = warp_ballot(!finite) == 0;
        if (!r.finite)
                return r;
        r.least = fmaxf(least, -bound);
        r.step = __fdiv_rn(fminf(most, bound) - r.least, 15.0f);
        if (stored) {
                r.least = through_f16(r.least);
                r.step = through_f16(r.step);
        }
        if (!(r.step > 0.0f))
                r.step = 1.0f;
        return r;
}

/* 0 to 15; NaN, of infinite ranges, is 15. */
HSHARE uint32_t code_of(float x, const struct range &r) {
        float code = rintf(__fdiv_rn(x - r.least, r.step));

        code = code < 15.0f ? code : 15.0f;
        return r.finite && code > 0.0f ? (uint32_t)code : 0;
}

/* ---- keys ---- */

HSHARE void label_key(const struct gpu_label &a, const uint16_t *channels, const void *key, uint8_t *label) {
        uint32_t n = a.channels.n_channels, lane = lane_id();
        struct range r;
        float x[EACH];

#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
                x[i] = 32 * i + lane < n ? load_number(key, channels[32 * i + lane], a.number) : 0.0f;
        r = range_of(x, n, true);
#pragma unroll
        for (uint32_t i = 0; i < EACH && 32 * i < n; i++) {
                uint32_t code = 32 * i + lane < n ? code_of(x[i], r) : 0;
                uint32_t both = code | warp_xor(code, 1) << 4;

                if (lane % 2 == 0 && 32 * i + lane < n)
                        label[16 * i + lane / 2] = (uint8_t)both;
        }
        if (lane < 4) {
                uint16_t end = float_to_f16(lane < 2 ? r.least : r.step);

                label[(n + 1) / 2 + lane] = (uint8_t)(end >> 8 * (lane % 2));
        }
}

/* x: positions; y: sequence and KV head. */
KVD_KERNEL(label, struct gpu_label, THREADS) {
        uint32_t s = blockIdx.y / a.kv_heads, h = blockIdx.y % a.kv_heads, from = span_from(a.spans, s);
        uint32_t n = span_n(a.spans, s), warps = blockDim.x / 32;
        const uint16_t *channels = reinterpret_cast<const uint16_t *>(a.channels.channels) +
                                   h * a.channels.ld_channels;

        for (uint32_t i = blockIdx.x * warps + threadIdx.x / 32; i < n; i += gridDim.x * warps) {
                const uint8_t *key = slot_at(a.keys, s, h, from + i, a.keys.token_stride);
                uint8_t *label = slot_at(a.labels, s, h, from + i, label_bytes(a.channels.n_channels));

                if (key && label)
                        label_key(a, channels, key, label);
        }
}

/* ---- queries ---- */

/* A warp for each. */
KVD_KERNEL(label_query, struct gpu_label_query, THREADS) {
        uint32_t heads = a.kv_heads * a.group, i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
        uint32_t n = a.channels.n_channels, lane = lane_id(), head = i % heads, sum = 0;
        const uint16_t *channels = reinterpret_cast<const uint16_t *>(a.channels.channels) +
                                   head / a.group * a.channels.ld_channels;
        struct kvd_label_query *to = reinterpret_cast<struct kvd_label_query *>(a.to) + i;
        uint8_t *codes = lane % 2 ? to->high : to->low;
        struct range r;
        float x[EACH];

        if (i >= a.rows * heads)
                return;
#pragma unroll
        for (uint32_t j = 0; j < EACH; j++)
                x[j] = 32 * j + lane < n ? load_number(reinterpret_cast<const void *>(a.q),
                                                       i / heads * a.q_row + head * a.q_head + channels[32 * j + lane],
                                                       a.q_number) : 0.0f;
        r = range_of(x, n, false);
#pragma unroll
        for (uint32_t j = 0; j < EACH; j++) {
                uint32_t code = 32 * j + lane < n ? code_of(x[j], r) : 0;

                codes[16 * j + lane / 2] = (uint8_t)code;
                sum += code;
        }
        for (int mask = 16; mask; mask /= 2)
                sum += warp_xor(sum, mask);
        if (lane == 0) {
                to->least = r.least;
                to->step = r.step;
                to->sum = sum;
        }
}

/* ---- calibration ---- */

/* x: 32 dimensions; y: KV head. Each warp takes every n-th token; their sums are added in order. */
KVD_KERNEL(weigh, struct gpu_weigh, THREADS) {
        __shared__ float sums[THREADS / 32][32];
        uint32_t d = blockIdx.x * 32 + lane_id(), h = blockIdx.y, warps = blockDim.x / 32;
        float sum = 0.0f;

        for (uint32_t i = threadIdx.x / 32; i < a.n; i += warps) {
                const uint8_t *key = slot_at(a.keys, 0, h, i, a.keys.token_stride);
                float k = key && d < a.dim ? load_number(key, d, a.number) : 0.0f;

                for (uint32_t g = 0; g < a.group && key && d < a.dim; g++)
                        sum += fabsf(k * load_number(reinterpret_cast<const void *>(a.q),
                                                     i * a.q_row + (h * a.group + g) * a.q_head + d, a.q_number));
        }
        sums[threadIdx.x / 32][lane_id()] = sum;
        __syncthreads();
        if (threadIdx.x < 32 && d < a.dim) {
                float *to = reinterpret_cast<float *>(a.weights) + h * a.dim + d;

                sum = 0.0f;
                for (uint32_t w = 0; w < warps; w++)
                        sum += sums[w][threadIdx.x];
                *to += sum;
        }
}
