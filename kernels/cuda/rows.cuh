/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_ROWS_CUH
#define KVD_KERNELS_CUDA_ROWS_CUH

/*
 * Loads rows of elements in blocks, for the methods' kernels: 16 bytes at a time if they are
 * aligned, else element by element.
 */

#include "kernels/cuda/device.cuh"

/* As lanes_max of kernels/lanes.h: b if either is a NaN. */
static __device__ __forceinline__ float greater(float a, float b) {
        return a > b ? a : b;
}

static __device__ __forceinline__ float infinity() {
        return __uint_as_float(0x7f800000u);
}

/*
 * Elements i to i + N - 1 of a row that ends at end, as load_16 would load them; zeros beyond the
 * end.
 */
template <int NUMBER>
static __device__ __forceinline__ uint4 load_some(const uint8_t *row, uint32_t i, uint32_t end) {
        typedef typename element<NUMBER>::type type;
        const int N = vector<NUMBER>::N;
        const type *from = reinterpret_cast<const type *>(row);
        uint32_t words[4] = {0, 0, 0, 0};

#pragma unroll
        for (int k = 0; k < N; k++) {
                if (i + k >= end)
                        break;
                if (NUMBER == NUMBER_F32)
                        words[k] = __float_as_uint((float)from[i + k]);
                else
                        words[k / 2] |= (uint32_t)from[i + k] << k % 2 * 16;
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
}

/* The same. WIDE: the row is aligned and consists of whole vectors. */
template <int NUMBER, bool WIDE>
static __device__ __forceinline__ uint4 load_vector(const uint8_t *row, uint32_t i, uint32_t end) {
        if (!WIDE)
                return load_some<NUMBER>(row, i, end);
        return i < end ? load_16(row + i * sizeof(typename element<NUMBER>::type)) :
                         make_uint4(0, 0, 0, 0);
}

#endif
