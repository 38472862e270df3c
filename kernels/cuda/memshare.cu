/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A thread block takes one pair after the other, and together layers of a pair at a time: all
 * threads sum up chunks, then the first warp adds these up in fp64 and checks the limit, while the
 * others already work on the next layers. So an abandoned pair costs one step more than necessary,
 * and the other warps do not wait for the sums.
 */

#include "kernels/cuda/expanded.cuh"
#include "kernels/cuda/memshare.h"

#define THREADS 256
#define WARPS (THREADS / 32)

/*
 * What rounding may have added to a bound, as a fraction of both norms; as in kernels/memshare.c.
 */
#define SLACK 2e-5

enum { FRO_NORM = 1, MEAN_L2 = 2, RELATIVE = 3 };

static __device__ __forceinline__ double positive_infinity() {
        return (double)infinity();
}

static __device__ __forceinline__ const uint8_t *block_at(const struct gpu_blocks &b,
                                                          uint64_t offset, uint32_t index) {
        uint32_t id = reinterpret_cast<const uint32_t *>(b.ids)[index];

        return id == GPU_NO_BLOCK ?
                       nullptr :
                       reinterpret_cast<const uint8_t *>(b.base + id * b.block_bytes + offset);
}

/* ---- a pair ---------------------------------------------------------------------------------- */

struct pair {
        const uint8_t *x, *y;
        const float *norm_a, *norm_b; /* or NULL */
        const float *cosine, *sine;
};

static __device__ __forceinline__ const float *kept(cu_address all, uint32_t index,
                                                    uint64_t of_each) {
        return all ? reinterpret_cast<const float *>(all) + index * of_each : nullptr;
}

static __device__ __forceinline__ struct pair pair_of(const struct gpu_distances &a, uint32_t i) {
        struct gpu_distance_pair p = reinterpret_cast<const struct gpu_distance_pair *>(a.pairs)[i];
        uint64_t norms = 2 * a.shape.layers;
        const float *angles = a.half ? kept(a.angles, p.angle, 2 * a.half) : nullptr;

        return {block_at(a.blocks, a.offset, p.a),
                block_at(a.blocks, a.offset, p.b),
                kept(a.norms, p.a, norms),
                kept(a.norms, p.b, norms),
                angles,
                angles + a.half};
}

static __device__ __forceinline__ struct squares_of compared(const struct gpu_distances &a,
                                                             const struct pair &p) {
        uint32_t dim = a.shape.dim, rows = a.shape.heads * a.shape.tokens;
        bool norms = a.metric == MEAN_L2;

        return {p.x, p.y, (uint64_t)rows * dim, rows, dim, p.cosine, p.sine, a.half,
                norms || dim >= CHUNK ? 1 : CHUNK / dim, norms};
}

static __device__ __forceinline__ bool is_turned(const struct gpu_distances &a, uint32_t value) {
        return a.half > 0 && value == 0;
}

/*
 * A plane of numbers of less than 16 bits. The first angle is the distance of the positions. If it is
 * 0, keys are compared as they are stored, which has the bits of the reference without a rotation.
 */
static __device__ __forceinline__ struct squares_of narrow_plane(const struct gpu_distances &a,
                                                                 const struct squares_of &q,
                                                                 uint32_t value) {
        struct squares_of plane = q;

        if (!is_turned(a, value) || q.sine[0] == 0.0f)
                plane.half = 0;
        return plane;
}

/* Number of chunks of a K plane or of a V plane. */
template <bool PLAIN, bool NARROW>
static __device__ __forceinline__ uint32_t chunks_in(const struct gpu_distances &a,
                                                     const struct squares_of &q, uint32_t value) {
        if (NARROW)
                return expanded_chunks(narrow_plane(a, q, value), a.shape.number);
        if (!PLAIN && is_turned(a, value))
                return chunks_of<TURNED>(q);
        return !PLAIN && q.norms ? chunks_of<ROWS>(q) : chunks_of<FLAT>(q);
}

