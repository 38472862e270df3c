/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A block of threads takes one layer of a block. All threads sum up its planes; then each warp
 * takes one head after the other, brings 16 keys at a time to shared memory, and does there what
 * the reference does with them, in its order.
 */

#include "kernels/cuda/squares.cuh"
#include "kernels/cuda/summarise.h"

#define THREADS 256
#define WARPS (THREADS / 32)
#define TILE 16
#define DIMS (256 / 32) /* that a lane has */

enum { ORDER_HND = 1 };

struct layer {
        const uint8_t *keys; /* its K plane, behind which the V plane is */
        uint8_t *row;
        uint32_t number, tokens; /* which, and how many are written */
        bool wide;
};

static __device__ __forceinline__ uint64_t element_of(const struct gpu_memshare_shape &s,
                                                      uint32_t head, uint32_t token) {
        return (s.order == ORDER_HND ? (uint64_t)head * s.tokens + token :
                                       (uint64_t)token * s.heads + head) *
               s.dim;
}

/* ---- norms ----------------------------------------------------------------------------------- */

static __device__ __forceinline__ bool is_written(const struct gpu_memshare_shape &s, uint64_t i,
                                                  uint32_t tokens) {
        uint64_t row = i / s.dim;

        return i < (uint64_t)s.heads * s.tokens * s.dim &&
               (s.order == ORDER_HND ? row % s.tokens : row / s.heads) < tokens;
}

/* A chunk in which tokens that were not written are zeros. */
template <int NUMBER>
static __device__ __forceinline__ float partial_chunk(const struct gpu_memshare_shape &s,
                                                      const uint8_t *plane, uint64_t first,
                                                      uint32_t tokens, uint32_t lane) {
        const typename element<NUMBER>::type *x =
                reinterpret_cast<const typename element<NUMBER>::type *>(plane);
        const int N = vector<NUMBER>::N;
        float sum[N] = {};

#pragma unroll 1
        for (uint64_t i = first + lane * N; i < first + CHUNK; i += 64)
#pragma unroll
                for (int k = 0; k < N; k++) {
                        float v = is_written(s, i + k, tokens) ? element<NUMBER>::wide(x[i + k]) :
                                                                 0.0f;

                        sum[k] = fmaf(v, v, sum[k]);
                }
        return sum_of_64<NUMBER>(sum);
}

/* to[plane][chunk], as sum_chunks does it for whole planes. */
static __device__ __forceinline__ void sum_partial(float *to, uint32_t chunks,
                                                   const struct gpu_memshare_shape &s,
                                                   const struct layer &l) {
        uint32_t group = group_lanes<FLAT>(s.number), lane = lane_id() % group;
        uint64_t elements = (uint64_t)s.heads * s.tokens * s.dim;

#pragma unroll 1
        for (uint32_t first = threadIdx.x / 32 * (32 / group); first < 2 * chunks;
             first += THREADS / group) {
                uint32_t job = first + lane_id() / group;
                uint64_t at = job < 2 * chunks ? (uint64_t)(job % chunks) * CHUNK : elements;
                const uint8_t *plane =
                        l.keys +
                        (job / chunks == 1 ? elements * (s.number == NUMBER_F32 ? 4 : 2) : 0);
                float sum = s.number == NUMBER_F32 ?
                                    partial_chunk<NUMBER_F32>(s, plane, at, l.tokens, lane) :
                            s.number == NUMBER_F16 ?
                                    partial_chunk<NUMBER_F16>(s, plane, at, l.tokens, lane) :
                                    partial_chunk<NUMBER_BF16>(s, plane, at, l.tokens, lane);

                if (lane == 0 && job < 2 * chunks)
                        to[job] = sum;
        }
}

static __device__ __forceinline__ void put_norms(const struct gpu_summarise &a,
                                                 const struct layer &l, float *sums) {
        uint32_t rows = a.shape.heads * a.shape.tokens, v = threadIdx.x;
        const struct squares_of q = squares_of_one(l.keys, rows, a.shape.dim);
        uint32_t chunks = chunks_of<FLAT>(q);
        double total = 0.0;

        if (l.wide && l.tokens == a.shape.tokens)
                sum_chunks<true, FLAT, false>(sums, chunks, q, a.shape.number, 2, THREADS,
                                              [](uint32_t i) { return (uint64_t)i; });
        else
                sum_partial(sums, chunks, a.shape, l);
        __syncthreads();
        for (uint32_t i = 0; i < chunks && v < 2; i++)
                total += (double)sums[v * chunks + i];
        if (v < 2)
                reinterpret_cast<float *>(l.row +
                                          a.norms_off)[2 * l.number + v] = (float)sqrt(total);
}

