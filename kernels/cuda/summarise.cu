/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A thread block takes one layer of a block. All threads sum up its planes. Then each warp takes
 * one head after the other, loads 16 keys at a time into shared memory, and processes them there in
 * the order of the reference.
 *
 * Numbers of less than 16 bits have a kernel of their own, which loads keys as floats, and
 * transforms quantised ones before it makes labels, as well as sums of their directions.
 */

#include "kernels/cuda/summarise_norms.cuh"

#define WARPS (THREADS / 32)
#define TILE 16
#define EACH (TILE / 2)  /* keys of a tile per half warp */
#define PAIRS (256 / 64) /* pairs of dimensions per lane */

/* ---- keys of a tile -------------------------------------------------------------------------- */

template <int NUMBER>
static __device__ __forceinline__ float number_at(const uint8_t *row, uint32_t d) {
        return element<NUMBER>::wide(
                reinterpret_cast<const typename element<NUMBER>::type *>(row)[d]);
}

template <int NUMBER>
static __device__ __forceinline__ uint4 load_piece(const struct gpu_block_shape &s,
                                                   const uint8_t *row, uint32_t i) {
        if constexpr (NUMBER == NUMBER_NARROW)
                return load_narrow(row, i, s.dim, s.dim, s.number);
        else
                return load_some<NUMBER>(row, i, s.dim);
}

/* Loads n rows; rows beyond them contain garbage. */
template <int NUMBER>
static __device__ __forceinline__ void load_tile(uint8_t *tile, uint32_t stride,
                                                 const struct gpu_block_shape &s,
                                                 const struct layer &l, uint32_t head,
                                                 uint32_t first, uint32_t n) {
        const int N = vector<NUMBER>::N;
        const uint8_t *keys = l.keys + row_of(s, head, first) * row_bytes<NUMBER>(s);
        uint32_t pieces = (s.dim + N - 1) / N, t = lane_id() / pieces, i = lane_id() % pieces;
        uint32_t row = row_bytes<NUMBER>(s) * (s.order == ORDER_HND ? 1 : s.heads);

        for (uint32_t rows = 32 / pieces, more = 32 % pieces; t < n; t += rows, i += more) {
                if (i >= pieces) {
                        i -= pieces;
                        t++;
                }
                if (t < n && l.wide)
                        copy_16(tile + t * stride + 16 * i, keys + (uint64_t)t * row + 16 * i);
                else if (t < n)
                        *reinterpret_cast<uint4 *>(tile + t * stride + 16 * i) = load_piece<NUMBER>(
                                s, keys + (uint64_t)t * row, i * N);
        }
        copy_commit();
        copy_wait<0>();
        __syncwarp();
}

/* Elements d and d + 1 of a row; d is even. */
template <int NUMBER>
static __device__ __forceinline__ float2 pair_at(const uint8_t *row, uint32_t d) {
        uint32_t both;

        if (vector<NUMBER>::N == 4)
                return *reinterpret_cast<const float2 *>(row + 4 * d);
        both = *reinterpret_cast<const uint32_t *>(row + 2 * d);
        return make_float2(element<NUMBER>::wide((uint16_t)both),
                           element<NUMBER>::wide((uint16_t)(both >> 16)));
}

/*
 * Computes lane j (of 16) of the rows' sums of squares, in the order of the processor, for EACH
 * rows per half warp.
 */
