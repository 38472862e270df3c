/* SPDX-License-Identifier: Apache-2.0 */

/*
 * HShare's kernels that find tokens and compare sets of them; compiled once for each instruction
 * set.
 *
 * The top: most scores are far from it. The largest of each of 2 z groups are found first; z of
 * them reach a bound, so at least z scores do, and most often not half as many again. A second pass
 * collects those, and only they are ranked.
 */

#include "kernels/hshare_select.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/block.h"
#include "kernels/select.h"


/* ---- one score for a group of heads ---- */

KERNEL lanes load_padded(const float *x, uint32_t n, uint32_t i) {
        float tail[KVD_LANES];

        if (n - i >= KVD_LANES)
                return lanes_load(x + i);
        for (uint32_t j = 0; j < KVD_LANES; j++)
                tail[j] = j < n - i ? x[i + j] : -INFINITY;
        return lanes_load(tail);
}

KERNEL void store_some(float *to, lanes a, uint32_t n, uint32_t i) {
        if (n - i >= KVD_LANES)
                lanes_store(to + i, a);
        else
                lanes_store_n(to + i, a, n - i);
}

/* x = e^(scale x - the largest), -inf where x is; returns the sum. */
KERNEL float weights_of(float *x, uint32_t n, float scale) {
        lanes most = lanes_set(-INFINITY), sum = lanes_zero();

        for (uint32_t i = 0; i < n; i += KVD_LANES)
                most = lanes_max(load_padded(x, n, i), most);
        most = lanes_set(-(lanes_largest(most) * scale));
        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                lanes xi = load_padded(x, n, i),
                      e = lanes_exp(lanes_fma(xi, lanes_set(scale), most));

                sum = lanes_add(sum, e);
                store_some(x, lanes_select_less(xi, lanes_set(-FLT_MAX), xi, e), n, i);
        }
        return lanes_sum(sum);
}

void KVD_VARIANT(kvd_hshare_aggregate)(float *to, float *scores, size_t ld, uint32_t n,
                                       uint32_t group, float scale, enum kvd_aggregate how) {
        if (group == 1)
                memcpy(to, scores, n * sizeof *to);
        for (uint32_t g = 0; g < group && group > 1; g++) {
                float *x = scores + g * ld;
                lanes part = lanes_set(1.0f / weights_of(x, n, scale));

                for (uint32_t i = 0; i < n; i += KVD_LANES) {
                        lanes weight = lanes_mul(load_padded(x, n, i), part), before;

                        before = g == 0 ? lanes_zero() : load_padded(to, n, i);
                        weight = how == KVD_AGGREGATE_SUM || g == 0 ? lanes_add(before, weight) :
                                                                      lanes_max(before, weight);
                        store_some(to, weight, n, i);
                }
        }
}

/* ---- the top ---- */

/* The largest of each group of so many, 16 groups side by side; returns how many there are. */
static uint32_t group_largest(float *to, const float *x, uint32_t n, uint32_t group) {
        uint32_t groups = n / group / KVD_LANES * KVD_LANES;

        for (uint32_t i = 0; i < groups; i += KVD_LANES, x += (size_t)group * KVD_LANES) {
                lanes most = lanes_set(-INFINITY);

                for (uint32_t j = 0; j < group; j++)
                        most = lanes_max(lanes_load(x + (size_t)j * KVD_LANES), most);
                lanes_store(to + i, most);
        }
        return groups;
}

/* What at least z scores reach, and not many more; room for two numbers for each score. */
static float bound_of(const float *scores, uint32_t n, uint32_t z, uint32_t *room) {
        float *most = (float *)room;
        uint32_t *order = room + n, group = n / 2 / z, groups = 0;

        if (group >= 2)
                groups = group_largest(most, scores, n, group);
        if (groups < z)
                return -FLT_MAX;
        for (uint32_t i = 0; i < groups; i++)
                order[i] = order_of(most[i]);
        return MAX(score_of(cut_of(order, groups, z, z / 16).from), -FLT_MAX);
}

uint32_t KVD_VARIANT(kvd_hshare_top)(uint32_t *to, const float *scores, uint32_t n, uint32_t z,
                                     uint32_t first, uint32_t *scratch) {
        uint32_t *at = scratch, m;
        float *few = (float *)(scratch + n);

        if (z == 0 || n == 0)
                return 0;
        m = collect(at, n, scores, n, bound_of(scores, n, z, scratch));
        for (uint32_t i = 0; i < m; i++)
                few[i] = scores[at[i]];
        m = KVD_VARIANT(kvd_block).topk(to, few, m, z, false, scratch + 2 * (size_t)n);
        for (uint32_t i = 0; i < m; i++)
                to[i] = first + at[to[i]];
        return m;
}

/* ---- sets ---- */

#if defined(KVD_ISA_AVX512)