/* ---- keys of a tile -------------------------------------------------------------------------- */

template <int NUMBER>
static __device__ __forceinline__ float number_at(const uint8_t *row, uint32_t d) {
        return element<NUMBER>::wide(
                reinterpret_cast<const typename element<NUMBER>::type *>(row)[d]);
}

/* Rows behind the last one hold rubbish. */
template <int NUMBER>
static __device__ __forceinline__ void load_tile(uint8_t *tile, uint32_t stride,
                                                 const struct gpu_memshare_shape &s,
                                                 const struct layer &l, uint32_t head,
                                                 uint32_t first, uint32_t n) {
        const int N = vector<NUMBER>::N;
        uint32_t pieces = (s.dim + N - 1) / N;

        for (uint32_t i = lane_id(); i < n * pieces; i += 32) {
                uint32_t t = i / pieces, d = i % pieces * N;
                const uint8_t *from = l.keys + size_of<NUMBER>(element_of(s, head, first + t));
                uint8_t *to = tile + t * stride + size_of<NUMBER>(d);

                if (l.wide)
                        copy_16(to, from + size_of<NUMBER>(d));
                else
                        *reinterpret_cast<uint4 *>(to) = load_some<NUMBER>(from, d, s.dim);
        }
        copy_commit();
        copy_wait<0>();
        __syncwarp();
}

/* The sum of a row's squares in the order of kernels/keydiff.c; 16 lanes a row. */
template <int NUMBER>
static __device__ __forceinline__ float row_squares(const uint8_t *row, uint32_t dim) {
        uint32_t j = lane_id() % 16, d = 0, even = NUMBER == NUMBER_BF16 ? 2 * j : j;
        uint32_t odd = NUMBER == NUMBER_BF16 ? 2 * j + 1 : j + 16;
        float a = 0.0f, b = 0.0f, x;

        for (; d + 32 <= dim; d += 32) {
                x = number_at<NUMBER>(row, d + even);
                a = fmaf(x, x, a);
                x = number_at<NUMBER>(row, d + odd);
                b = fmaf(x, x, b);
        }
        if (d + 16 <= dim) {
                x = number_at<NUMBER>(row, d + j);
                a = fmaf(x, x, a);
                d += 16;
        }
        x = d + j < dim ? number_at<NUMBER>(row, d + j) : 0.0f;
        b = fmaf(x, x, b);
        a += b;
        for (int mask = 8; mask; mask /= 2)
                a += warp_xor(a, mask);
        return a;
}

/* Adds directions to a lane's dimensions, one token after the other. */
template <int NUMBER>
static __device__ __forceinline__ void add_directions(float sum[DIMS], const uint8_t *tile,
                                                      uint32_t stride, uint32_t dim, uint32_t n) {
        float inverse = 0.0f; /* of token lane; 0 without a direction */

        for (uint32_t t = 0; t < n; t += 2) {
                uint32_t mine = t + lane_id() / 16;
                float squares = row_squares<NUMBER>(tile + (mine < n ? mine : t) * stride, dim);
                float found = squares > 0.0f && squares < infinity() ?
                                      1.0f / fmaxf(sqrtf(squares), 1e-12f) :
                                      0.0f;
                float of_lane = warp_from(found, lane_id() % 2 * 16);

                inverse = lane_id() / 2 == t / 2 ? of_lane : inverse;
        }
#pragma unroll 2
        for (uint32_t t = 0; t < n; t++) {
                float scale = warp_from(inverse, (int)t);

#pragma unroll
                for (uint32_t i = 0; i < DIMS; i++) {
                        uint32_t d = 32 * i + lane_id();

                        if (scale > 0.0f && d < dim)
                                sum[i] = fmaf(number_at<NUMBER>(tile + t * stride, d), scale,
                                              sum[i]);
                }
        }
}

/* ---- labels: kernels/hshare_label.c ---------------------------------------------------------- */

static __device__ __forceinline__ float through_f16(float x) {
        return f16_to_float(float_to_f16(x)) + 0.0f;
}

static __device__ __forceinline__ uint32_t code_of(float x, float least, float step, bool finite) {
        float code = rintf((x - least) / step);

        return finite ? (uint32_t)greater(lesser(code, 15.0f), 0.0f) : 0;
}