template <int NUMBER>
static __device__ __forceinline__ void squares_of_lane(float a[EACH], const uint8_t *tile,
                                                       uint32_t stride, uint32_t dim,
                                                       uint32_t number) {
        /* as lanes_splits of kernels/lanes.h */
        bool splits = NUMBER == NUMBER_BF16 || (NUMBER == NUMBER_NARROW && number == NUMBER_Q4);
        const uint8_t *rows = tile + lane_id() / 16 * EACH * stride;
        uint32_t j = lane_id() % 16, d = 0;
        float b[EACH] = {}, x;

        for (; d + 32 <= dim; d += 32)
#pragma unroll
                for (uint32_t k = 0; k < EACH; k++) {
                        const uint8_t *row = rows + k * stride;
                        float2 y = splits ?
                                           pair_at<NUMBER>(row, d + 2 * j) :
                                           make_float2(number_at<NUMBER>(row, d + j),
                                                       number_at<NUMBER>(row, d + j + 16));

                        a[k] = fmaf(y.x, y.x, a[k]);
                        b[k] = fmaf(y.y, y.y, b[k]);
                }
#pragma unroll
        for (uint32_t k = 0; k < EACH && d < dim; k++) {
                uint32_t more = d + 16 <= dim ? 16 : 0;

                x = more ? number_at<NUMBER>(rows + k * stride, d + j) : 0.0f;
                a[k] = more ? fmaf(x, x, a[k]) : a[k];
                x = d + more + j < dim ? number_at<NUMBER>(rows + k * stride, d + more + j) : 0.0f;
                b[k] = fmaf(x, x, b[k]);
        }
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++)
                a[k] += b[k];
}

/*
 * The factor that turns key lane / 2 of a tile into a direction, or 0 if it is not valid. In every
 * step, half of the remaining sums move to another lane, so that all roots are taken at once.
 */
template <int NUMBER>
static __device__ __forceinline__ float inverse_length(const uint8_t *tile, uint32_t stride,
                                                       uint32_t dim, uint32_t number) {
        float x[EACH] = {};

        squares_of_lane<NUMBER>(x, tile, stride, dim, number);
#pragma unroll
        for (uint32_t half = EACH / 2; half; half /= 2)
#pragma unroll
                for (uint32_t i = 0; i < half; i++) {
                        bool upper = lane_id() & 2 * half;
                        float gone = warp_xor(upper ? x[i] : x[i + half], (int)(2 * half));

                        x[i] = (upper ? x[i + half] : x[i]) + gone;
                }
        x[0] += warp_xor(x[0], 1);
        return x[0] > 0.0f && x[0] < infinity() ? 1.0f / fmaxf(sqrtf(x[0]), 1e-12f) : 0.0f;
}

/* Adds directions to a lane's dimensions, 2 lane and 2 lane + 1 of each 64, token by token. */
template <int NUMBER>
static __device__ __forceinline__ void add_directions(float2 sum[PAIRS], const uint8_t *tile,
                                                      uint32_t stride,
                                                      const struct gpu_block_shape &s, uint32_t n) {
        uint32_t dim = s.dim;
        float inverse = inverse_length<NUMBER>(tile, stride, dim, s.number);

#pragma unroll 2
        for (uint32_t t = 0; t < n; t++) {
                float scale = warp_from(inverse, (int)(2 * t));

                if (!(scale > 0.0f))
                        continue;
#pragma unroll
                for (uint32_t i = 0; i < PAIRS && 64 * i < dim; i++)
                        if (64 * i + 2 * lane_id() < dim) {
                                float2 x = pair_at<NUMBER>(tile + t * stride,
                                                           64 * i + 2 * lane_id());

                                sum[i].x = fmaf(x.x, scale, sum[i].x);
                                sum[i].y = fmaf(x.y, scale, sum[i].y);
                        }
        }
}

/* ---- labels, with the bits of the processor -------------------------------------------------- */

static __device__ __forceinline__ float through_f16(float x) {
        return f16_to_float(float_to_f16(x)) + 0.0f;
}

/*
 * (x - least) / step, rounded, clamped to 0..15. The quotient via 1 / step, corrected by its
 * remainder, equals that of a division: step has 11 bits, so no quotient is too close to a rounding
 * boundary. The unit in the last place of the number added is 1, and the number is even, so the
 * addition rounds ties to even.
 */
