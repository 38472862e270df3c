/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of labels, made of whole numbers and fused operations as kernels/hshare.c makes them; one score of those of a
 * group; and how much sets have in common.
 */

#include "kernels/cuda/hshare_run.h"
#include "kernels/cuda/hshare.cuh"
#include "kernels/hshare.h"

#define THREADS GPU_SCORE_THREADS
#define EACH GPU_SCORE_EACH
#define QUERIES 16 /* in shared memory */
#define USUAL 32   /* channels */
#define LEAST_FINITE (-3.402823466e38f)

/* ---- scores ---- */

/* Of a query: its codes, four to a word, and what is made of its numbers once for all labels. */
struct prepared {
        uint32_t low[USUAL / 8], high[USUAL / 8];
        float least, step, offset, none;
};

HSHARE void prepare(struct prepared *to, const struct kvd_label_query *q, uint32_t n_channels) {
        for (int i = 0; i < USUAL / 8; i++) {
                to->low[i] = to->high[i] = 0;
                for (int j = 0; j < 4; j++) {
                        to->low[i] |= (uint32_t)q->low[4 * i + j] << 8 * j;
                        to->high[i] |= (uint32_t)q->high[4 * i + j] << 8 * j;
                }
        }
        to->least = q->least;
        to->step = q->step;
        to->offset = fmaf(q->step, (float)q->sum, (float)n_channels * q->least);
}

/* A label's numbers. */
struct key {
        uint32_t low[USUAL / 8], high[USUAL / 8];
        float sum, least, step;
        bool there;
};

HSHARE float score_of(const struct prepared *q, const struct key &k, uint32_t dot) {
        float inner = fmaf(q->step, (float)dot, q->least * k.sum);

        return k.there ? fmaf(k.step, inner, k.least * q->offset) : -INFINITY;
}

HSHARE struct key read_key(const uint8_t *label) {
        const uint32_t *words = reinterpret_cast<const uint32_t *>(label);
        uint32_t sum = 0, ends = label ? words[USUAL / 8] : 0;
        struct key k;

#pragma unroll
        for (int i = 0; i < USUAL / 8; i++) {
                uint32_t word = label ? words[i] : 0;

                k.low[i] = word & 0x0f0f0f0fu;
                k.high[i] = word >> 4 & 0x0f0f0f0fu;
                sum = __dp4a(k.low[i] + k.high[i], 0x01010101u, sum);
        }
        k.sum = (float)sum;
        k.least = f16_to_float((uint16_t)ends);
        k.step = f16_to_float((uint16_t)(ends >> 16));
        k.there = label != nullptr;
        return k;
}

/* 32 channels, labels at multiples of 4. x: EACH * THREADS positions; y: sequence and KV head. */
KVD_KERNEL_ROOMY(label_scores_32, struct gpu_label_scores, THREADS) {
        __shared__ struct prepared queries[QUERIES];
        uint32_t s = blockIdx.y / a.kv_heads, h = blockIdx.y % a.kv_heads, from = span_from(a.spans, s);
        uint32_t n = span_n(a.spans, s), first = blockIdx.x * EACH * THREADS + threadIdx.x;
        const struct kvd_label_query *all = reinterpret_cast<const struct kvd_label_query *>(a.queries) +
                                            (uint64_t)blockIdx.y * a.group;
        float *to = reinterpret_cast<float *>(a.to) + (uint64_t)blockIdx.y * a.group * a.ld;
        struct key k[EACH];

#pragma unroll
        for (uint32_t j = 0; j < EACH; j++) {
                uint32_t i = first + j * THREADS;

                k[j] = read_key(i < n ? slot_at(a.labels, s, h, from + i, label_bytes(USUAL)) : nullptr);
        }
        for (uint32_t g = 0; g < a.group; g += QUERIES) {
                uint32_t here = min(a.group - g, QUERIES);

                __syncthreads();
                if (threadIdx.x < here)
                        prepare(queries + threadIdx.x, all + g + threadIdx.x, USUAL);
                __syncthreads();
                for (uint32_t q = 0; q < here; q++)
#pragma unroll
                        for (uint32_t j = 0; j < EACH; j++) {
                                uint32_t dot = 0, i = first + j * THREADS;

                                for (int w = 0; w < USUAL / 8; w++) {
                                        dot = __dp4a(k[j].low[w], queries[q].low[w], dot);
                                        dot = __dp4a(k[j].high[w], queries[q].high[w], dot);
                                }
                                if (i < n)
                                        to[(g + q) * a.ld + i] = score_of(queries + q, k[j], dot);
                        }
        }
}

