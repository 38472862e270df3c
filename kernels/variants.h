/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_VARIANTS_H
#define KVD_KERNELS_VARIANTS_H

/* Shared by the variants' files only. */

#include "kernels/ops.h"

/* For tiles: with constant sizes and full inlining, the accumulators stay in registers. */
#ifdef __CUDACC__
#define KERNEL static __device__ __forceinline__
#else
#define KERNEL static inline __attribute__((always_inline))
#endif

extern const struct kvd_ops kvd_ops_scalar;
#if defined(__x86_64__)
extern const struct kvd_ops kvd_ops_avx2;
extern const struct kvd_ops kvd_ops_avx512;
#elif defined(__aarch64__)
extern const struct kvd_ops kvd_ops_neon;
#endif

bool kvd_works_scalar(void);
bool kvd_works_avx2(void);
bool kvd_works_avx512(void);
bool kvd_works_neon(void);

void kvd_widen_scalar(float *to, const uint16_t *from, size_t n, enum kvd_number type);
void kvd_narrow_scalar(uint16_t *to, const float *from, size_t n, enum kvd_number type);
void kvd_widen_bytes_scalar(float *to, const uint8_t *from, size_t n, enum kvd_number type);

#define KVD_ROWS_OF(variant) \
        void kvd_write_row_##variant(void *row, const float *from, uint32_t dim, \
                                     enum kvd_number type); \
        void kvd_write_key_##variant(void *row, const float *from, uint32_t dim, \
                                     enum kvd_number type); \
        void kvd_read_row_##variant(float *to, const void *row, uint32_t dim, \
                                    enum kvd_number type); \
        void kvd_read_key_##variant(float *to, const void *row, uint32_t dim, enum kvd_number type);
KVD_ROWS_OF(scalar)
KVD_ROWS_OF(avx2)
KVD_ROWS_OF(avx512)
KVD_ROWS_OF(neon)
#undef KVD_ROWS_OF

/*
 * e^x, with the same steps in every variant: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for
 * e^r (Cephes expf, relative error below 2e-7), and 2^n assembled from its bits. Adding EXP_SHIFT
 * rounds to an integer and leaves n in the low bits of the sum. Below EXP_LOW the result is 0, so
 * that there are no subnormals; above EXP_HIGH it is e^EXP_HIGH.
 */
#define EXP_HIGH 88.0f
#define EXP_LOW -87.0f
#define EXP_LOG2E 1.44269504088896341f
#define EXP_SHIFT 12582912.0f
#define EXP_LN2_HIGH 0.693359375f
#define EXP_LN2_LOW -2.12194440e-4f
#define EXP_C5 1.9875691500e-4f
#define EXP_C4 1.3981999507e-3f
#define EXP_C3 8.3334519073e-3f
#define EXP_C2 4.1665795894e-2f
#define EXP_C1 1.6666665459e-1f
#define EXP_C0 5.0000001201e-1f
#define EXP_ONE 0x3f800000u

/* Signs around the transform of quantised keys (kernels/turn.h): the bits of pi. Bit i is number i's. */
#define TURN_SIGNS UINT64_C(0x243f6a8885a308d3)

#endif