/* Computes sums[plane of the step][chunk] of layers first to first + n - 1. */
template <bool WIDE, bool PLAIN>
static __device__ __forceinline__ void sum_layers(float *sums, uint32_t stride,
                                                  const struct gpu_distances &a,
                                                  const struct squares_of &q, uint32_t first,
                                                  uint32_t n) {
        uint32_t number = a.shape.number;
        auto plane = [first](uint32_t i) { return 2 * (uint64_t)(first + i / 2) + i % 2; };
        auto keys = [&plane](uint32_t i) { return plane(2 * i); };
        auto values = [&plane](uint32_t i) { return plane(2 * i + 1); };

        if (PLAIN) {
                sum_chunks<WIDE, FLAT, true>(sums, stride, q, number, 2 * n, THREADS, plane);
        } else if (a.half == 0 && (WIDE || q.norms)) { /* WIDE without norms is PLAIN */
                sum_chunks<WIDE, ROWS, true>(sums, stride, q, number, 2 * n, THREADS, plane);
        } else if (a.half == 0) {
                sum_chunks<WIDE, FLAT, true>(sums, stride, q, number, 2 * n, THREADS, plane);
        } else {
                sum_chunks<WIDE, TURNED, true>(sums, 2 * stride, q, number, n, THREADS, keys);
                if (q.norms)
                        sum_chunks<WIDE, ROWS, true>(sums + stride, 2 * stride, q, number, n,
                                                     THREADS, values);
                else
                        sum_chunks<WIDE, FLAT, true>(sums + stride, 2 * stride, q, number, n,
                                                     THREADS, values);
        }
}

/* The same, of numbers of less than 16 bits; room: the warp's. */
static __device__ __forceinline__ void sum_narrow(float *sums, uint32_t stride,
                                                  const struct gpu_distances &a,
                                                  const struct squares_of &q, uint32_t first,
                                                  uint32_t n, float *room) {
        uint64_t plane_bytes = (uint64_t)q.rows * narrow_bytes(q.dim, a.shape.number);

#pragma unroll 1
        for (uint32_t job = threadIdx.x / 32; job < 2 * n * stride; job += WARPS) {
                uint32_t i = job / stride, chunk = job % stride;
                uint64_t at = (2 * (uint64_t)first + i) * plane_bytes;
                const struct squares_of plane = narrow_plane(a, q, i % 2);
                float sum;

                if (chunk >= expanded_chunks(plane, a.shape.number))
                        continue;
                sum = expanded_chunk(plane, q.x + at, q.y + at, a.shape.number, chunk, room);
                if (lane_id() == 0)
                        sums[job] = q.norms ? sqrtf(sum) : sum;
        }
}

static __device__ __forceinline__ double total_of(const float *sums, uint32_t n) {
        double total = 0.0;

        for (uint32_t i = 0; i < n; i++)
                total += (double)sums[i];
        return total;
}

/* ---- distances ------------------------------------------------------------------------------- */

/*
 * The contribution of a plane to the distance of its layer, given the norm of the difference (for
 * MEAN_L2: the sum of norms).
 */
static __device__ __forceinline__ double weigh(const struct gpu_distances &a, const struct pair &p,
                                               uint64_t plane, double difference) {
        if (a.metric != RELATIVE)
                return difference / (2.0 * a.shape.tokens * a.shape.heads);
        return difference == 0.0 ?
                       0.0 :
                       0.5 * difference / sqrt((double)p.norm_a[plane] * (double)p.norm_b[plane]);
}

static __device__ __forceinline__ double plane_distance(const struct gpu_distances &a,
                                                        const struct pair &p, uint64_t plane,
                                                        double total) {
        return weigh(a, p, plane, a.metric == MEAN_L2 ? total : sqrt(total));
}

static __device__ __forceinline__ double plane_bound(const struct gpu_distances &a,
                                                     const struct pair &p, uint64_t plane) {
        double norm_a = (double)p.norm_a[plane], norm_b = (double)p.norm_b[plane],
               least = fabs(norm_a - norm_b);
        double slack = SLACK * (norm_a + norm_b);

        if (a.metric == MEAN_L2)
                slack *= sqrt((double)a.shape.heads * a.shape.tokens);
        least -= slack;
        return weigh(a, p, plane, 0.0 > least ? 0.0 : least);
}

/* The state of a thread block's pair; sum, layers and stopped are written by the first warp. */
struct work {
        struct pair pair;
        double sum;
        uint32_t layers;
        uint32_t stopped[2]; /* set after even steps and after odd steps */
};

/* Lane 2 i + v has plane v of layer i of a step. A NaN stops the pair. */
static __device__ __forceinline__ void add_layers(struct work *w, const struct gpu_distances &a,
                                                  double of_plane, uint32_t n, uint32_t step) {
        /* only thread 0's are used, but all lanes must take part in shuffles */
        double sum = threadIdx.x == 0 ? w->sum : 0.0;
        uint32_t layers = threadIdx.x == 0 ? w->layers : 0;
        bool stopped = false;

#pragma unroll 1
        for (uint32_t i = 0; i < n; i++) {
                double keys = warp_from(of_plane, 2 * i), values = warp_from(of_plane, 2 * i + 1);

                if (!stopped) {
                        sum += keys + values;
                        layers++;
                        stopped = !(sum <= a.limit * a.shape.layers);
                }
        }
        if (threadIdx.x == 0) {
                w->sum = sum;
                w->layers = layers;
                w->stopped[step % 2] = stopped;
        }
        __syncwarp();
}

