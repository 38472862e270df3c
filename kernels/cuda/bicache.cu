/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/bicache.h"
#include "kernels/cuda/narrow.cuh"

/*
 * A team of two threads (four for fp32, and for numbers of less than 16 bits) takes a token. Each
 * thread has as many of the sixteen lanes of kernels/lanes.h as there are numbers in 16 bytes. So
 * chains and sums are those of the reference, and a team reads whole sectors.
 */
#define THREADS 256
#define PIECE 4096 /* numbers added up in single precision */

struct products { /* struct kvd_products, which is C */
        double ab, aa, bb;
};

template <int N> struct sums {
        float ab[N], aa[N], bb[N];

        __device__ __forceinline__ void add(int j, float x, float y) {
                ab[j] = fmaf(x, y, ab[j]);
                aa[j] = fmaf(x, x, aa[j]);
                bb[j] = fmaf(y, y, bb[j]);
        }
};

/* Adds this thread's lanes of sixteen numbers; beyond the end they are zeros. */
template <int NUMBER>
static __device__ __forceinline__ void add_lanes(struct sums<vector<NUMBER>::N> *s,
                                                 const uint8_t *a, const uint8_t *b, uint32_t from,
                                                 uint32_t end, bool sixteens) {
        typedef typename element<NUMBER>::type type;
        const int N = vector<NUMBER>::N;
        const type *of_a = reinterpret_cast<const type *>(a) + from,
                   *of_b = reinterpret_cast<const type *>(b) + from;

        if (sixteens && from + N <= end) {
                float x[N], y[N];

                vector<NUMBER>::wide(x, load_16(of_a));
                vector<NUMBER>::wide(y, load_16(of_b));
#pragma unroll
                for (int j = 0; j < N; j++)
                        s->add(j, x[j], y[j]);
        } else {
#pragma unroll
                for (int j = 0; j < N; j++) {
                        bool there = from + j < end;

                        s->add(j, there ? element<NUMBER>::wide(of_a[j]) : 0.0f,
                               there ? element<NUMBER>::wide(of_b[j]) : 0.0f);
                }
        }
}

/* The same of numbers of less than 16 bits. */
static __device__ __forceinline__ void add_narrow(struct sums<4> *s, const struct gpu_products &p,
                                                  const uint8_t *a, const uint8_t *b, uint32_t from,
                                                  uint32_t end) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
                uint32_t d = from + j;

                s->add(j, d < end ? narrow_number(a, d, p.dim, p.number) : 0.0f,
                       d < end ? narrow_number(b, d, p.dim, p.number) : 0.0f);
        }
}

/* Adds lanes j and j + 8, j + 4, j + 2, j + 1, those of other threads of the team first. */
template <int NUMBER> static __device__ __forceinline__ double sum_of_team(float *lanes) {
        const int N = vector<NUMBER>::N;

        for (int by = 8 / N; by; by /= 2)
#pragma unroll
                for (int j = 0; j < N; j++)
                        lanes[j] += warp_xor(lanes[j], by);
#pragma unroll
        for (int width = N / 2; width; width /= 2)
#pragma unroll
                for (int j = 0; j < width; j++)
                        lanes[j] += lanes[j + width];
        return (double)lanes[0];
}

template <int NUMBER>
static __device__ void add_piece(struct products *to, const struct gpu_products &p,
                                 const uint8_t *a, const uint8_t *b, uint32_t from, uint32_t end,
                                 bool sixteens) {
        const int N = vector<NUMBER>::N;
        struct sums<N> s = {};

        for (uint32_t i = from; i < end; i += 16) {
                uint32_t first = i + (lane_id() % (16 / N)) * N;

                if constexpr (NUMBER == NUMBER_NARROW)
                        add_narrow(&s, p, a, b, first, end);
                else
                        add_lanes<NUMBER>(&s, a, b, first, end, sixteens);
        }
        to->ab += sum_of_team<NUMBER>(s.ab);
        to->aa += sum_of_team<NUMBER>(s.aa);
        to->bb += sum_of_team<NUMBER>(s.bb);
}

static __device__ const uint8_t *block_of(const struct gpu_blocks &blocks, uint32_t i) {
        const uint32_t *ids = reinterpret_cast<const uint32_t *>(blocks.ids);

        return reinterpret_cast<const uint8_t *>(blocks.base + ids[i] * blocks.block_bytes);
}

template <int NUMBER>
static __device__ struct products of_token(const struct gpu_products &a, uint64_t at) {
        uint32_t plane = (uint32_t)(at / a.tokens),
                 token = (uint32_t)(at - (uint64_t)plane * a.tokens);
        uint32_t block = token / a.per_block;
        uint64_t offset = a.offset + plane * a.plane_stride +
                          (token - block * a.per_block) * a.token_stride;
        const uint8_t *alone = block_of(a.a, block) + offset,
                      *together = block_of(a.b, block) + offset;
        bool sixteens = (((uint64_t)alone | (uint64_t)together | a.head_stride) & 15) == 0;
        struct products sum = {};

        for (uint32_t head = 0; head < a.heads; head++)
                for (uint32_t d = 0; d < a.dim; d += PIECE)
                        add_piece<NUMBER>(&sum, a, alone + head * a.head_stride,
                                          together + head * a.head_stride, d,
                                          min(d + PIECE, a.dim), sixteens);
        return sum;
}

/* A whole warp continues as long as one of its teams has a token. */
template <int NUMBER> static __device__ void all_tokens(const struct gpu_products &a) {
        const int TEAM = 16 / vector<NUMBER>::N;
        uint64_t rows = (uint64_t)a.planes * a.tokens,
                 step = gridDim.x * (uint64_t)(THREADS / TEAM);
        uint64_t at = blockIdx.x * (uint64_t)(THREADS / TEAM) + threadIdx.x / TEAM;
        struct products *to = reinterpret_cast<struct products *>(a.to);

        for (; at - lane_id() / TEAM < rows; at += step) {
                struct products sum = of_token<NUMBER>(a, at < rows ? at : rows - 1);

                if (at < rows && lane_id() % TEAM == 0)
                        to[at] = sum;
        }
}

KVD_KERNEL(products, struct gpu_products, THREADS) {
        if (a.number == NUMBER_F32)
                all_tokens<NUMBER_F32>(a);
        else if (a.number == NUMBER_F16)
                all_tokens<NUMBER_F16>(a);
        else
                all_tokens<NUMBER_BF16>(a);
}

KVD_KERNEL_ROOMY(products_narrow, struct gpu_products, THREADS) {
        all_tokens<NUMBER_NARROW>(a);
}
