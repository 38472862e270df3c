/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A warp takes a slice of the tokens of one head of one layer. LANES lanes share a row, 16 bytes
 * each (CHUNKS times), so a warp loads 32 / LANES rows at once, and UNROLL times as many before it
 * uses the first. Neighbouring warps have neighbouring heads of the same tokens: contiguous memory
 * in either order of a block.
 *
 * Keys of less than 16 bits have kernels of their own, which load them as floats. Anchors pass
 * through shared memory there, since quantised keys are transformed.
 */

#include "kernels/cuda/keydiff.h"
#include "kernels/cuda/narrow.cuh"
#include "kernels/cuda/rows.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define SUM_THREADS 512
#define SUM_WARPS (SUM_THREADS / 32)

template <int NUMBER> static __device__ __forceinline__ uint64_t bytes_of(uint64_t elements) {
        return NUMBER == NUMBER_NARROW ? elements : elements * sizeof(typename element<NUMBER>::type);
}

/* Address of one layer and head of a block; 0 if the block is not resident. */
template <int NUMBER>
static __device__ __forceinline__ cu_address head_at(const struct gpu_key_rows &k, uint32_t layer,
                                                     uint32_t head, uint32_t id) {
        return id == GPU_NO_BLOCK ?
                       0 :
                       k.blocks.base + id * k.blocks.block_bytes + k.offset +
                               layer * k.layer_stride + bytes_of<NUMBER>(head * k.head_stride);
}

static __device__ __forceinline__ bool is_valid(float squares) {
        return squares > 0.0f && squares < infinity();
}

template <int NUMBER_, int LANES_, int CHUNKS_, bool WIDE_> struct form {
        static const int NUMBER = NUMBER_, LANES = LANES_, CHUNKS = CHUNKS_, N = vector<NUMBER>::N;
        static const int ROWS = 32 / LANES, UNROLL = 4 / CHUNKS;
        static const bool WIDE = WIDE_;
};

typedef form<NUMBER_NARROW, 32, 2, false> narrow_form;

/* body<form>(arguments) in the form that fits: few lanes per row if rows are aligned. */
#define EACH_FORM(keys, wide, body, ...) \
        do { \
                if ((keys).number == NUMBER_F32) { \
                        if (!(wide)) \
                                body<form<NUMBER_F32, 32, 2, false>>(__VA_ARGS__); \
                        else if ((keys).dim > 128) \
                                body<form<NUMBER_F32, 32, 2, true>>(__VA_ARGS__); \
                        else if ((keys).dim > 64) \
                                body<form<NUMBER_F32, 32, 1, true>>(__VA_ARGS__); \
                        else \
                                body<form<NUMBER_F32, 16, 1, true>>(__VA_ARGS__); \
                } else if ((keys).number == NUMBER_F16) { \
                        EACH_SHORT(NUMBER_F16, keys, wide, body, __VA_ARGS__); \
                } else { \
                        EACH_SHORT(NUMBER_BF16, keys, wide, body, __VA_ARGS__); \
                } \
        } while (0)
#define EACH_SHORT(number, keys, wide, body, ...) \
        do { \
                if (!(wide)) \
                        body<form<number, 32, 1, false>>(__VA_ARGS__); \
                else if ((keys).dim > 128) \
                        body<form<number, 32, 1, true>>(__VA_ARGS__); \
                else if ((keys).dim > 64) \
                        body<form<number, 16, 1, true>>(__VA_ARGS__); \
                else \
                        body<form<number, 8, 1, true>>(__VA_ARGS__); \
        } while (0)

static __device__ __forceinline__ bool is_wide(const struct gpu_key_rows &k) {
        uint64_t n = k.number == NUMBER_F32 ? 4 : 8;

        return (k.blocks.base | k.blocks.block_bytes | k.offset | k.layer_stride) % 16 == 0 &&
               (k.head_stride | k.token_stride | k.dim) % n == 0;
}

