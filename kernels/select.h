/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_SELECT_H
#define KVD_KERNELS_SELECT_H

/*
 * Finding the k-th largest of many scores, and those that reach a bound. Scores are looked for as
 * numbers that grow with them, by halves: how many are in the upper half of what is left? A look at
 * all of them is a comparison and an addition for 16 at a time, and where scores differ it takes
 * some more than log2(n) looks.
 */

#include "ipc/base/util.h"
#include "kernels/lanes.h"

#define ORDER_LEAST 0x007fffffu /* of what is a number: -inf */

/* Unsigned, and 0 for NaN; -0 is 0. */
KERNEL uint32_t order_of(float score) {
        float positive_zero = score + 0.0f;
        uint32_t bits, flip;

        memcpy(&bits, &positive_zero, sizeof bits);
        flip = (uint32_t)((int32_t)bits >> 31) | 0x80000000u;
        return score != score ? 0 : bits ^ flip;
}

/* The least score of that order or above. */
KERNEL float score_of(uint32_t order) {
        uint32_t bits = MAX(order, ORDER_LEAST);
        float score;

        bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
        memcpy(&score, &bits, sizeof score);
        return score;
}

/* The largest: all that are from or above; or, if not all that are from are wanted, so many. */
struct cut {
        uint32_t from, some;
};

KERNEL uint32_t count_from(const uint32_t *order, uint32_t n, uint32_t bound) {
        uint32_t count = 0;

        for (uint32_t i = 0; i < n; i++)
                count += order[i] >= bound;
        return count;
}

/* Of the k largest, k from 1 to n; or of up to k + slack. */
KERNEL struct cut cut_of(const uint32_t *order, uint32_t n, uint32_t k, uint32_t slack) {
        uint32_t low = UINT32_MAX, high = 0, larger = 0;

        for (uint32_t i = 0; i < n; i++) {
                low = MIN(low, order[i]);
                high = MAX(high, order[i]);
        }
        while (low < high) {
                uint32_t middle = low + (high - low) / 2 + 1, count = count_from(order, n, middle);

                if (count - k <= slack)
                        return (struct cut){middle, 0};
                if (count > k) {
                        low = middle;
                } else {
                        high = middle - 1;
                        larger = count;
                }
        }
        return (struct cut){low, k - larger};
}

#if defined(KVD_ISA_AVX512)

/*
 * Not compressed while it is stored, which takes some processors 100 cycles. Most often few are
 * found, and a short store seldom lies across two lines.
 */
KERNEL uint32_t store_found(uint32_t *to, const float *x, float bound, __m512i index) {
        uint32_t found = _cvtmask16_u32(
                _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_set1_ps(bound), _CMP_GE_OQ));
        __m512i indices = _mm512_maskz_compress_epi32((__mmask16)found, index);
        uint32_t count = (uint32_t)_mm_popcnt_u32(found);

        if (count <= 4)
                _mm_storeu_si128((void *)to, _mm512_castsi512_si128(indices));
        else
                _mm512_storeu_si512(to, indices);
        return count;
}

#endif

/*
 * The indices of those of x that are at least bound, ascending; NaN is not. Returns how many, which
 * must be room at most.
 */
KERNEL uint32_t collect(uint32_t *to, uint32_t room, const float *x, uint32_t n, float bound) {
        uint32_t m = 0, i = 0;

#if defined(KVD_ISA_AVX512)
        __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

        for (; n - i >= 2 * KVD_LANES && room - m >= 2 * KVD_LANES; i += 2 * KVD_LANES) {
                m += store_found(to + m, x + i, bound, index);
                index = _mm512_add_epi32(index, _mm512_set1_epi32(KVD_LANES));
                m += store_found(to + m, x + i + KVD_LANES, bound, index);
                index = _mm512_add_epi32(index, _mm512_set1_epi32(KVD_LANES));
        }
#elif defined(KVD_ISA_AVX2)
        for (; n - i >= 32; i += 32) {
                uint32_t found = 0;

                for (uint32_t j = 0; j < 32; j += 8)
                        found |= (uint32_t)_mm256_movemask_ps(
                                         _mm256_cmp_ps(_mm256_loadu_ps(x + i + j),
                                                       _mm256_set1_ps(bound), _CMP_GE_OQ))
                                 << j;
                for (; found; found &= found - 1)
                        to[m++] = i + (uint32_t)__builtin_ctz(found);
        }
#endif
        for (; i < n && m < room; i++) {
                to[m] = i;
                m += x[i] >= bound;
        }
        return m;
}

#endif
