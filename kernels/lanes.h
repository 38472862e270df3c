/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_LANES_H
#define KVD_KERNELS_LANES_H

/*
 * Sixteen floats side by side, in terms of which the methods' files are written. Each such file is
 * compiled once for each instruction set, with KVD_ISA_SCALAR, KVD_ISA_AVX2, KVD_ISA_AVX512 or
 * KVD_ISA_NEON defined, and exports KVD_VARIANT(its table). Every operation gives the same bits in all of them
 * (a NaN stays a NaN, with unspecified payload), so the variants of a method are equal because its
 * steps are. Only lanes_fma fuses a multiply-add.
 *
 *   lanes_set     lanes_constant  a number in all lanes; kept in a register, for many operations in a row
 *   lanes_held                    kept in registers for all its uses, even where registers are scarce
 *   lanes_load    lanes_load_n    16 floats; n < 16 floats, the other lanes are 0. No byte beyond n is read or
 *   lanes_store   lanes_store_n   written, here and below. No alignment is needed.
 *   lanes_widen   lanes_widen_n   the same from memory of a type; exact
 *   lanes_widen_2                 32 elements into two lanes at the least cost, not in order: see lanes_place_2
 *   lanes_narrow  lanes_narrow_n  the same to memory of a type of 16 or 32 bits; to nearest, ties to even
 *   lanes_first                   of lanes, the first n < 16; the others are 0
 *   lanes_codes   lanes_codes_n   16 codes of a quantised type, or n < 16 (an even number); see kernels/rows.h
 *   lanes_codes_2                 32 codes, in the order of lanes_place_2
 *   lanes_scale_at lanes_decode   the scale of a group, and the numbers that its codes stand for: fma(code, scale, least)
 *   lanes_stream  lanes_fence     to an address aligned to 64 bytes, past the caches; visible to others after the fence
 *   lanes_min     lanes_max       a < b ? a : b and a > b ? a : b: b if either is a NaN
 *   lanes_round                   to the nearest integer, ties to even
 *   lanes_select_less             a < b ? x : y
 *   lanes_spoil                   x, or NaN where a or b is
 *   lanes_sum                     j + (j + 8), then 4, 2, 1: the order of kernels/ops.h
 *   lanes_sum_16 ...              the sums (largest, least) of 16 vectors, side by side
 *   lanes_largest lanes_least     lanes_max and lanes_min in the same tree
 *   lanes_exp     lanes_exps      e^x, of up to two interleaved: see kernels/variants.h; 0 below -87, e^88 above 88
 *
 * type is a compile-time constant wherever it is passed: in a KERNEL body that is called from a
 * switch, rows cost no branch on it.
 */

#include <math.h>
#include <string.h>

#include "kernels/variants.h"

#define KVD_LANES 16

/* Whether an element is a number of 8 bits. */
KERNEL bool lanes_are_bytes(enum kvd_number type) {
        return type == KVD_NUMBER_E4M3 || type == KVD_NUMBER_E5M2;
}

/* Bytes of 16 elements. */
KERNEL size_t lanes_bytes(enum kvd_number type) {
        return type == KVD_NUMBER_F32 ? 64 : lanes_are_bytes(type) ? 16 : 32;
}

/* Whether lanes_widen_2 gives the even elements first, then the odd ones. */
KERNEL bool lanes_splits(enum kvd_number type) {
        return type == KVD_NUMBER_BF16 || type == KVD_NUMBER_Q4;
}

/* Where lanes_widen_2 puts element i of 32: lane place % 16 of its first or second result. */
KERNEL uint32_t lanes_place_2(uint32_t i, enum kvd_number type) {
        return lanes_splits(type) ? i % 2 * KVD_LANES + i / 2 : i;
}

/*
 * Where element d of a row lies if the row is widened by lanes_widen_2 as far as possible, then by
 * lanes_widen.
 */
KERNEL uint32_t lanes_place(uint32_t d, uint32_t dim, enum kvd_number type) {
        return d < dim / 32 * 32 ? d / 32 * 32 + lanes_place_2(d % 32, type) : d;
}

