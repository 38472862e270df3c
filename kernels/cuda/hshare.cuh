/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_HSHARE_CUH
#define KVD_KERNELS_CUDA_HSHARE_CUH

/* Where things of HShare lie. */

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/hshare.h"

#define HSHARE static __device__ __forceinline__

HSHARE uint32_t span_from(const struct gpu_spans &s, uint32_t sequence) {
        return s.from ? reinterpret_cast<const uint32_t *>(s.from)[sequence] : 0;
}

HSHARE uint32_t span_n(const struct gpu_spans &s, uint32_t sequence) {
        return min(reinterpret_cast<const uint32_t *>(s.n)[sequence], s.most);
}

/* nullptr: not resident. */
HSHARE uint8_t *slot_at(const struct gpu_slots &s, uint32_t sequence, uint32_t head, uint32_t position,
                        uint64_t token_stride) {
        uint32_t block = position / s.block_tokens, slot = position - block * s.block_tokens;
        uint32_t id = reinterpret_cast<const uint32_t *>(s.blocks.ids)[sequence * s.ld + block];

        if (id == GPU_NO_BLOCK)
                return nullptr;
        return reinterpret_cast<uint8_t *>(s.blocks.base + id * s.blocks.block_bytes + s.offset +
                                           head * s.head_stride + slot * token_stride);
}

HSHARE uint32_t label_bytes(uint32_t n_channels) {
        return (n_channels + 1) / 2 + 4;
}

HSHARE float load_number(const void *at, uint64_t i, uint32_t number) {
        if (number == NUMBER_F32)
                return reinterpret_cast<const float *>(at)[i];
        if (number == NUMBER_F16)
                return f16_to_float(reinterpret_cast<const uint16_t *>(at)[i]);
        return bf16_to_float(reinterpret_cast<const uint16_t *>(at)[i]);
}

#endif
