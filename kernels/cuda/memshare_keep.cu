/* SPDX-License-Identifier: Apache-2.0 */

/* The norms that MemShare keeps of blocks. */

#include "kernels/cuda/memshare.h"
#include "kernels/cuda/squares.cuh"

#define THREADS 256

static __device__ __forceinline__ bool is_wide(const struct gpu_memshare_keep &a) {
        return (a.blocks.base | a.blocks.block_bytes | a.offset) % 16 == 0 &&
               a.shape.dim % (a.shape.number == NUMBER_F32 ? 4 : 8) == 0;
}

static __device__ __forceinline__ const uint8_t *block_of(const struct gpu_memshare_keep &a,
                                                          uint32_t index) {
        uint32_t id = reinterpret_cast<const uint32_t *>(a.blocks.ids)[index];

        return id == GPU_NO_BLOCK ? nullptr :
                                    reinterpret_cast<const uint8_t *>(
                                            a.blocks.base + id * a.blocks.block_bytes + a.offset);
}

/* One thread block per layer of a block. */
KVD_KERNEL(memshare_norms, struct gpu_memshare_keep, THREADS) {
        KVD_SHARED(float, sums);
        uint32_t layer = blockIdx.x % a.shape.layers, rows = a.shape.heads * a.shape.tokens,
                 v = threadIdx.x;
        const uint8_t *block = block_of(a, blockIdx.x / a.shape.layers);
        const struct squares_of q = squares_of_one(block, rows, a.shape.dim);
        float *to = reinterpret_cast<float *>(a.to) + 2 * (uint64_t)blockIdx.x;
        auto plane = [layer](uint32_t i) { return 2 * (uint64_t)layer + i; };
        uint32_t chunks = chunks_of<FLAT>(q);
        double total = 0.0;

        if (block && is_wide(a))
                sum_chunks<true, FLAT, false>(sums, chunks, q, a.shape.number, 2, THREADS, plane);
        else if (block)
                sum_chunks<false, FLAT, false>(sums, chunks, q, a.shape.number, 2, THREADS, plane);
        __syncthreads();
        for (uint32_t i = 0; i < chunks && v < 2 && block; i++)
                total += (double)sums[v * chunks + i];
        if (v < 2)
                to[v] = block ? (float)sqrt(total) : __uint_as_float(0x7fc00000u);
}