/* Run by the first warp: finishes the sums of a step, one plane per lane. */
template <bool PLAIN, bool NARROW>
static __device__ __forceinline__ void finish_step(struct work *w, const struct gpu_distances &a,
                                                   const float *sums, uint32_t stride,
                                                   uint32_t first, uint32_t n, uint32_t step) {
        const struct squares_of q = compared(a, w->pair);
        uint32_t plane = threadIdx.x;
        double of_plane = 0.0;

        if (plane < 2 * n)
                of_plane = plane_distance(a, w->pair, 2 * (uint64_t)first + plane,
                                          total_of(sums + plane * stride,
                                                   chunks_in<PLAIN, NARROW>(a, q, plane % 2)));
        add_layers(w, a, of_plane, n, step);
}

/*
 * Processes all layers of a pair. sums: two buffers of [2 together][stride] floats; behind them the
 * room that each warp needs for numbers of less than 16 bits.
 */
template <bool WIDE, bool PLAIN, bool NARROW>
static __device__ __forceinline__ void walk(struct work *w, const struct gpu_distances &a,
                                            float *sums) {
        const struct squares_of q = compared(a, w->pair);
        uint32_t in_keys = chunks_in<PLAIN, NARROW>(a, q, 0),
                 in_values = chunks_in<PLAIN, NARROW>(a, q, 1),
                 step = 0;
        uint32_t stride = in_keys > in_values ? in_keys : in_values;

#pragma unroll 1
        for (uint32_t first = 0; first < a.shape.layers; first += a.together, step++) {
                uint32_t n = a.shape.layers - first < a.together ? a.shape.layers - first :
                                                                   a.together;
                float *of_step = sums + step % 2 * (2 * a.together * stride);

                if (NARROW)
                        sum_narrow(of_step, stride, a, q, first, n,
                                   sums + 4 * a.together * stride +
                                           threadIdx.x / 32 * expanded_floats(q.dim));
                else
                        sum_layers<WIDE, PLAIN>(of_step, stride, a, q, first, n);
                __syncthreads();
                if (step > 0 && w->stopped[(step - 1) % 2])
                        break;
                if (threadIdx.x < 32)
                        finish_step<PLAIN, NARROW>(w, a, of_step, stride, first, n, step);
        }
        __syncthreads();
}

static __device__ __forceinline__ void begin(struct work *w, const struct gpu_distances &a,
                                             uint32_t i) {
        __syncthreads();
        if (threadIdx.x == 0)
                *w = {pair_of(a, i), 0.0, 0, {0, 0}};
        __syncthreads();
}

static __device__ __forceinline__ void tell(const struct gpu_distances &a, uint32_t i,
                                            double distance) {
        if (threadIdx.x == 0)
                reinterpret_cast<double *>(a.distances)[i] = distance;
}

template <bool WIDE, bool PLAIN, bool NARROW = false>
static __device__ __forceinline__ void compare_pairs(struct work *w, const struct gpu_distances &a,
                                                     float *sums) {
#pragma unroll 1
        for (uint32_t i = blockIdx.x; i < a.n; i += gridDim.x) {
                begin(w, a, i);
                if (a.bounded &&
                    reinterpret_cast<const double *>(a.distances)[i] == positive_infinity())
                        continue;
                if (w->pair.x && w->pair.y)
                        walk<WIDE, PLAIN, NARROW>(w, a, sums);
                else
                        __syncthreads(); /* all have read the state that is written next */
                if (w->layers == a.shape.layers && w->sum <= a.limit * a.shape.layers)
                        tell(a, i, w->sum / a.shape.layers);
                else
                        tell(a, i, positive_infinity());
        }
}

/*
 * The host chooses one: aligned planes as a whole, other aligned forms, unaligned ones, and numbers
 * of less than 16 bits.
 */

KVD_KERNEL(memshare_plain, struct gpu_distances, THREADS) {
        KVD_SHARED(float, sums);
        __shared__ struct work work;

        compare_pairs<true, true>(&work, a, sums);
}

KVD_KERNEL(memshare_rows, struct gpu_distances, THREADS) {
        KVD_SHARED(float, sums);
        __shared__ struct work work;

        compare_pairs<true, false>(&work, a, sums);
}

