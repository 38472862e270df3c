/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/block.h"
#include "kernels/cuda/device.cuh"

#define THREADS 256
#define AHEAD 4 /* loads that a thread issues before its stores */

static __device__ uint8_t *slot_of(const struct gpu_compact &a, uint64_t at, uint32_t token) {
        uint32_t block = token / a.per_block,
                 id = reinterpret_cast<const uint32_t *>(a.blocks.ids)[block];

        if (id == GPU_NO_BLOCK)
                return nullptr;
        return reinterpret_cast<uint8_t *>(a.blocks.base + id * a.blocks.block_bytes + at +
                                           (token - block * a.per_block) * a.slot_stride);
}

static __device__ __forceinline__ void load_unit(uint4 *v, const uint8_t *from) {
        *v = load_16(from);
}
template <typename UNIT>
static __device__ __forceinline__ void load_unit(UNIT *v, const uint8_t *from) {
        *v = *reinterpret_cast<const UNIT *>(from);
}

/* Unit i of a plane's tokens: source and destination. */
template <typename UNIT> struct unit {
        const uint8_t *from;
        uint8_t *to;

        __device__ __forceinline__ void find(const struct gpu_compact &a, uint64_t at,
                                             const uint32_t *index, uint32_t i) {
                uint32_t each = a.bytes / (uint32_t)sizeof(UNIT), token = i / each;
                uint32_t byte = (i - token * each) * (uint32_t)sizeof(UNIT);

                from = nullptr;
                if (token >= a.n)
                        return;
                from = slot_of(a, at, index[token]);
                to = slot_of(a, at, a.to * a.per_block + token);
                from = from && to ? from + byte : nullptr;
                to += byte;
        }
};

/* Grid x: units; y: layer, head, keys or values. */
template <typename UNIT> static __device__ void compact(const struct gpu_compact &a) {
        uint32_t row = blockIdx.y / 2, value = blockIdx.y % 2;
        uint32_t layer = row / a.heads, head = row - layer * a.heads;
        uint64_t at = a.offset + layer * a.layer_stride + value * a.plane + head * a.head_stride;
        const uint32_t *index = reinterpret_cast<const uint32_t *>(a.index) + (uint64_t)row * a.n;
        uint32_t units = a.n * (a.bytes / (uint32_t)sizeof(UNIT));

        for (uint32_t first = blockIdx.x * THREADS * AHEAD; first < units;
             first += gridDim.x * THREADS * AHEAD) {
                struct unit<UNIT> u[AHEAD];
                UNIT v[AHEAD];

#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                        u[k].find(a, at, index, first + k * THREADS + threadIdx.x);
                        if (u[k].from)
                                load_unit(&v[k], u[k].from);
                }
#pragma unroll
                for (int k = 0; k < AHEAD; k++)
                        if (u[k].from)
                                *reinterpret_cast<UNIT *>(u[k].to) = v[k];
        }
}

KVD_KERNEL(compact, struct gpu_compact, THREADS) {
        if (a.unit == 16)
                compact<uint4>(a);
        else if (a.unit == 2)
                compact<uint16_t>(a);
        else
                compact<uint8_t>(a);
}
