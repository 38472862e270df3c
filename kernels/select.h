/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_SELECT_H
#define KVD_KERNELS_SELECT_H

/*
 * Finding the k-th largest of many scores, and those that reach a bound. Scores are mapped to
 * integers that ascend with them ("orders"), and the k-th is found by bisection: how many are in
 * the upper half of the remaining range? One step over all scores is a comparison and an addition
 * per 16 of them.
 */

#include "ipc/base/util.h"
#include "kernels/lanes.h"

#define ORDER_LEAST 0x007fffffu /* order of -inf, the least score that is not NaN */

/* The order of a score, given its bits: unsigned, 0 for NaN; -0 counts as 0. */
KERNEL uint32_t order_of(uint32_t bits) {
        uint32_t ordered;

        bits = bits == 0x80000000u ? 0 : bits;
        ordered = bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
        return (bits & 0x7fffffff) > 0x7f800000 ? 0 : ordered;
}

/* The least score whose order is at least order. */
KERNEL float score_of(uint32_t order) {
        uint32_t bits = MAX(order, ORDER_LEAST);
        float score;

        bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
        memcpy(&score, &bits, sizeof score);
        return score;
}

#define FEW 32u

/*
 * A selection of the largest orders: if some is 0, all that are at least from; else all above from
 * and some of those equal to from.
 */
struct cut {
        uint32_t from, some;
};

KERNEL uint32_t count_from(const uint32_t *order, uint32_t n, uint32_t bound) {
        uint32_t count = 0;

        for (uint32_t i = 0; i < n; i++)
                count += order[i] >= bound;
        return count;
}

/* Copies the orders from low to high, at most FEW. Of 16 orders, usually none matches. */
KERNEL uint32_t bring_few(uint32_t *to, const uint32_t *order, uint32_t n, uint32_t low,
                          uint32_t high) {
        uint32_t m = 0;

        for (uint32_t i = 0; i < n; i += 16) {
                uint32_t end = MIN(i + 16, n), any = 0;

                for (uint32_t j = i; j < end; j++)
                        any |= order[j] - low <= high - low;
                for (uint32_t j = i; any && j < end; j++)
                        if (order[j] - low <= high - low)
                                to[m++] = order[j];
        }
        return m;
}

/*
 * The cut of the k largest, 1 <= k <= n, or of k to k + slack of them. Once only FEW candidates
 * remain, only they are looked at.
 */
KERNEL struct cut cut_of(const uint32_t *order, uint32_t n, uint32_t k, uint32_t slack) {
        uint32_t few[FEW], low = UINT32_MAX, high = 0, reach_low = n, above_high = 0, above_few = 0;

        for (uint32_t i = 0; i < n; i++) {
                low = MIN(low, order[i]);
                high = MAX(high, order[i]);
        }
        while (low < high) {
                uint32_t middle = low + (high - low) / 2 + 1, count;

                if (n > FEW && reach_low - above_high <= FEW) {
                        n = bring_few(few, order, n, low, high);
                        order = few;
                        above_few = above_high;
                }
                count = above_few + count_from(order, n, middle);
                if (count - k <= slack)
                        return (struct cut){middle, 0};
                if (count > k) {
                        low = middle;
                        reach_low = count;
                } else {
                        high = middle - 1;
                        above_high = count;
                }
        }
        return (struct cut){low, k - above_high};
}

/*
 * Stores the indices of the k orders that a cut selects, ascending; of those equal to cut.from, the
 * first skip are passed over. Never writes beyond indices[k - 1]: the loop ends with the k-th.
 */
KERNEL void choose(uint32_t *indices, const uint32_t *order, uint32_t k, struct cut cut,
                   uint32_t skip) {
        uint32_t some = cut.some ? cut.some : k, equal = 0, taken = 0;

        for (uint32_t i = 0; taken < k; i++) {
                indices[taken] = i;
                taken += order[i] > cut.from;
                if (unlikely(order[i] == cut.from))
                        taken += equal++ - skip < some;
        }
}

/* ---- collecting ---- */

/* Bit i is set if score i of 64 is at least bound; it is not for NaN. */
#if defined(KVD_ISA_AVX512)

