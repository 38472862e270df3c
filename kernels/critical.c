/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels that find critical tokens, and compare sets of them; compiled once for each instruction
 * set.
 *
 * Finding the top z: most scores are far below it. A sample gives a bound that at least z scores
 * very likely reach, and not many more. One pass collects those, and only they are ranked. If fewer
 * than z were collected, a bound that z scores certainly reach is computed from maxima of all
 * scores.
 */

#include "kernels/critical.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/block.h"
#include "kernels/rows.h"
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

/* x = e^(scale x - largest scale x), -inf where x is -inf; returns the sum. */
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

void KVD_VARIANT(kvd_critical_aggregate)(float *to, float *scores, size_t ld, uint32_t n,
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

/* The sample: the first RUN of every STRIDE scores, at most DEPTH of them per maximum. */
#define STRIDE 512u
#define RUN 32u
#define DEPTH 8u

/*
 * Stores the orders (order_of) of maxima of depth scores each, of the first run of every stride
 * scores. Returns their number.
 */
KERNEL uint32_t maxima(uint32_t *to, const float *scores, uint32_t n, uint32_t stride, uint32_t run,
                       uint32_t depth) {
        uint32_t per = run / KVD_LANES, m = n / stride * per / depth * KVD_LANES, row = 0;

        for (uint32_t i = 0; i < m; i += KVD_LANES) {
                lanes most = lanes_set(-INFINITY);

                for (uint32_t d = 0; d < depth; d++, row++)
                        most = lanes_max(lanes_load(scores + (size_t)(row / per) * stride +
                                                    row % per * KVD_LANES),
                                         most);
                lanes_store((float *)(to + i), most);
        }
        for (uint32_t i = 0; i < m; i++)
                to[i] = order_of(to[i]);
        return m;
}

/*
 * The number of m such maxima that reach the z-th largest of n scores: expectation plus two
 * standard deviations.
 */
static uint32_t maxima_above(uint32_t m, uint32_t n, uint32_t z, uint32_t depth) {
        float none = powf(1 - (float)z / (float)n, (float)depth), all = (float)m;

        return (uint32_t)(all * (1 - none) + 2 * sqrtf(all * none * (1 - none))) + 1;
}

/* The k-th largest of m, or a slightly smaller bound; -FLT_MAX if there are fewer than k. */
static float bound_of(const uint32_t *order, uint32_t m, uint32_t k) {
        return k > m ? -FLT_MAX : MAX(score_of(cut_of(order, m, k, k / 16).from), -FLT_MAX);
}

/* A bound that at least z scores very likely reach. */
static float likely_bound(const float *scores, uint32_t n, uint32_t z, uint32_t *room) {
        uint32_t depth = MIN(MAX(n / 2 / z, 1), DEPTH), m;

        for (uint32_t i = 0; i < n; i += STRIDE)
                lanes_expect(scores + i, MIN(RUN, n - i) * sizeof *scores);
        m = maxima(room, scores, n, STRIDE, RUN, depth);
        return bound_of(room, m, maxima_above(m, n, z, depth));
}

/* A bound that at least z scores certainly reach, because z maxima reach it. */
static float sure_bound(const float *scores, uint32_t n, uint32_t z, uint32_t *room) {
        uint32_t depth = n / 2 / z;

        return depth ? bound_of(room, maxima(room, scores, n, KVD_LANES, KVD_LANES, depth), z) :
                       -FLT_MAX;
}

uint32_t KVD_VARIANT(kvd_critical_top)(uint32_t *to, const float *scores, uint32_t n, uint32_t z,
                                       uint32_t first, uint32_t *scratch) {
        uint32_t *at = scratch, *order = scratch + n, m;

        z = MIN(z, n);
        if (z == 0)
                return 0;
        m = collect(at, n, scores, n, likely_bound(scores, n, z, order));
        if (m < z)
                m = collect(at, n, scores, n, sure_bound(scores, n, z, order));
        z = MIN(z, m);
        for (uint32_t i = 0; i < m; i++)
                memcpy(&order[i], &scores[at[i]], sizeof *order);
        for (uint32_t i = 0; i < m; i++)
                order[i] = order_of(order[i]);
        if (z)
                choose(to, order, z, cut_of(order, m, z, 0), 0);
        for (uint32_t i = 0; i < z; i++)
                to[i] = first + at[to[i]];
        return z;
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

#if defined(KVD_ISA_AVX2) || defined(KVD_ISA_AVX512)

/*
 * Counts the bits of both halves of each byte with a table of 16; _mm256_sad_epu8 adds up the
 * bytes.
 */
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
                __m256i high =
                        _mm256_shuffle_epi8(bits,
                                            _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));

                sum = _mm256_add_epi64(sum, _mm256_sad_epu8(_mm256_add_epi8(low, high),
                                                            _mm256_setzero_si256()));
        }
        for (; w < words; w++)
                rest += (uint32_t)__builtin_popcountll(a[w] & b[w]);
        _mm256_storeu_si256((void *)parts, sum);
        return rest + (uint32_t)(parts[0] + parts[1] + parts[2] + parts[3]);
}

#else

static uint32_t common(const uint64_t *a, const uint64_t *b, uint32_t words) {
        uint32_t sum = 0;

        for (uint32_t w = 0; w < words; w++)
                sum += (uint32_t)__builtin_popcountll(a[w] & b[w]);
        return sum;
}

#endif

void KVD_VARIANT(kvd_critical_overlap)(uint32_t *to, const uint64_t *a, const uint64_t *b,
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
                       const uint8_t *k, size_t stride, uint32_t n, uint32_t d,
                       enum kvd_number type) {
        uint32_t lane = MIN(8, dim - d);
        lanes sum = lanes_load_n(weights + d, lane);
        float room[2 * KVD_GROUP];

        for (uint32_t i = 0; i < n; i++) {
                const uint8_t *at = key_plain(room, k + i * stride, d, lane, dim, type);
                lanes ki = row_widen(at, 0, lane, lane, plain_type(type));

                for (uint32_t g = 0; g < group; g++) {
                        lanes qi = lanes_load_n(q + i * ldq + (size_t)g * dim + d, lane);

                        sum = lanes_add(sum, lanes_abs(lanes_mul(qi, ki)));
                }
        }
        lanes_store_n(weights + d, sum, lane);
}

/* Uses half of the lanes: calibration runs once, so one simple path is enough. */
KERNEL void weigh_type(float *weights, const float *q, size_t ldq, uint32_t group, const uint8_t *k,
                       size_t stride, uint32_t n, uint32_t dim, enum kvd_number type) {
        for (uint32_t d = 0; d < dim; d += 8)
                weigh_lane(weights, q, ldq, group, dim, k, stride, n, d, type);
}

void KVD_VARIANT(kvd_critical_weigh)(float *weights, const float *q, size_t ldq, uint32_t group,
                                     const void *k, size_t stride, enum kvd_number type, uint32_t n,
                                     uint32_t dim) {
        TYPED(type, weigh_type, weights, q, ldq, group, k, stride, n, dim);
}