static __device__ __forceinline__ uint32_t code_of(float x, float least, float step, float inverse,
                                                   bool finite) {
        float y = fminf(fmaxf(x - least, 0.0f), 16.0f * step), code = y * inverse;

        code = fmaf(fmaf(-code, step, y), inverse, code);
        return finite ? min(__float_as_uint(code + 12582912.0f) & 31, 15u) : 0;
}

/* Two lanes per token; each takes every other pair of channels. */
template <int NUMBER>
static __device__ __forceinline__ void put_label(uint8_t *label, const uint8_t *row,
                                                 const uint16_t *channels, uint32_t n,
                                                 bool stores) {
        float least = infinity(), most = -infinity(), step, inverse;
        uint32_t half = lane_id() % 2, bytes = (n + 1) / 2;
        bool finite = true;

        for (uint32_t i = half; i < n; i += 2) {
                float x = number_at<NUMBER>(row, channels[i]);

                finite = finite && x - x == 0.0f;
                least = fminf(least, x);
                most = fmaxf(most, x);
        }
        finite = warp_xor((int)finite, 1) && finite;
        least = fmaxf(fminf(least, warp_xor(least, 1)), -65504.0f);
        most = fminf(fmaxf(most, warp_xor(most, 1)), 65504.0f);
        step = through_f16((most - least) / 15.0f);
        least = finite ? through_f16(least) : 0.0f;
        step = finite && step > 0.0f ? step : 1.0f;
        inverse = 1.0f / step;
        for (uint32_t j = half; j < bytes && stores; j += 2) {
                uint32_t low = code_of(number_at<NUMBER>(row, channels[2 * j]), least, step,
                                       inverse, finite),
                         high = 0;

                if (2 * j + 1 < n)
                        high = code_of(number_at<NUMBER>(row, channels[2 * j + 1]), least, step,
                                       inverse, finite);
                label[j] = (uint8_t)(low | high << 4);
        }
        if (stores) {
                uint16_t end = float_to_f16(half ? step : least);

                label[bytes + 2 * half] = (uint8_t)end;
                label[bytes + 2 * half + 1] = (uint8_t)(end >> 8);
        }
}

/* ---- a head ---------------------------------------------------------------------------------- */

/* Transforms rows of floats, if keys are. */
static __device__ __forceinline__ void turn_rows(uint8_t *rows, uint32_t stride,
                                                 const struct gpu_block_shape &s, uint32_t n) {
        for (uint32_t t = 0; t < n && is_quantised(s.number); t++)
                turn_row(reinterpret_cast<float *>(rows + t * stride), s.dim);
}

static __device__ __forceinline__ void put_sum(float *to, const float2 sum[PAIRS], uint32_t dim) {
#pragma unroll
        for (uint32_t i = 0; i < PAIRS; i++) {
                uint32_t d = 64 * i + 2 * lane_id();

                if (d < dim)
                        to[d] = sum[i].x;
                if (d + 1 < dim)
                        to[d + 1] = sum[i].y;
        }
}

/* The same through shared memory, transformed if keys are; -0 becomes 0. */
static __device__ __forceinline__ void put_turned_sum(float *to, const float2 sum[PAIRS],
                                                      uint8_t *tile,
                                                      const struct gpu_block_shape &s) {
        float *row = reinterpret_cast<float *>(tile);

        put_sum(row, sum, s.dim);
        turn_rows(tile, 0, s, 1);
        __syncwarp();
        for (uint32_t d = lane_id(); d < s.dim; d += 32)
                to[d] = row[d] + 0.0f;
        __syncwarp();
}