/* Any number of channels, anywhere: a thread for each position and query. */
KVD_KERNEL(label_scores_any, struct gpu_label_scores, THREADS) {
        uint32_t s = blockIdx.y / a.kv_heads, h = blockIdx.y % a.kv_heads, n = span_n(a.spans, s);
        uint32_t bytes = (a.n_channels + 1) / 2, i = blockIdx.x * THREADS + threadIdx.x, sum = 0, dot;
        const struct kvd_label_query *q = reinterpret_cast<const struct kvd_label_query *>(a.queries) +
                                          (uint64_t)blockIdx.y * a.group;
        float *to = reinterpret_cast<float *>(a.to) + (uint64_t)blockIdx.y * a.group * a.ld;
        const uint8_t *label;
        struct prepared p;
        struct key k;

        if (i >= n)
                return;
        label = slot_at(a.labels, s, h, span_from(a.spans, s) + i, label_bytes(a.n_channels));
        k.there = label != nullptr;
        for (uint32_t j = 0; j < bytes && label; j++)
                sum += (label[j] & 15u) + (label[j] >> 4);
        k.sum = (float)sum;
        k.least = label ? f16_to_float((uint16_t)(label[bytes] | label[bytes + 1] << 8)) : 0.0f;
        k.step = label ? f16_to_float((uint16_t)(label[bytes + 2] | label[bytes + 3] << 8)) : 0.0f;
        for (uint32_t g = 0; g < a.group; g++) {
                dot = 0;
                for (uint32_t j = 0; j < bytes && label; j++)
                        dot += (label[j] & 15u) * q[g].low[j] + (uint32_t)(label[j] >> 4) * q[g].high[j];
                p.least = q[g].least;
                p.step = q[g].step;
                p.offset = fmaf(q[g].step, (float)q[g].sum, (float)a.n_channels * q[g].least);
                to[g * a.ld + i] = score_of(&p, k, dot);
        }
}

/* ---- one score for a group ---- */

/* Largest score and sum of weights of a part of a row; [sequence, KV head, query head][part][2]. */
HSHARE float *part_at(const struct gpu_aggregate &a, uint64_t row, uint32_t part) {
        uint32_t parts = (a.spans.most + GPU_AGGREGATE_PART - 1) / GPU_AGGREGATE_PART;

        return reinterpret_cast<float *>(a.workspace) + (row * parts + part) * 2;
}

/* The sum over a block of threads, in every thread; in the order of a tree. */
HSHARE float sum_block(float x, float *shared, bool largest) {
        uint32_t warps = blockDim.x / 32;

        x = largest ? warp_max(x) : warp_sum(x);
        __syncthreads();
        if (lane_id() == 0)
                shared[threadIdx.x / 32] = x;
        __syncthreads();
        x = shared[0];
        for (uint32_t i = 1; i < warps; i++)
                x = largest ? fmaxf(x, shared[i]) : x + shared[i];
        return x;
}

HSHARE float weight_of(float x, float scale, float most) {
        return x < LEAST_FINITE ? 0.0f : expf(fmaf(x, scale, -(most * scale)));
}

