/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_KEYDIFF_KEYS_CUH
#define KVD_KERNELS_CUDA_KEYDIFF_KEYS_CUH

/* Addresses and validity of keys; shared by KeyDiff's images. */

#include "kernels/cuda/keydiff.h"
#include "kernels/cuda/rows.cuh"

template <int NUMBER> static __device__ __forceinline__ uint64_t bytes_of(uint64_t elements) {
        return elements * sizeof(typename element<NUMBER>::type);
}

/* Address of one layer and head of a block; 0 if the block is not resident. */
template <int NUMBER>
static __device__ __forceinline__ cu_address head_at(const struct gpu_key_rows &k, uint32_t layer,
                                                     uint32_t head, uint32_t id) {
        return id == GPU_NO_BLOCK ?
                       0 :
                       k.blocks.base + id * k.blocks.block_bytes + k.offset +
                               layer * k.layer_stride + bytes_of<NUMBER>(head * k.head_stride);
}

static __device__ __forceinline__ bool is_valid(float squares) {
        return squares > 0.0f && squares < infinity();
}

#endif