KVD_KERNEL(memshare_narrow, struct gpu_distances, THREADS) {
        KVD_SHARED(float, sums);
        __shared__ struct work work;

        if (a.metric == MEAN_L2 || a.half > 0)
                compare_pairs<false, false>(&work, a, sums);
        else
                compare_pairs<false, true>(&work, a, sums);
}

KVD_KERNEL_ROOMY(memshare_expanded, struct gpu_distances, THREADS) {
        KVD_SHARED(float, sums);
        __shared__ struct work work;

        compare_pairs<false, false, true>(&work, a, sums);
}

/*
 * Runs before the others: stores INFINITY for a pair whose norms already put it above the limit,
 * and 0 for the rest. One thread per pair.
 */
KVD_KERNEL(memshare_bound, struct gpu_distances, THREADS) {
        for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < a.n; i += gridDim.x * THREADS) {
                const struct pair p = pair_of(a, i);
                double sum = 0.0;

                for (uint32_t l = 0; l < a.shape.layers; l++)
                        sum += plane_bound(a, p, 2 * (uint64_t)l) +
                               plane_bound(a, p, 2 * (uint64_t)l + 1);
                reinterpret_cast<double *>(a.distances)[i] = sum / a.shape.layers <= a.limit ?
                                                                     0.0 :
                                                                     positive_infinity();
        }
}

/* ---- norms ----------------------------------------------------------------------------------- */

static __device__ __forceinline__ bool is_wide(const struct gpu_norms &a) {
        return (a.blocks.base | a.blocks.block_bytes | a.offset) % 16 == 0 &&
               a.shape.dim % (a.shape.number == NUMBER_F32 ? 4 : 8) == 0;
}

/* Threads 0 and 1 add up the chunks of keys, and of values. */
static __device__ __forceinline__ void put_norm(float *to, const uint8_t *block, const float *sums,
                                                uint32_t chunks) {
        uint32_t v = threadIdx.x;
        double total = 0.0;

        for (uint32_t i = 0; i < chunks && v < 2 && block; i++)
                total += (double)sums[v * chunks + i];
        if (v < 2)
                to[v] = block ? (float)sqrt(total) : __uint_as_float(0x7fc00000u);
}

/* One thread block per layer of a block. */
KVD_KERNEL(memshare_norms, struct gpu_norms, THREADS) {
        KVD_SHARED(float, sums);
        uint32_t layer = blockIdx.x % a.shape.layers, rows = a.shape.heads * a.shape.tokens;
        const uint8_t *block = block_at(a.blocks, a.offset, blockIdx.x / a.shape.layers);
        const struct squares_of q = squares_of_one(block, rows, a.shape.dim);
        float *to = reinterpret_cast<float *>(a.to) + 2 * (uint64_t)blockIdx.x;
        auto plane = [layer](uint32_t i) { return 2 * (uint64_t)layer + i; };
        uint32_t chunks = chunks_of<FLAT>(q);

        if (block && is_wide(a))
                sum_chunks<true, FLAT, false>(sums, chunks, q, a.shape.number, 2, THREADS, plane);
        else if (block)
                sum_chunks<false, FLAT, false>(sums, chunks, q, a.shape.number, 2, THREADS, plane);
        __syncthreads();
        put_norm(to, block, sums, chunks);
}

KVD_KERNEL_ROOMY(memshare_norms_expanded, struct gpu_norms, THREADS) {
        KVD_SHARED(float, sums);
        uint32_t layer = blockIdx.x % a.shape.layers, rows = a.shape.heads * a.shape.tokens;
        const uint8_t *block = block_at(a.blocks, a.offset, blockIdx.x / a.shape.layers);
        uint64_t plane_bytes = (uint64_t)rows * narrow_bytes(a.shape.dim, a.shape.number);
        struct squares_of q = squares_of_one(block, rows, a.shape.dim);
        uint32_t chunks;

        q.together = q.dim >= CHUNK ? 1 : CHUNK / q.dim;
        chunks = expanded_chunks(q, a.shape.number);
#pragma unroll 1
        for (uint32_t job = threadIdx.x / 32; job < 2 * chunks && block; job += WARPS) {
                uint64_t at = (2 * (uint64_t)layer + job / chunks) * plane_bytes;
                float *room = sums + 2 * chunks + threadIdx.x / 32 * expanded_floats(q.dim),
                      sum = expanded_chunk(q, block + at, nullptr, a.shape.number, job % chunks,
                                           room);

                if (lane_id() == 0)
                        sums[job] = sum;
        }
        __syncthreads();
        put_norm(reinterpret_cast<float *>(a.to) + 2 * (uint64_t)blockIdx.x, block, sums, chunks);
}