template <int NUMBER>
static __device__ __forceinline__ void put_head(const struct gpu_summarise &a,
                                                const struct layer &l, uint32_t head, uint8_t *tile,
                                                uint32_t stride) {
        uint64_t at = (uint64_t)l.number * a.shape.heads + head,
                 label_bytes = (a.n_channels + 1) / 2 + 4;
        const uint16_t *channels = reinterpret_cast<const uint16_t *>(a.channels) +
                                   at * a.n_channels;
        float *anchor = reinterpret_cast<float *>(l.row + a.anchors_off) + at * a.shape.dim;
        float2 sum[PAIRS] = {};
        uint8_t *labels = l.row + a.labels_off + at * a.shape.tokens * label_bytes;

#pragma unroll 1
        for (uint32_t first = 0; first < l.tokens; first += TILE) {
                uint32_t n = l.tokens - first < TILE ? l.tokens - first : TILE, t = lane_id() / 2;

                load_tile<NUMBER>(tile, stride, a.shape, l, head, first, n);
                add_directions<NUMBER>(sum, tile, stride, a.shape, n);
                if (NUMBER == NUMBER_NARROW)
                        turn_rows(tile, stride, a.shape, n);
                put_label<NUMBER>(labels + (first + t) * label_bytes,
                                  tile + (t < n ? t : 0) * stride, channels, a.n_channels, t < n);
                __syncwarp();
        }
        for (uint64_t i = l.tokens * label_bytes + lane_id(); i < a.shape.tokens * label_bytes;
             i += 32)
                labels[i] = 0;
        if (NUMBER == NUMBER_NARROW)
                put_turned_sum(anchor, sum, tile, a.shape);
        else
                put_sum(anchor, sum, a.shape.dim);
}

/* ---- a layer of a block ---------------------------------------------------------------------- */

template <bool NARROW>
static __device__ __forceinline__ void summarise(const struct gpu_summarise &a, uint8_t *shared) {
        const struct gpu_block_shape &s = a.shape;
        uint32_t i = blockIdx.x / s.layers, layer = blockIdx.x % s.layers,
                 size = NARROW || s.number == NUMBER_F32 ? 4 : 2;
        uint32_t id = reinterpret_cast<const uint32_t *>(a.blocks.ids)[i],
                 stride = (s.dim * size + 15) / 16 * 16 + 16;
        uint64_t rows = (uint64_t)s.heads * s.tokens,
                 plane = rows * (NARROW ? row_bytes<NUMBER_NARROW>(s) : s.dim * size),
                 chunks = NARROW ? narrow_chunks(s) : (rows * s.dim + CHUNK - 1) / CHUNK;
        uint8_t *tile = shared + (2 * chunks * sizeof(float) + 15) / 16 * 16 +
                        threadIdx.x / 32 * (TILE * stride);
        uint32_t tokens = a.tokens ? reinterpret_cast<const uint32_t *>(a.tokens)[i] : s.tokens;
        struct layer l = {
                reinterpret_cast<const uint8_t *>(a.blocks.base + id * a.blocks.block_bytes +
                                                  a.offset + 2 * layer * plane),
                reinterpret_cast<uint8_t *>(a.rows + i * a.row_bytes), layer,
                tokens < s.tokens ? tokens : s.tokens,
                !NARROW &&
                        (a.blocks.base | a.blocks.block_bytes | a.offset | s.dim * size) % 16 == 0};

        if (id != GPU_NO_BLOCK)
                put_norms<NARROW>(a, l, reinterpret_cast<float *>(shared));
#pragma unroll 1
        for (uint32_t head = threadIdx.x / 32; head < s.heads && id != GPU_NO_BLOCK; head += WARPS)
                if (NARROW)
                        put_head<NUMBER_NARROW>(a, l, head, tile, stride);
                else if (s.number == NUMBER_F32)
                        put_head<NUMBER_F32>(a, l, head, tile, stride);
                else if (s.number == NUMBER_F16)
                        put_head<NUMBER_F16>(a, l, head, tile, stride);
                else
                        put_head<NUMBER_BF16>(a, l, head, tile, stride);
}

KVD_KERNEL(summarise, struct gpu_summarise, THREADS) {
        KVD_SHARED(uint8_t, shared);

        summarise<false>(a, shared);
}

KVD_KERNEL(summarise_narrow, struct gpu_summarise, THREADS) {
        KVD_SHARED(uint8_t, shared);

        summarise<true>(a, shared);
}
