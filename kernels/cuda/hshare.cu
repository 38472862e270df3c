/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/hshare.h"

#define THREADS 256

/* Finds word i of the rows. A lane's words are 32 apart, so the block changes rarely. */
struct words {
        const struct gpu_blocks &blocks;
        uint64_t per_block, first, end; /* words in the current block */
        const uint64_t *at;

        __device__ explicit words(const struct gpu_blocks &of)
            : blocks(of), per_block(of.block_bytes / 8), first(0), end(0), at(nullptr) {}

        __device__ __forceinline__ uint64_t get(uint64_t i) {
                if (i < first || i >= end) {
                        uint64_t block = i / per_block;
                        uint32_t id = reinterpret_cast<const uint32_t *>(blocks.ids)[block];

                        first = block * per_block;
                        end = first + per_block;
                        at = id == GPU_NO_BLOCK ? nullptr :
                                                  reinterpret_cast<const uint64_t *>(
                                                          blocks.base + id * blocks.block_bytes);
                }
                return at ? at[i - first] : 0;
        }
};

/* Grid x: rows; y: pairs. */
KVD_KERNEL(overlap, struct gpu_overlap, THREADS) {
        struct gpu_overlap_pair pair =
                reinterpret_cast<const struct gpu_overlap_pair *>(a.pairs)[blockIdx.y];
        uint32_t row = a.first + blockIdx.x * (THREADS / 32) + threadIdx.x / 32, sum = 0;
        uint64_t of_a = ((uint64_t)pair.a + row) * a.words,
                 of_b = ((uint64_t)pair.b + row) * a.words;
        struct words x(a.blocks), y(a.blocks);

        if (row >= a.end)
                return;
        for (uint32_t w = lane_id(); w < a.words; w += 32)
                sum += (uint32_t)__popcll(x.get(of_a + w) & y.get(of_b + w));
        for (int mask = 16; mask; mask /= 2)
                sum += warp_xor(sum, mask);
        if (lane_id() == 0)
                reinterpret_cast<uint32_t *>(
                        a.to)[(uint64_t)blockIdx.y * (a.end - a.first) + row - a.first] = sum;
}
