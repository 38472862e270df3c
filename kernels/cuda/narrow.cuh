/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_CUDA_NARROW_CUH
#define KVD_KERNELS_CUDA_NARROW_CUH

/*
 * Rows of numbers of any type, element by element (ipc/base/format.h), and the transform of quantised
 * keys (kernels/turn.h). Numbers of less than 16 bits and their scales are read by bytes: they may lie
 * at any address.
 */

#include "ipc/base/format.h"
#include "kernels/cuda/device.cuh"
#include "kernels/variants.h"

static __device__ __forceinline__ bool is_quantised(uint32_t number) {
        return number == NUMBER_Q8 || number == NUMBER_Q4;
}

/* Bytes of a row of numbers of less than 16 bits. */
static __device__ __forceinline__ uint32_t narrow_bytes(uint32_t dim, uint32_t number) {
        uint32_t scales = (dim + KVD_GROUP - 1) / KVD_GROUP * KVD_SCALE_BYTES;

        return number == NUMBER_Q8 ? dim + scales : number == NUMBER_Q4 ? dim / 2 + scales : dim;
}

static __device__ __forceinline__ float e4m3_to_float(uint8_t x) {
        uint16_t half = (uint16_t)((x & 0x80) << 8 | (x & 0x7f) << 7); /* 2^-8 of the number */

        return (x & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : 256.0f * f16_to_float(half);
}

static __device__ __forceinline__ float e5m2_to_float(uint8_t x) {
        return f16_to_float((uint16_t)(x << 8));
}

static __device__ __forceinline__ float f16_at(const uint8_t *at) {
        return f16_to_float((uint16_t)(at[0] | at[1] << 8));
}

/* What a code stands for. scales: those of the row. */
static __device__ __forceinline__ float decode(uint32_t code, const uint8_t *scales, uint32_t d) {
        const uint8_t *at = scales + d / KVD_GROUP * KVD_SCALE_BYTES;

        return fmaf((float)code, f16_at(at), f16_at(at + 2));
}

/* Element d of a row of dim numbers, as it is stored. */
template <int NUMBER>
static __device__ __forceinline__ float row_number(const uint8_t *row, uint32_t d, uint32_t dim) {
        if constexpr (NUMBER == NUMBER_Q8)
                return decode(row[d], row + dim, d);
        else if constexpr (NUMBER == NUMBER_Q4)
                return decode(row[d / 2] >> d % 2 * 4 & 15, row + dim / 2, d);
        else if constexpr (NUMBER == NUMBER_E4M3)
                return e4m3_to_float(row[d]);
        else if constexpr (NUMBER == NUMBER_E5M2)
                return e5m2_to_float(row[d]);
        else
                return element<NUMBER>::wide(
                        reinterpret_cast<const typename element<NUMBER>::type *>(row)[d]);
}

/* The same of a type of less than 16 bits. */
static __device__ __forceinline__ float narrow_number(const uint8_t *row, uint32_t d, uint32_t dim,
                                                      uint32_t number) {
        return number == NUMBER_Q8   ? row_number<NUMBER_Q8>(row, d, dim)
               : number == NUMBER_Q4 ? row_number<NUMBER_Q4>(row, d, dim)
               : number == NUMBER_E4M3 ? row_number<NUMBER_E4M3>(row, d, dim)
                                       : row_number<NUMBER_E5M2>(row, d, dim);
}

/* Elements i to i + 3 of such a row, as floats; zeros from end on. */
static __device__ __forceinline__ uint4 load_narrow(const uint8_t *row, uint32_t i, uint32_t end,
                                                    uint32_t dim, uint32_t number) {
        uint32_t words[4];

#pragma unroll
        for (int k = 0; k < 4; k++)
                words[k] = i + k < end ? __float_as_uint(narrow_number(row, i + k, dim, number)) : 0;
        return make_uint4(words[0], words[1], words[2], words[3]);
}

/* ---- the transform --------------------------------------------------------------------------- */

/* The base-2 logarithm of the size of the part that number i of a group of n belongs to. */
static __device__ __forceinline__ uint32_t part_of(uint32_t i, uint32_t n) {
        return i < n ? 31 - __clz((int)(i ^ n)) : 0;
}

static __device__ __forceinline__ float with_sign(float x, uint32_t i, uint32_t part) {
        return TURN_SIGNS >> (i & ((1u << part) - 1)) & 1 ? -x : x;
}

/* The sum or the difference with the number whose index differs in that bit, if both are of one part. */
static __device__ __forceinline__ float turn_step(float x, uint32_t bit, uint32_t part) {
        float other = warp_xor(x, 1 << bit);

        return bit >= part ? x : lane_id() >> bit & 1 ? other - x : x + other;
}

/*
 * Transforms a group of n <= 64 numbers with the bits of kernels/turn.h. Lane i has numbers i and
 * i + 32; those beyond n mean nothing.
 */
static __device__ __forceinline__ void turn_group(float *low, float *high, uint32_t n) {
        uint32_t lane = lane_id(), of_low = part_of(lane, n), of_high = part_of(lane + 32, n);
        float x = with_sign(*low, lane, of_low), y = with_sign(*high, lane + 32, of_high), sum;

#pragma unroll
        for (uint32_t bit = 0; bit < 5; bit++) {
                x = turn_step(x, bit, of_low);
                y = turn_step(y, bit, of_high);
        }
        sum = x + y;
        y = n == KVD_GROUP ? x - y : y;
        x = n == KVD_GROUP ? sum : x;
        *low = with_sign(x * (1.0f / sqrtf((float)(1u << of_low))), lane, of_low);
        *high = with_sign(y * (1.0f / sqrtf((float)(1u << of_high))), lane + 32, of_high);
}

/* Transforms a row in a warp's shared memory. */
static __device__ __forceinline__ void turn_row(float *row, uint32_t dim) {
        __syncwarp();
        for (uint32_t d = 0; d < dim; d += KVD_GROUP) {
                uint32_t i = d + lane_id(), j = i + 32;
                float low = i < dim ? row[i] : 0.0f, high = j < dim ? row[j] : 0.0f;

                turn_group(&low, &high, min(dim - d, KVD_GROUP));
                if (i < dim)
                        row[i] = low;
                if (j < dim)
                        row[j] = high;
        }
        __syncwarp();
}

#endif