/* Loads rows slot, slot + 1, ... of this lane's part of the warp, up to end. */
template <typename FORM>
static __device__ __forceinline__ void load_rows(uint4 v[FORM::UNROLL][FORM::CHUNKS],
                                                 const struct gpu_key_rows &k, cu_address head,
                                                 uint32_t slot, uint32_t end) {
        const uint32_t within = lane_id() % FORM::LANES;

        slot += lane_id() / FORM::LANES;
#pragma unroll
        for (int u = 0; u < FORM::UNROLL; u++) {
                uint64_t row = head +
                               bytes_of<FORM::NUMBER>((slot + u * FORM::ROWS) * k.token_stride);
                uint32_t dim = head && slot + u * FORM::ROWS < end ? k.dim : 0;

#pragma unroll
                for (int c = 0; c < FORM::CHUNKS; c++) {
                        const uint8_t *from = reinterpret_cast<const uint8_t *>(row);
                        uint32_t i = (c * FORM::LANES + within) * FORM::N;

                        if constexpr (FORM::NUMBER == NUMBER_NARROW)
                                v[u][c] = load_narrow(from, i, dim, k.dim, k.number);
                        else
                                v[u][c] = load_vector<FORM::NUMBER, FORM::WIDE>(from, i, dim);
                }
        }
}

/* A lane holds the sum of row lane / N of those that its LANES lanes loaded. */
template <typename FORM> struct holders {
        static const int N = FORM::LANES / FORM::UNROLL;
};

/*
 * Sums each row over the lanes that share it. In every step, half of the remaining partial sums
 * move to another lane.
 */
template <typename FORM> static __device__ __forceinline__ float row_sums(float x[FORM::UNROLL]) {
        int mask = FORM::LANES / 2;

#pragma unroll
        for (int n = FORM::UNROLL / 2; n; n /= 2, mask /= 2)
#pragma unroll
                for (int i = 0; i < n; i++) {
                        bool upper = lane_id() & mask;
                        float gone = warp_xor(upper ? x[i] : x[i + n], mask);

                        x[i] = (upper ? x[i + n] : x[i]) + gone;
                }
#pragma unroll
        for (; mask; mask /= 2)
                x[0] += warp_xor(x[0], mask);
        return x[0];
}

/* ---- the anchor ---- */

struct slice {
        uint32_t layer, head, number, from, to;
};

static __device__ __forceinline__ bool slice_of(const struct gpu_scores &a, uint64_t warp,
                                                struct slice *s) {
        uint64_t of_layer = (uint64_t)a.slices * a.keys.heads;

        s->layer = (uint32_t)(warp / of_layer);
        s->number = (uint32_t)(warp % of_layer / a.keys.heads);
        s->head = (uint32_t)(warp % a.keys.heads);
        s->from = a.from + s->number * a.slice;
        s->to = a.to - s->from < a.slice ? a.to : s->from + a.slice;
        return warp < of_layer * a.keys.layers;
}

/*
 * The part of a slice that is in one block. The next block's id is loaded before this block's keys.
 */
struct range {
        uint32_t t, id, from, to; /* first token, block id, first slot, end slot */
};

static __device__ __forceinline__ struct range range_at(const struct gpu_scores &a,
                                                        const struct slice &s, uint32_t t,
                                                        uint32_t block, uint32_t slot,
                                                        uint32_t *id) {
        const uint32_t *ids = reinterpret_cast<const uint32_t *>(a.keys.blocks.ids);
        uint32_t left = s.to > t ? s.to - t : 0, room = a.keys.per_block - slot;
        struct range r = {t, *id, slot, slot + (left < room ? left : room)};

        *id = left > room ? ids[block + 1] : GPU_NO_BLOCK;
        return r;
}

static __device__ __forceinline__ struct range first_range(const struct gpu_scores &a,
                                                           const struct slice &s, uint32_t *id) {
        uint32_t block = s.from / a.keys.per_block;

        *id = s.from < s.to ? reinterpret_cast<const uint32_t *>(a.keys.blocks.ids)[block] : GPU_NO_BLOCK;
        return range_at(a, s, s.from, block, s.from - block * a.keys.per_block, id);
}

static __device__ __forceinline__ struct range next_range(const struct gpu_scores &a,
                                                          const struct slice &s,
                                                          const struct range &r, uint32_t *id) {
        uint32_t t = r.t + r.to - r.from;

        return range_at(a, s, t, t / a.keys.per_block, 0, id);
}

static __device__ __forceinline__ float *part_at(const struct gpu_scores &a,
                                                 const struct slice &s) {
        uint64_t row = ((uint64_t)s.layer * a.keys.heads + s.head) * a.slices + s.number;

        return reinterpret_cast<float *>(a.scratch) + row * a.keys.dim;
}