__attribute__((target("avx512vpopcntdq"))) static uint32_t common_counted(const uint64_t *a,
                                                                          const uint64_t *b,
                                                                          uint32_t words) {
        __m512i sum = _mm512_setzero_si512();

        for (uint32_t w = 0; w < words; w += 8) {
                __mmask8 there = words - w >= 8 ? 0xff : (__mmask8)((1u << (words - w)) - 1);
                __m512i both = _mm512_and_si512(_mm512_maskz_loadu_epi64(there, a + w),
                                                _mm512_maskz_loadu_epi64(there, b + w));

                sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(both));
        }
        return (uint32_t)_mm512_reduce_add_epi64(sum);
}

#endif

#if defined(KVD_ISA_SCALAR)

static uint32_t common(const uint64_t *a, const uint64_t *b, uint32_t words) {
        uint32_t sum = 0;

        for (uint32_t w = 0; w < words; w++)
                sum += (uint32_t)__builtin_popcountll(a[w] & b[w]);
        return sum;
}

#else

/* Bits of both halves of each byte from a table of 16; _mm256_sad_epu8 adds up the bytes. */
static uint32_t common(const uint64_t *a, const uint64_t *b, uint32_t words) {
        const __m256i nibble = _mm256_set1_epi8(15);
        const __m256i bits = _mm256_broadcastsi128_si256(
                _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
        __m256i sum = _mm256_setzero_si256();
        uint64_t parts[4];
        uint32_t w = 0, rest = 0;

        for (; w + 4 <= words; w += 4) {
                __m256i both = _mm256_and_si256(_mm256_loadu_si256((const void *)(a + w)),
                                                _mm256_loadu_si256((const void *)(b + w)));
                __m256i low = _mm256_shuffle_epi8(bits, _mm256_and_si256(both, nibble));
                __m256i high = _mm256_shuffle_epi8(
                        bits, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));

                sum = _mm256_add_epi64(
                        sum, _mm256_sad_epu8(_mm256_add_epi8(low, high), _mm256_setzero_si256()));
        }
        for (; w < words; w++)
                rest += (uint32_t)__builtin_popcountll(a[w] & b[w]);
        _mm256_storeu_si256((void *)parts, sum);
        return rest + (uint32_t)(parts[0] + parts[1] + parts[2] + parts[3]);
}

#endif

void KVD_VARIANT(kvd_hshare_overlap)(uint32_t *to, const uint64_t *a, const uint64_t *b,
                                     uint32_t rows, uint32_t words) {
        uint32_t (*count)(const uint64_t *, const uint64_t *, uint32_t) = common;

#if defined(KVD_ISA_AVX512)
        if (__builtin_cpu_supports("avx512vpopcntdq"))
                count = common_counted;
#endif
        for (uint32_t r = 0; r < rows; r++)
                to[r] = count(a + (size_t)r * words, b + (size_t)r * words, words);
}

/* ---- calibration ---- */

KERNEL void weigh_lane(float *weights, const float *q, size_t ldq, uint32_t group, uint32_t dim,
                       const void *k, size_t stride, uint32_t n, uint32_t lane,
                       enum kvd_number type) {
        lanes sum = lanes_load_n(weights, lane);

        for (uint32_t i = 0; i < n; i++) {
                lanes ki = lanes_widen_n(number_at(k, i * stride, type), lane, type);

                for (uint32_t g = 0; g < group; g++) {
                        lanes qi = lanes_load_n(q + i * ldq + (size_t)g * dim, lane);

                        sum = lanes_add(sum, lanes_abs(lanes_mul(qi, ki)));
                }
        }
        lanes_store_n(weights, sum, lane);
}

/* Half the lanes at a time: for a calibration that runs once, one path is enough. */
KERNEL void weigh_type(float *weights, const float *q, size_t ldq, uint32_t group, const void *k,
                       size_t stride, uint32_t n, uint32_t dim, enum kvd_number type) {
        for (uint32_t d = 0; d < dim; d += 8)
                weigh_lane(weights + d, q + d, ldq, group, dim, number_at(k, d, type), stride, n,
                           MIN(8, dim - d), type);
}

void KVD_VARIANT(kvd_hshare_weigh)(float *weights, const float *q, size_t ldq, uint32_t group,
                                   const void *k, size_t stride, enum kvd_number type, uint32_t n,
                                   uint32_t dim) {
        if (type == KVD_NUMBER_F32)
                weigh_type(weights, q, ldq, group, k, stride, n, dim, KVD_NUMBER_F32);
        else if (type == KVD_NUMBER_F16)
                weigh_type(weights, q, ldq, group, k, stride, n, dim, KVD_NUMBER_F16);
        else
                weigh_type(weights, q, ldq, group, k, stride, n, dim, KVD_NUMBER_BF16);
}