/* Two lanes a token, every other pair of channels each. */
template <int NUMBER>
static __device__ __forceinline__ void put_label(uint8_t *label, const uint8_t *row,
                                                 const uint16_t *channels, uint32_t n,
                                                 bool stores) {
        float least = infinity(), most = -infinity(), step;
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
        for (uint32_t j = half; j < bytes && stores; j += 2) {
                uint32_t low = code_of(number_at<NUMBER>(row, channels[2 * j]), least, step,
                                       finite),
                         high = 0;

                if (2 * j + 1 < n)
                        high = code_of(number_at<NUMBER>(row, channels[2 * j + 1]), least, step,
                                       finite);
                label[j] = (uint8_t)(low | high << 4);
        }
        if (stores) {
                uint16_t end = float_to_f16(half ? step : least);

                label[bytes + 2 * half] = (uint8_t)end;
                label[bytes + 2 * half + 1] = (uint8_t)(end >> 8);
        }
}

template <int NUMBER>
static __device__ __forceinline__ void put_head(const struct gpu_summarise &a,
                                                const struct layer &l, uint32_t head, uint8_t *tile,
                                                uint32_t stride) {
        uint64_t at = (uint64_t)l.number * a.shape.heads + head,
                 label_bytes = (a.n_channels + 1) / 2 + 4;
        const uint16_t *channels = reinterpret_cast<const uint16_t *>(a.channels) +
                                   at * a.n_channels;
        float *anchor = reinterpret_cast<float *>(l.row + a.anchors_off) + at * a.shape.dim,
              sum[DIMS] = {};
        uint8_t *labels = l.row + a.labels_off + at * a.shape.tokens * label_bytes;

#pragma unroll 1
        for (uint32_t first = 0; first < l.tokens; first += TILE) {
                uint32_t n = l.tokens - first < TILE ? l.tokens - first : TILE, t = lane_id() / 2;

                load_tile<NUMBER>(tile, stride, a.shape, l, head, first, n);
                add_directions<NUMBER>(sum, tile, stride, a.shape.dim, n);
                put_label<NUMBER>(labels + (first + t) * label_bytes,
                                  tile + (t < n ? t : 0) * stride, channels, a.n_channels, t < n);
                __syncwarp();
        }
        for (uint64_t i = l.tokens * label_bytes + lane_id(); i < a.shape.tokens * label_bytes;
             i += 32)
                labels[i] = 0;
#pragma unroll
        for (uint32_t i = 0; i < DIMS; i++)
                if (32 * i + lane_id() < a.shape.dim)
                        anchor[32 * i + lane_id()] = sum[i];
}

/* ---- a layer of a block ---------------------------------------------------------------------- */

KVD_KERNEL(summarise, struct gpu_summarise, THREADS) {
        KVD_SHARED(uint8_t, shared);
        const struct gpu_memshare_shape &s = a.shape;
        uint32_t i = blockIdx.x / s.layers, layer = blockIdx.x % s.layers,
                 size = s.number == NUMBER_F32 ? 4 : 2;
        uint32_t id = reinterpret_cast<const uint32_t *>(a.blocks.ids)[i],
                 stride = (s.dim * size + 15) / 16 * 16 + 16;
        uint64_t plane = (uint64_t)s.heads * s.tokens * s.dim, chunks = (plane + CHUNK - 1) / CHUNK;
        uint8_t *tile = shared + (2 * chunks * sizeof(float) + 15) / 16 * 16 +
                        threadIdx.x / 32 * (TILE * stride);
        uint32_t tokens = a.tokens ? reinterpret_cast<const uint32_t *>(a.tokens)[i] : s.tokens;
        struct layer l = {
                reinterpret_cast<const uint8_t *>(a.blocks.base + id * a.blocks.block_bytes +
                                                  a.offset + 2 * layer * plane * size),
                reinterpret_cast<uint8_t *>(a.rows + i * a.row_bytes), layer,
                tokens < s.tokens ? tokens : s.tokens,
                (a.blocks.base | a.blocks.block_bytes | a.offset | s.dim * size) % 16 == 0};

        if (id != GPU_NO_BLOCK)
                put_norms(a, l, reinterpret_cast<float *>(shared));
#pragma unroll 1
        for (uint32_t head = threadIdx.x / 32; head < s.heads && id != GPU_NO_BLOCK; head += WARPS)
                if (s.number == NUMBER_F32)
                        put_head<NUMBER_F32>(a, l, head, tile, stride);
                else if (s.number == NUMBER_F16)
                        put_head<NUMBER_F16>(a, l, head, tile, stride);
                else
                        put_head<NUMBER_BF16>(a, l, head, tile, stride);
}