#if defined(KVD_ISA_AVX512)
#define KVD_VARIANT(name) name##_avx512
#define KVD_ISA_NAME "avx512"
#include "kernels/lanes_avx512.h"
#elif defined(KVD_ISA_AVX2)
#define KVD_VARIANT(name) name##_avx2
#define KVD_ISA_NAME "avx2"
#include "kernels/lanes_avx2.h"
#elif defined(KVD_ISA_NEON)
#define KVD_VARIANT(name) name##_neon
#define KVD_ISA_NAME "neon"
#include "kernels/lanes_neon.h"
#elif defined(KVD_ISA_SCALAR)
#define KVD_VARIANT(name) name##_scalar
#define KVD_ISA_NAME "scalar"
#include "kernels/lanes_scalar.h"
#else
#error "one of KVD_ISA_SCALAR, KVD_ISA_AVX2, KVD_ISA_AVX512, KVD_ISA_NEON"
#endif

/* Bytes of an element that is not quantised. */
KERNEL size_t number_size(enum kvd_number type) {
        return lanes_bytes(type) / KVD_LANES;
}

/*
 * Prefetches to the second-level cache: the first level allows too few outstanding misses to keep
 * the memory busy.
 */
KERNEL void lanes_expect(const void *from, size_t bytes) {
        for (size_t at = 0; at < bytes; at += 64)
                __builtin_prefetch((const char *)from + at, 0, 2);
}

/* For n up to 16 inclusive. */
KERNEL lanes lanes_load_to(const float *from, uint32_t n) {
        return n < KVD_LANES ? lanes_load_n(from, n) : lanes_load(from);
}

KERNEL void lanes_store_to(float *to, lanes a, uint32_t n) {
        if (n < KVD_LANES)
                lanes_store_n(to, a, n);
        else
                lanes_store(to, a);
}

KERNEL lanes lanes_widen_to(const void *from, uint32_t n, enum kvd_number type) {
        return n < KVD_LANES ? lanes_widen_n(from, n, type) : lanes_widen(from, type);
}

KERNEL void lanes_narrow_to(void *to, lanes a, uint32_t n, enum kvd_number type) {
        if (n < KVD_LANES)
                lanes_narrow_n(to, a, n, type);
        else
                lanes_narrow(to, a, type);
}

/* x = n ln 2 + r; n is in the low bits of shifted. */
KERNEL void lanes_exp_split(lanes *r, lanes *shifted, const lanes *x, int n) {
        lanes log2e = lanes_constant(EXP_LOG2E), shift = lanes_constant(EXP_SHIFT),
              high = lanes_constant(-EXP_LN2_HIGH), low = lanes_constant(-EXP_LN2_LOW);

        for (int i = 0; i < n; i++)
                shifted[i] = lanes_fma(x[i], log2e, shift);
        for (int i = 0; i < n; i++) {
                lanes whole = lanes_sub(shifted[i], shift);

                r[i] = lanes_fma(whole, low, lanes_fma(whole, high, x[i]));
        }
}

/* Interleaved: while one waits for an operation, the other executes it, with the same constant. */
KERNEL void lanes_exps(lanes *x, int n) {
        const float factors[] = {EXP_C4, EXP_C3, EXP_C2, EXP_C1, EXP_C0};
        lanes r[2], shifted[2], p[2], c = lanes_constant(EXP_HIGH);

        for (int i = 0; i < n; i++) {
                x[i] = lanes_min(c, x[i]);
                p[i] = lanes_constant(EXP_C5);
        }
        lanes_exp_split(r, shifted, x, n);
        for (int k = 0; k < 5; k++) {
                c = lanes_constant(factors[k]);
                for (int i = 0; i < n; i++)
                        p[i] = lanes_fma(p[i], r[i], c);
        }
        c = lanes_constant(1.0f);
        for (int i = 0; i < n; i++) {
                p[i] = lanes_fma(p[i], lanes_mul(r[i], r[i]), lanes_add(r[i], c));
                p[i] = lanes_mul(p[i], lanes_power(shifted[i]));
                x[i] = lanes_select_less(x[i], lanes_set(EXP_LOW), lanes_zero(), p[i]);
        }
}

KERNEL lanes lanes_exp(lanes x) {
        lanes_exps(&x, 1);
        return x;
}

#endif
