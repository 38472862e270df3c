/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/copy.h"
#include "kernels/cuda/device.cuh"

/*
 * A block of threads takes one piece of PIECE bytes after the other, each thread AHEAD loads ahead of its stores. The
 * grid is as large as the device holds at once; pieces are counted on without a division.
 */
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

/* Piece `piece` of part `part`; both move on by a grid of pieces. */
struct walk {
        uint64_t part, piece, per_part, parts_on, pieces_on;
};

static __device__ struct walk walk_of(uint64_t bytes) {
        struct walk w;

        w.per_part = (bytes + PIECE - 1) / PIECE;
        w.part = blockIdx.x / w.per_part;
        w.piece = blockIdx.x - w.part * w.per_part;
        w.parts_on = gridDim.x / w.per_part;
        w.pieces_on = gridDim.x - w.parts_on * w.per_part;
        return w;
}

static __device__ void move_on(struct walk *w) {
        w->part += w->parts_on;
        w->piece += w->pieces_on;
        if (w->piece >= w->per_part) {
                w->piece -= w->per_part;
                w->part++;
        }
}

static __device__ uint8_t *block_at(const struct gpu_blocks &blocks, uint64_t part, uint64_t offset) {
        uint32_t id = reinterpret_cast<const uint32_t *>(blocks.ids)[part];

        return id == GPU_NO_BLOCK ? nullptr :
                                    reinterpret_cast<uint8_t *>(blocks.base + id * blocks.block_bytes + offset);
}

static __device__ uint64_t piece_bytes(uint64_t bytes, uint64_t at) {
        return bytes - at < PIECE ? bytes - at : PIECE;
}

KVD_KERNEL(gather, struct gpu_gather, THREADS) {
        for (struct walk w = walk_of(a.bytes); w.part < a.n; move_on(&w)) {
                uint64_t at = w.piece * PIECE, bytes = piece_bytes(a.bytes, at);
                uint8_t *packed = reinterpret_cast<uint8_t *>(a.packed + w.part * a.bytes + at);
                uint8_t *block = block_at(a.blocks, w.part, a.offset + at);

                if (!a.to_blocks)
                        copy_piece(packed, block, bytes);
                else if (block)
                        copy_piece(block, packed, bytes);
        }
}

KVD_KERNEL(clear, struct gpu_clear, THREADS) {
        for (struct walk w = walk_of(a.bytes); w.part < a.n; move_on(&w)) {
                uint64_t at = w.piece * PIECE;
                uint8_t *block = block_at(a.blocks, w.part, a.offset + at);

                if (block)
                        copy_piece(block, nullptr, piece_bytes(a.bytes, at));
        }
}