static __device__ __forceinline__ uint32_t *part_counts(const struct gpu_scores &a) {
        return reinterpret_cast<uint32_t *>(a.scratch) +
               (uint64_t)a.keys.layers * a.keys.heads * a.slices * a.keys.dim;
}

/*
 * Adds UNROLL rows of each part of the warp. Returns, in every lane that holds a row, whether it is
 * valid.
 */
template <typename FORM>
static __device__ __forceinline__ bool add_rows(float sum[FORM::CHUNKS][FORM::N],
                                                const uint4 v[FORM::UNROLL][FORM::CHUNKS]) {
        float squares[FORM::UNROLL] = {}, x[FORM::N], square, inverse;

#pragma unroll
        for (int u = 0; u < FORM::UNROLL; u++)
#pragma unroll
                for (int c = 0; c < FORM::CHUNKS; c++) {
                        vector<FORM::NUMBER>::wide(x, v[u][c]);
#pragma unroll
                        for (int i = 0; i < FORM::N; i++)
                                squares[u] = fmaf(x[i], x[i], squares[u]);
                }
        square = row_sums<FORM>(squares);
        inverse = is_valid(square) ? 1.0f / fmaxf(sqrtf(square), 1e-12f) : 0.0f;
#pragma unroll
        for (int u = 0; u < FORM::UNROLL; u++) {
                float scale = warp_from(inverse, lane_id() / FORM::LANES * FORM::LANES +
                                                         u * holders<FORM>::N);

#pragma unroll
                for (int c = 0; c < FORM::CHUNKS; c++) {
                        vector<FORM::NUMBER>::wide(x, v[u][c]);
#pragma unroll
                        for (int i = 0; i < FORM::N; i++)
                                sum[c][i] = scale > 0.0f ? fmaf(x[i], scale, sum[c][i]) : sum[c][i];
                }
        }
        return inverse > 0.0f;
}

template <typename FORM>
static __device__ __forceinline__ void store_part(float *to, float sum[FORM::CHUNKS][FORM::N],
                                                  uint32_t dim) {
        uint32_t within = lane_id() % FORM::LANES;

#pragma unroll
        for (int c = 0; c < FORM::CHUNKS; c++)
#pragma unroll
                for (int i = 0; i < FORM::N; i++) {
                        uint32_t d = (c * FORM::LANES + within) * FORM::N + i;

#pragma unroll
                        for (int mask = FORM::LANES; mask < 32; mask *= 2)
                                sum[c][i] += warp_xor(sum[c][i], mask);
                        if (lane_id() < FORM::LANES && d < dim)
                                to[d] = sum[c][i];
                }
}

/* Copies a row of dim floats to or from shared memory, transformed if keys are. */
static __device__ __forceinline__ void copy_turned(float *to, const float *from, float *shared,
                                                   const struct gpu_key_rows &k) {
        __syncwarp();
        for (uint32_t d = lane_id(); d < k.dim && from != shared; d += 32)
                shared[d] = from[d];
        if (is_quantised(k.number))
                turn_row(shared, k.dim);
        __syncwarp();
        for (uint32_t d = lane_id(); d < k.dim && to != shared; d += 32)
                to[d] = shared[d];
}

template <typename FORM>
static __device__ void sum_slice(const struct gpu_scores &a, const struct slice &s,
                                 float *shared = nullptr) {
        float sum[FORM::CHUNKS][FORM::N] = {};
        uint32_t count = 0, id = GPU_NO_BLOCK;

        for (struct range r = first_range(a, s, &id); r.t < s.to; r = next_range(a, s, r, &id)) {
                cu_address head = head_at<FORM::NUMBER>(a.keys, s.layer, s.head, r.id);

                for (uint32_t slot = r.from; slot < r.to && head;
                     slot += FORM::ROWS * FORM::UNROLL) {
                        uint4 v[FORM::UNROLL][FORM::CHUNKS];

                        load_rows<FORM>(v, a.keys, head, slot, r.to);
                        count += add_rows<FORM>(sum, v);
                }
        }
        store_part<FORM>(shared ? shared : part_at(a, s), sum, a.keys.dim);
        if constexpr (FORM::NUMBER == NUMBER_NARROW)
                copy_turned(part_at(a, s), shared, shared, a.keys);
        count = lane_id() % holders<FORM>::N == 0 ? count : 0;
        for (int mask = 16; mask; mask /= 2)
                count += warp_xor(count, mask);
        if (lane_id() == 0)
                part_counts(a)[((uint64_t)s.layer * a.keys.heads + s.head) * a.slices + s.number] =
                        count;
}