KERNEL uint64_t reached(const float *x, float bound) {
        __m512 least = _mm512_set1_ps(bound);
        uint64_t word = 0;

        for (uint32_t i = 0; i < 4; i++)
                word |= (uint64_t)_mm512_cmp_ps_mask(_mm512_loadu_ps(x + 16 * i), least, _CMP_GE_OQ)
                        << (16 * i);
        return word;
}

#elif defined(KVD_ISA_AVX2)

/* Packing works within each half of a register, so the order 0 4 1 5 2 6 3 7 has to be restored. */
KERNEL uint32_t reached_32(const float *x, __m256 least) {
        __m256i of[4];

        for (uint32_t i = 0; i < 4; i++)
                of[i] = _mm256_castps_si256(
                        _mm256_cmp_ps(_mm256_loadu_ps(x + 8 * i), least, _CMP_GE_OQ));
        of[0] = _mm256_packs_epi16(_mm256_packs_epi32(of[0], of[1]),
                                   _mm256_packs_epi32(of[2], of[3]));
        return (uint32_t)_mm256_movemask_epi8(
                _mm256_permutevar8x32_epi32(of[0], _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

KERNEL uint64_t reached(const float *x, float bound) {
        __m256 least = _mm256_set1_ps(bound);

        return reached_32(x, least) | (uint64_t)reached_32(x + 32, least) << 32;
}

#elif defined(KVD_ISA_NEON)

KERNEL uint16x8_t reached_8(const float *x, float32x4_t least) {
        return vcombine_u16(vmovn_u32(vcgeq_f32(vld1q_f32(x), least)),
                            vmovn_u32(vcgeq_f32(vld1q_f32(x + 4), least)));
}

KERNEL uint64_t reached_16(const float *x, float32x4_t least) {
        static const uint8_t bit[] = {1, 2, 4, 8, 16, 32, 64, 128};
        uint8x8_t low = vand_u8(vmovn_u16(reached_8(x, least)), vld1_u8(bit)),
                  high = vand_u8(vmovn_u16(reached_8(x + 8, least)), vld1_u8(bit));

        return vaddv_u8(low) | (uint64_t)vaddv_u8(high) << 8;
}

KERNEL uint64_t reached(const float *x, float bound) {
        float32x4_t least = vdupq_n_f32(bound);
        uint64_t word = 0;

        for (uint32_t i = 0; i < 64; i += 16)
                word |= reached_16(x + i, least) << i;
        return word;
}

#else

KERNEL uint64_t reached(const float *x, float bound) {
        uint64_t word = 0;

        for (uint32_t i = 0; i < 64; i++)
                word |= (uint64_t)(x[i] >= bound) << i;
        return word;
}

#endif

KERNEL uint32_t put_bits(uint32_t *to, uint64_t word, uint32_t first) {
        uint32_t m = 0;

        for (; word; word &= word - 1)
                to[m++] = first + (uint32_t)__builtin_ctzll(word);
        return m;
}

/* Most words have few bits set: four indices are always written, whether or not they exist. */
KERNEL uint32_t put_few_bits(uint32_t *to, uint64_t word, uint32_t first) {
        uint32_t m = (uint32_t)__builtin_popcountll(word);

        for (uint32_t i = 0; i < 4; i++, word &= word - 1)
                to[i] = first + (uint32_t)__builtin_ctzll(word | UINT64_C(1) << 63);
        if (unlikely(m > 4))
                put_bits(to + 4, word, first);
        return m;
}

#define COLLECT_AHEAD 1024u /* scores to prefetch ahead */

/*
 * Stores the indices of the elements of x that are at least bound (NaN is not), ascending, at most
 * room of them. Returns their number.
 */
KERNEL uint32_t collect(uint32_t *to, uint32_t room, const float *x, uint32_t n, float bound) {
        uint32_t m = 0, i = 0;

        for (; n - i >= 64; i += 64) {
                uint64_t word;

                lanes_expect(x + i + COLLECT_AHEAD, 64 * sizeof *x);
                word = reached(x + i, bound);
                m += room - m >= 4 ? put_few_bits(to + m, word, i) : put_bits(to + m, word, i);
        }
        for (; i < n && m < room; i++) {
                to[m] = i;
                m += x[i] >= bound;
        }
        return m;
}

#endif
