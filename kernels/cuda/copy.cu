/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/copy.h"
#include "kernels/cuda/device.cuh"

/* A block of threads takes one piece of PIECE bytes after the other, each thread four loads ahead of its stores. */
#define THREADS 256
#define AHEAD 4
#define PIECE (THREADS * AHEAD * 16)

static __device__ void copy_piece(uint8_t *to, const uint8_t *from, uint64_t bytes) {
        uint4 v[AHEAD];

#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
                uint64_t at = (i * THREADS + threadIdx.x) * 16ull;

                v[i] = at < bytes && from ? load_16(from + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
                uint64_t at = (i * THREADS + threadIdx.x) * 16ull;

                if (at < bytes)
                        store_16(to + at, v[i]);
        }
}

KVD_KERNEL(gather, struct gpu_gather, THREADS) {
        const uint32_t *ids = reinterpret_cast<const uint32_t *>(a.blocks.ids);
        uint64_t per_block = (a.bytes + PIECE - 1) / PIECE;

        for (uint64_t i = blockIdx.x; i < a.n * per_block; i += gridDim.x) {
                uint32_t id = ids[i / per_block];
                uint64_t at = i % per_block * PIECE, bytes = a.bytes - at < PIECE ? a.bytes - at : PIECE;
                uint8_t *packed = reinterpret_cast<uint8_t *>(a.packed + i / per_block * a.bytes + at);
                uint8_t *block = id == GPU_NO_BLOCK ? nullptr :
                        reinterpret_cast<uint8_t *>(a.blocks.base + id * a.blocks.block_bytes + a.offset + at);

                if (!a.to_blocks)
                        copy_piece(packed, block, bytes);
                else if (block)
                        copy_piece(block, packed, bytes);
        }
}