KVD_KERNEL(keydiff_parts, struct gpu_scores, THREADS) {
        struct slice s;

        if (slice_of(a, (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32, &s))
                EACH_FORM(a.keys, is_wide(a.keys), sum_slice, a, s);
}

KVD_KERNEL_ROOMY(keydiff_parts_narrow, struct gpu_scores, THREADS) {
        __shared__ float rows[WARPS][GPU_SCORE_DIM];
        struct slice s;

        if (slice_of(a, (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32, &s))
                sum_slice<narrow_form>(a, s, rows[threadIdx.x / 32]);
}

/*
 * Block x has 32 dimensions of a head. Each warp adds up every 16th slice, and the first warp adds
 * up the warps' sums.
 */
KVD_KERNEL(keydiff_sum, struct gpu_scores, SUM_THREADS) {
        __shared__ float sums[SUM_WARPS][32];
        __shared__ uint32_t counts[SUM_WARPS][32];
        uint32_t per_head = (a.keys.dim + 31) / 32, head = blockIdx.x / per_head,
                 warp = threadIdx.x / 32;
        uint32_t d = blockIdx.x % per_head * 32 + lane_id(), count = 0;
        const float *parts = reinterpret_cast<const float *>(a.scratch) +
                             (uint64_t)head * a.slices * a.keys.dim;
        float sum = 0.0f;

#pragma unroll 4
        for (uint32_t s = warp; s < a.slices; s += SUM_WARPS)
                sum += d < a.keys.dim ? parts[(uint64_t)s * a.keys.dim + d] : 0.0f;
        for (uint32_t s = threadIdx.x; s < a.slices; s += SUM_THREADS)
                count += part_counts(a)[(uint64_t)head * a.slices + s];
        sums[warp][lane_id()] = sum;
        counts[warp][lane_id()] = count;
        __syncthreads();
        if (warp == 0) {
                float *to = reinterpret_cast<float *>(a.sums) + (uint64_t)head * a.keys.dim;
                uint32_t *of_head = reinterpret_cast<uint32_t *>(a.counts) + head;

                for (int w = 1; w < SUM_WARPS; w++) {
                        sum += sums[w][lane_id()];
                        count += counts[w][lane_id()];
                }
                for (int mask = 16; mask; mask /= 2)
                        count += warp_xor(count, mask);
                if (d < a.keys.dim)
                        to[d] += sum;
                if (d == 0)
                        *of_head += count;
        }
}

/* ---- scores ---- */

template <typename FORM>
static __device__ __forceinline__ float score_rows(const float m[FORM::CHUNKS][FORM::N],
                                                   float length,
                                                   const uint4 v[FORM::UNROLL][FORM::CHUNKS]) {
        float squares[FORM::UNROLL] = {}, dots[FORM::UNROLL] = {}, square, dot;

#pragma unroll
        for (int u = 0; u < FORM::UNROLL; u++)
#pragma unroll
                for (int c = 0; c < FORM::CHUNKS; c++) {
                        float x[FORM::N];

                        vector<FORM::NUMBER>::wide(x, v[u][c]);
#pragma unroll
                        for (int i = 0; i < FORM::N; i++) {
                                squares[u] = fmaf(x[i], x[i], squares[u]);
                                dots[u] = fmaf(x[i], m[c][i], dots[u]);
                        }
                }
        square = row_sums<FORM>(squares);
        dot = row_sums<FORM>(dots);
        return is_valid(square) ? -dot / fmaxf(sqrtf(square) * length, 1e-8f) : -infinity();
}

template <typename FORM>
static __device__ __forceinline__ float load_anchor(float m[FORM::CHUNKS][FORM::N],
                                                    const float *from, uint32_t dim) {
        float squares = 0.0f;

#pragma unroll
        for (int c = 0; c < FORM::CHUNKS; c++)
#pragma unroll
                for (int i = 0; i < FORM::N; i++) {
                        uint32_t d = (c * FORM::LANES + lane_id() % FORM::LANES) * FORM::N + i;

                        m[c][i] = d < dim ? from[d] : 0.0f;
                        squares = fmaf(m[c][i], m[c][i], squares);
                }
        for (int mask = FORM::LANES / 2; mask; mask /= 2)
                squares += warp_xor(squares, mask);
        return sqrtf(squares);
}

template <typename FORM>
static __device__ void score_slice(const struct gpu_scores &a, const struct slice &s,
                                   float *shared = nullptr) {
        uint64_t row = (uint64_t)s.layer * a.keys.heads + s.head;
        float *scores = reinterpret_cast<float *>(a.scores) + row * a.stride,
              m[FORM::CHUNKS][FORM::N];
        const float *anchor = reinterpret_cast<const float *>(a.sums) + row * a.keys.dim;
        float length;
        uint32_t within = lane_id() % FORM::LANES, id = GPU_NO_BLOCK;
        uint32_t mine = within / holders<FORM>::N * FORM::ROWS + lane_id() / FORM::LANES;

        if constexpr (FORM::NUMBER == NUMBER_NARROW)
                copy_turned(shared, anchor, shared, a.keys);
        length = load_anchor<FORM>(m, shared ? shared : anchor, a.keys.dim);
        for (struct range r = first_range(a, s, &id); r.t < s.to; r = next_range(a, s, r, &id)) {
                cu_address head = head_at<FORM::NUMBER>(a.keys, s.layer, s.head, r.id);

                for (uint32_t slot = r.from; slot < r.to; slot += FORM::ROWS * FORM::UNROLL) {
                        uint4 v[FORM::UNROLL][FORM::CHUNKS];
                        float score;

                        load_rows<FORM>(v, a.keys, head, slot, r.to);
                        score = score_rows<FORM>(m, length, v);
                        if (within % holders<FORM>::N == 0 && slot + mine < r.to)
                                scores[r.t - a.from + slot - r.from + mine] = score;
                }
        }
}

KVD_KERNEL(keydiff_score, struct gpu_scores, THREADS) {
        uint64_t warps = (uint64_t)a.slices * a.keys.heads * a.keys.layers;
        uint64_t warp = (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32;
        struct slice s;

        if (warp < warps && slice_of(a, warps - 1 - warp, &s))
                EACH_FORM(a.keys, is_wide(a.keys), score_slice, a, s);
}

KVD_KERNEL_ROOMY(keydiff_score_narrow, struct gpu_scores, THREADS) {
        __shared__ float rows[WARPS][GPU_SCORE_DIM];
        uint64_t warps = (uint64_t)a.slices * a.keys.heads * a.keys.layers;
        uint64_t warp = (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32;
        struct slice s;

        if (warp < warps && slice_of(a, warps - 1 - warp, &s))
                score_slice<narrow_form>(a, s, rows[threadIdx.x / 32]);
}

/* ---- scores of blocks, from scores of tokens -------------------------------------------------- */

/* One warp per block: width lanes look through a head's tokens, and 32 / width heads at once. */
KVD_KERNEL(keydiff_blocks, struct gpu_block_scores, THREADS) {
        uint32_t blocks = (a.n + a.per_block - 1) / a.per_block,
                 b = blockIdx.x * WARPS + threadIdx.x / 32;
        uint32_t from = b * a.per_block, to = a.n - from < a.per_block ? a.n : from + a.per_block;
        uint32_t width = 32, valid = 0;
        const float *scores = reinterpret_cast<const float *>(a.scores);
        float *best = reinterpret_cast<float *>(a.best), sum = 0.0f;

        while (width > 1 && width / 2 >= a.per_block)
                width /= 2;
        for (uint32_t h = 0; h < a.heads && b < blocks; h += 32 / width) {
                uint32_t mine = h + lane_id() / width;
                float largest = -infinity();

                if (mine < a.heads)
                        for (uint32_t t = from + lane_id() % width; t < to; t += width)
                                largest = greater(scores[mine * a.stride + t], largest);
                for (uint32_t mask = width / 2; mask; mask /= 2)
                        largest = greater(warp_xor(largest, mask), largest);
                if (mine < a.heads && lane_id() % width == 0)
                        best[(uint64_t)mine * blocks + b] = largest;
                for (uint32_t i = 0; i < 32 / width; i++) {
                        float of_head = warp_from(largest, i * width);

                        valid += of_head > -infinity();
                        sum += of_head > -infinity() ? of_head : 0.0f;
                }
        }
        if (b < blocks && lane_id() == 0)
                reinterpret_cast<float *>(a.mean)[b] = valid ? sum / (float)valid : -infinity();
}