/* x: part; y: sequence, KV head; z: query head. */
KVD_KERNEL(aggregate_parts, struct gpu_aggregate, THREADS) {
        __shared__ float shared[THREADS / 32];
        uint64_t row = (uint64_t)blockIdx.y * a.group + blockIdx.z;
        const float *x = reinterpret_cast<const float *>(a.scores) + row * a.ld;
        uint32_t first = blockIdx.x * GPU_AGGREGATE_PART, n = span_n(a.spans, blockIdx.y / a.kv_heads);
        uint32_t end = min(n, first + GPU_AGGREGATE_PART);
        float most = -INFINITY, sum = 0.0f, *to = part_at(a, row, blockIdx.x);

        if (first >= n)
                return;
        for (uint32_t i = first + threadIdx.x; i < end; i += THREADS)
                most = fmaxf(most, x[i]);
        most = sum_block(most, shared, true);
        for (uint32_t i = first + threadIdx.x; i < end; i += THREADS)
                sum += weight_of(x[i], a.scale, most);
        sum = sum_block(sum, shared, false);
        if (threadIdx.x == 0) {
                to[0] = most;
                to[1] = sum;
        }
}

/* What makes weights of a row's scores: their largest, and 1 / the sum of weights. For a warp. */
HSHARE void whole_of(const struct gpu_aggregate &a, uint64_t row, uint32_t n, float to[2]) {
        uint32_t parts = (n + GPU_AGGREGATE_PART - 1) / GPU_AGGREGATE_PART;
        float most = -INFINITY, sum = 0.0f;

        for (uint32_t i = lane_id(); i < parts; i += 32)
                most = fmaxf(most, part_at(a, row, i)[0]);
        most = warp_max(most);
        for (uint32_t i = lane_id(); i < parts; i += 32)
                sum = fmaf(part_at(a, row, i)[1], weight_of(part_at(a, row, i)[0], a.scale, most), sum);
        sum = warp_sum(sum);
        if (lane_id() == 0) {
                to[0] = most;
                to[1] = 1.0f / sum;
        }
}

HSHARE float sum_weights(const struct gpu_aggregate &a, const float *scores, const float wholes[][2]) {
        float sum = 0.0f;

        for (uint32_t g = 0; g < a.group; g++) {
                float x = scores[g * a.ld];
                float weight = x < LEAST_FINITE ? x : weight_of(x, a.scale, wholes[g][0]) * wholes[g][1];

                sum = g == 0 || !a.largest ? sum + weight : sum > weight ? sum : weight;
        }
        return sum;
}

/* x: part; y: sequence, KV head. */
KVD_KERNEL(aggregate, struct gpu_aggregate, THREADS) {
        __shared__ float wholes[GPU_AGGREGATE_GROUP][2];
        uint64_t row = (uint64_t)blockIdx.y * a.group;
        const float *scores = reinterpret_cast<const float *>(a.scores) + row * a.ld;
        float *to = reinterpret_cast<float *>(a.to) + blockIdx.y * a.ld_to;
        uint32_t n = span_n(a.spans, blockIdx.y / a.kv_heads), first = blockIdx.x * GPU_AGGREGATE_PART;
        uint32_t end = min(n, first + GPU_AGGREGATE_PART);

        if (first >= n)
                return;
        for (uint32_t g = threadIdx.x / 32; g < a.group && a.group > 1; g += THREADS / 32)
                whole_of(a, row + g, n, wholes[g]);
        __syncthreads();
        for (uint32_t i = first + threadIdx.x; i < end; i += THREADS)
                to[i] = a.group > 1 ? sum_weights(a, scores + i, wholes) : scores[i];
}

/* ---- sets ---- */

/* A warp for each row. */
KVD_KERNEL(overlap, struct gpu_overlap, THREADS) {
        uint32_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, sum = 0;
        const uint64_t *x = reinterpret_cast<const uint64_t *>(a.a) + (uint64_t)row * a.words;
        const uint64_t *y = reinterpret_cast<const uint64_t *>(a.b) + (uint64_t)row * a.words;

        if (row >= a.rows)
                return;
        for (uint32_t w = lane_id(); w < a.words; w += 32)
                sum += (uint32_t)__popcll(x[w] & y[w]);
        for (int mask = 16; mask; mask /= 2)
                sum += warp_xor(sum, mask);
        if (lane_id() == 0)
                reinterpret_cast<uint32_t *>(a.to)[row] = sum;
}
