/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/bicache.h"
#include "kernels/cuda/device.cuh"

/*
 * A team of two threads (four, for fp32) takes a token: each has as many of the sixteen lanes of kernels/lanes.h as
 * there are numbers in 16 bytes, so that chains and sums are those of the reference, and a team reads whole sectors.
 */
#define THREADS 256
#define PIECE 4096 /* numbers that are added up in single precision */

struct products { /* struct kvd_products, which is C */
        double ab, aa, bb;
};

/* What a thread's lanes have: numbers from + 0 ... N - 1 of a row, zeros from end on. */
template <int NUMBER>
static __device__ __forceinline__ void load_lanes(float *to, const uint8_t *row, uint32_t from, uint32_t end,
                                                  bool sixteens) {
        typedef typename element<NUMBER>::type type;
        const type *numbers = reinterpret_cast<const type *>(row) + from;

        if (sixteens && from + vector<NUMBER>::N <= end) {
                vector<NUMBER>::wide(to, load_16(numbers));
                return;
        }
#pragma unroll
        for (int j = 0; j < vector<NUMBER>::N; j++)
                to[j] = from + j < end ? element<NUMBER>::wide(numbers[j]) : 0.0f;
}

/* Lanes j and j + 8, j + 4, j + 2, j + 1: first those of other threads of the team. */
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
static __device__ void add_piece(struct products *to, const uint8_t *a, const uint8_t *b, uint32_t from, uint32_t end,
                                 bool sixteens) {
        const int N = vector<NUMBER>::N;
        float ab[N] = {}, aa[N] = {}, bb[N] = {};

        for (uint32_t i = from; i < end; i += 16) {
                uint32_t at = i + (lane_id() % (16 / N)) * N;
                float x[N], y[N];

                load_lanes<NUMBER>(x, a, at, end, sixteens);
                load_lanes<NUMBER>(y, b, at, end, sixteens);
#pragma unroll
                for (int j = 0; j < N; j++) {
                        ab[j] = fmaf(x[j], y[j], ab[j]);
                        aa[j] = fmaf(x[j], x[j], aa[j]);
                        bb[j] = fmaf(y[j], y[j], bb[j]);
                }
        }
        to->ab += sum_of_team<NUMBER>(ab);
        to->aa += sum_of_team<NUMBER>(aa);
        to->bb += sum_of_team<NUMBER>(bb);
}

static __device__ const uint8_t *block_of(const struct gpu_blocks &blocks, uint32_t i) {
        return reinterpret_cast<const uint8_t *>(blocks.base + reinterpret_cast<const uint32_t *>(blocks.ids)[i] *
                                                 blocks.block_bytes);
}

template <int NUMBER> static __device__ void add_token(struct products *to, const struct gpu_products &a, uint64_t at) {
        uint32_t plane = (uint32_t)(at / a.tokens), token = (uint32_t)(at - (uint64_t)plane * a.tokens);
        uint32_t block = token / a.per_block;
        uint64_t offset = a.offset + plane * a.plane_stride + (token - block * a.per_block) * a.token_stride;
        const uint8_t *alone = block_of(a.a, block) + offset, *together = block_of(a.b, block) + offset;
        bool sixteens = (((uint64_t)alone | (uint64_t)together | a.head_stride) & 15) == 0;

        for (uint32_t head = 0; head < a.heads; head++)
                for (uint32_t d = 0; d < a.dim; d += PIECE)
                        add_piece<NUMBER>(to, alone + head * a.head_stride, together + head * a.head_stride, d,
                                          min(d + PIECE, a.dim), sixteens);
}

template <int NUMBER> static __device__ void add_tokens(const struct gpu_products &a) {
        const int TEAM = 16 / vector<NUMBER>::N;
        uint64_t rows = (uint64_t)a.planes * a.tokens, step = gridDim.x * (uint64_t)(THREADS / TEAM);
        uint64_t at = blockIdx.x * (uint64_t)(THREADS / TEAM) + threadIdx.x / TEAM;
        struct products *to = reinterpret_cast<struct products *>(a.to);

        for (; at - lane_id() / TEAM < rows; at += step) { /* whole warps */
                struct products sum = at < rows ? to[at] : products();

                add_token<NUMBER>(&sum, a, at < rows ? at : rows - 1);
                if (at < rows && lane_id() % TEAM == 0)
                        to[at] = sum;
        }
}

KVD_KERNEL(products, struct gpu_products, THREADS) {
        if (a.number == NUMBER_F32)
                add_tokens<NUMBER_F32>(a);
        else if (a.number == NUMBER_F16)
                add_tokens<NUMBER_F16>(a);
        else
                add_tokens<NUMBER_BF16>(a);
}
