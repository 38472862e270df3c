/* SPDX-License-Identifier: Apache-2.0 */

/* KeyDiff the long way, and what becomes of scores. */

#include "kernels/cuda/keydiff_keys.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define TILE 64 /* tokens by tokens of all pairs */
#define STEP 32 /* dimensions at a time */

/* ---- all pairs ---- */

/* A warp a token. The rows become directions; the score, 0 or -INFINITY. */
template <int NUMBER>
static __device__ void direct(const struct gpu_keydiff_pairwise &a, uint32_t t) {
        const int N = vector<NUMBER>::N, CHUNKS = GPU_KEYDIFF_DIM / 32 / N;
        const uint32_t *ids = reinterpret_cast<const uint32_t *>(a.keys.blocks.ids);
        uint32_t block = t / a.keys.per_block, slot = t - block * a.keys.per_block;
        cu_address head = head_at<NUMBER>(a.keys, 0, a.head, ids[block]);
        const uint8_t *row = reinterpret_cast<const uint8_t *>(head + bytes_of<NUMBER>(slot * a.keys.token_stride));
        float *to = reinterpret_cast<float *>(a.scratch) + (uint64_t)t * a.keys.dim, x[CHUNKS][N];
        float squares = 0.0f, inverse;

#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
                uint4 v = load_some<NUMBER>(row, (c * 32 + lane_id()) * N, head ? a.keys.dim : 0);

                vector<NUMBER>::wide(x[c], v);
#pragma unroll
                for (int i = 0; i < N; i++)
                        squares = fmaf(x[c][i], x[c][i], squares);
        }
        squares = warp_sum(squares);
        inverse = is_valid(squares) ? 1.0f / fmaxf(sqrtf(squares), 1e-12f) : 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int i = 0; i < N; i++) {
                        uint32_t d = (c * 32 + lane_id()) * N + i;

                        if (d < a.keys.dim)
                                to[d] = inverse > 0.0f ? x[c][i] * inverse : 0.0f;
                }
        if (lane_id() == 0)
                reinterpret_cast<float *>(a.scores)[t] = is_valid(squares) ? 0.0f : -infinity();
}

KVD_KERNEL(keydiff_directions, struct gpu_keydiff_pairwise, THREADS) {
        uint32_t t = blockIdx.x * WARPS + threadIdx.x / 32;

        if (t >= a.n)
                ;
        else if (a.keys.number == NUMBER_F32)
                direct<NUMBER_F32>(a, t);
        else if (a.keys.number == NUMBER_F16)
                direct<NUMBER_F16>(a, t);
        else
                direct<NUMBER_BF16>(a, t);
}

/* STEP dimensions of TILE directions, the dimensions outside. */
static __device__ __forceinline__ void load_tile(float to[STEP][TILE + 4], const float *from, uint32_t first,
                                                 uint32_t n, uint32_t d, uint32_t dim) {
        for (uint32_t i = threadIdx.x; i < TILE * STEP; i += THREADS) {
                uint32_t row = first + i / STEP, at = d + i % STEP;

                to[i % STEP][i / STEP] = row < n && at < dim ? from[(uint64_t)row * dim + at] : 0.0f;
        }
}

/* Block x: scores of TILE tokens; thread (x, y) of 16 by 16: products of 4 tokens from 4 y on and 4 from 4 x on. */
KVD_KERNEL(keydiff_pairs, struct gpu_keydiff_pairwise, THREADS) {
        __shared__ float left[STEP][TILE + 4];
        __shared__ float right[STEP][TILE + 4];
        const float *from = reinterpret_cast<const float *>(a.scratch);
        float *scores = reinterpret_cast<float *>(a.scores), sum[4] = {};
        uint32_t x = threadIdx.x % 16, y = threadIdx.x / 16, first = blockIdx.x * TILE;

        for (uint32_t u = 0; u < a.n; u += TILE) {
                float dots[4][4] = {};

                for (uint32_t d = 0; d < a.keys.dim; d += STEP) {
                        __syncthreads();
                        load_tile(left, from, first, a.n, d, a.keys.dim);
                        load_tile(right, from, u, a.n, d, a.keys.dim);
                        __syncthreads();
#pragma unroll 4
                        for (int k = 0; k < STEP; k++)
#pragma unroll
                                for (int i = 0; i < 16; i++)
                                        dots[i / 4][i % 4] = fmaf(left[k][4 * y + i / 4], right[k][4 * x + i % 4],
                                                                  dots[i / 4][i % 4]);
                }
#pragma unroll
                for (int i = 0; i < 16; i++)
                        sum[i / 4] += dots[i / 4][i % 4];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
                for (int mask = 8; mask; mask /= 2)
                        sum[i] += warp_xor(sum[i], mask);
                if (x == 0 && first + 4 * y + i < a.n)
                        scores[first + 4 * y + i] -= sum[i];
        }
}

/* ---- from scores to choices ---- */

KVD_KERNEL(keydiff_priority, struct gpu_keydiff_priority, THREADS) {
        const float *scores = reinterpret_cast<const float *>(a.scores);
        float *p = reinterpret_cast<float *>(a.p);

        for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += (uint64_t)gridDim.x * THREADS) {
                float half = 0.5f * scores[i] + 0.5f;

                p[i] = half > 0.0f ? (half < 1.0f ? half : 1.0f) : 0.0f;
        }
}

/* A warp a block: width lanes look through a head's tokens there, and 32 / width heads are looked through at once. */
KVD_KERNEL(keydiff_blocks, struct gpu_keydiff_blocks, THREADS) {
        uint32_t blocks = (a.n + a.per_block - 1) / a.per_block, b = blockIdx.x * WARPS + threadIdx.x / 32;
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
