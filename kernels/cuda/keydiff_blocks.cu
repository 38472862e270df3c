/* SPDX-License-Identifier: Apache-2.0 */

/* Scores of blocks, from scores of tokens. */

#include "kernels/cuda/keydiff_keys.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)

/* One warp per block: width lanes look through a head's tokens, and 32 / width heads at once. */
KVD_KERNEL(keydiff_blocks, struct gpu_keydiff_blocks, THREADS) {
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
