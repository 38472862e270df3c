/* SPDX-License-Identifier: Apache-2.0 */

/*
 * HShare's kernels; compiled once for each instruction set. The inner product of two labels is a
 * sum of small integers (at most 256 products of at most 225), exact in any order. A few fused
 * operations per token turn it into a score.
 */

#include "kernels/hshare.h"

#include <string.h>

#include "ipc/base/util.h"
#include "kernels/critical.h"
#include "kernels/lanes.h"

enum { QUERIES = 4, AHEAD = 256 }; /* labels to prefetch ahead */

/* Sums over the channels of 16 labels, one label a lane. */
struct products {
        lanes dot[QUERIES]; /* sum of code times the query's code */
        lanes sum;          /* sum of codes */
        lanes least, step;
};

/* ---- inner products of 16 labels of 32 channels with a few queries --------------------------- */

#if defined(KVD_ISA_AVX512)

/*
 * 16 labels of five dwords fill five registers. In register r, dword w of a label is in every fifth
 * lane, starting at lane (w - r) modulo 5. Over the five registers these are 16 distinct lanes,
 * since 5 and 16 have no common divisor: dword w of label t is in lane (5 t + w) modulo 16.
 */
struct fifths {
        __mmask16 from[5];
};

KERNEL struct fifths fifths(void) {
        struct fifths f = {{0x8421, 0x0842, 0x1084, 0x2108, 0x4210}};

        for (int i = 0; i < 5; i++)
                __asm__("" : "+k"(f.from[i])); /* otherwise every use would recompute it */
        return f;
}

/* Dword w of all labels, in the lanes where they lie. */
KERNEL __m512i dwords(const __m512i part[5], const struct fifths *f, int w) {
        __m512i found = part[0];

        for (int r = 1; r < 5; r++)
                found = _mm512_mask_mov_epi32(found, f->from[(w + 5 - r) % 5], part[r]);
        return found;
}

KERNEL __m512i column(const __m512i part[5], const struct fifths *f, int w) {
        const __m512i at = _mm512_setr_epi32(w, w + 5, w + 10, w + 15, w + 20, w + 25, w + 30,
                                             w + 35, w + 40, w + 45, w + 50, w + 55, w + 60, w + 65,
                                             w + 70, w + 75);

        return _mm512_permutexvar_epi32(at, dwords(part, f, w));
}

/* The last dword of each label: 16 times least, then 16 times step. */
KERNEL void ends(struct products *to, const __m512i part[5], const struct fifths *f) {
        const __m512i at = _mm512_set_epi16(159, 149, 139, 129, 119, 109, 99, 89, 79, 69, 59, 49,
                                            39, 29, 19, 9, 158, 148, 138, 128, 118, 108, 98, 88, 78,
                                            68, 58, 48, 38, 28, 18, 8);
        __m512i both = _mm512_permutexvar_epi16(at, dwords(part, f, 4));

        to->least = lanes_from_half(_mm512_castsi512_si256(both), KVD_NUMBER_F16);
        to->step = lanes_from_half(_mm512_extracti64x4_epi64(both, 1), KVD_NUMBER_F16);
}

/*
 * Adds to each sum the products of four codes with four codes of a query. The query's codes are
 * broadcast by the instruction itself; loaded beforehand, as the compiler would do it, they would
 * need more registers than there are.
 */
KERNEL __m512i add_products(__m512i sums, __m512i codes, const uint8_t *q) {
        typedef int __attribute__((may_alias, aligned(1))) four;

        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(*(const four *)q));
        return sums;
}

/* The part that needs no query comes first: it overlaps with the long chains of sums. */
KERNEL void products(struct products *to, const uint8_t *labels, const struct kvd_label_query *q,
                     uint32_t n_q) {
        const __m512i nibble = _mm512_set1_epi8(15), zero = _mm512_setzero_si512();
        const struct fifths f = fifths();
        __m512i part[5], dot[QUERIES], codes = zero;

        __asm__("" : "+r"(q)); /* otherwise each group of four would need an address register */
        for (int i = 0; i < 5; i++)
                part[i] = _mm512_loadu_si512(labels + (size_t)i * 64);
        ends(to, part, &f);
        for (uint32_t g = 0; g < n_q; g++)
                dot[g] = zero;
        for (int w = 0; w < 4; w++) {
                __m512i both = column(part, &f, w), low = _mm512_and_si512(both, nibble);
                __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);

                codes = _mm512_add_epi8(codes, _mm512_add_epi8(low, high));
                for (uint32_t g = 0; g < n_q; g++) {
                        dot[g] = add_products(dot[g], low, q[g].low + (ptrdiff_t)w * 4);
                        dot[g] = add_products(dot[g], high, q[g].high + (ptrdiff_t)w * 4);
                }
        }
        codes = _mm512_dpbusd_epi32(zero, codes, _mm512_set1_epi8(1));
        to->sum = _mm512_cvtepi32_ps(codes);
        for (uint32_t g = 0; g < n_q; g++)
                to->dot[g] = _mm512_cvtepi32_ps(dot[g]);
}

#elif defined(KVD_ISA_AVX2)

KERNEL int four_codes(const uint8_t *codes) {
        int word;

        memcpy(&word, codes, 4);
        return word;
}

/* Dwords 0 to 3 of each of 8 labels. */
KERNEL void columns(__m256i column[4], const uint8_t *labels) {
        __m256i t[4], ab_low, ab_high, cd_low, cd_high;

        for (int i = 0; i < 4; i++)
                t[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(
                                                       (const void *)(labels +
                                                                      (size_t)i * USUAL_BYTES))),
                                               _mm_loadu_si128((const void *)(labels +
                                                                              (size_t)(i + 4) *
                                                                                      USUAL_BYTES)),
                                               1);
        ab_low = _mm256_unpacklo_epi32(t[0], t[1]);
        ab_high = _mm256_unpackhi_epi32(t[0], t[1]);
        cd_low = _mm256_unpacklo_epi32(t[2], t[3]);
        cd_high = _mm256_unpackhi_epi32(t[2], t[3]);
        column[0] = _mm256_unpacklo_epi64(ab_low, cd_low);
        column[1] = _mm256_unpackhi_epi64(ab_low, cd_low);
        column[2] = _mm256_unpacklo_epi64(ab_high, cd_high);
        column[3] = _mm256_unpackhi_epi64(ab_high, cd_high);
}

KERNEL int end_of(const uint8_t *labels, int i) {
        return four_codes(labels + (size_t)i * USUAL_BYTES + 16);
}

/* The last dword of each of 8 labels: its low half is least, its high half step. */
KERNEL void ends_of(__m256 *least, __m256 *step, const uint8_t *labels) {
        __m128i a = _mm_setr_epi32(end_of(labels, 0), end_of(labels, 1), end_of(labels, 2),
                                   end_of(labels, 3));
        __m128i b = _mm_setr_epi32(end_of(labels, 4), end_of(labels, 5), end_of(labels, 6),
                                   end_of(labels, 7));
        const __m128i low = _mm_set1_epi32(0xffff);

        *least = lanes_from_half(_mm_packus_epi32(_mm_and_si128(a, low), _mm_and_si128(b, low)),
                                 KVD_NUMBER_F16);
        *step = lanes_from_half(_mm_packus_epi32(_mm_srli_epi32(a, 16), _mm_srli_epi32(b, 16)),
                                KVD_NUMBER_F16);
}

KERNEL void half_products(__m256 *dot, __m256 *sum, const uint8_t *labels,
                          const struct kvd_label_query *q, uint32_t n_q) {
        const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
        __m256i column[4], acc[QUERIES], codes = _mm256_setzero_si256();

        columns(column, labels);
        for (uint32_t g = 0; g < n_q; g++)
                acc[g] = _mm256_setzero_si256();
        for (int w = 0; w < 4; w++) {
                __m256i low = _mm256_and_si256(column[w], nibble);
                __m256i high = _mm256_and_si256(_mm256_srli_epi16(column[w], 4), nibble);

                codes = _mm256_add_epi8(codes, _mm256_add_epi8(low, high));
                for (uint32_t g = 0; g < n_q; g++) {
                        __m256i ql = _mm256_set1_epi32(four_codes(q[g].low + 4 * w));
                        __m256i qh = _mm256_set1_epi32(four_codes(q[g].high + 4 * w));

                        acc[g] = _mm256_add_epi16(acc[g],
                                                  _mm256_add_epi16(_mm256_maddubs_epi16(low, ql),
                                                                   _mm256_maddubs_epi16(high, qh)));
                }
        }
        codes = _mm256_maddubs_epi16(codes, _mm256_set1_epi8(1));
        *sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(codes, ones));
        for (uint32_t g = 0; g < n_q; g++)
                dot[g] = _mm256_cvtepi32_ps(_mm256_madd_epi16(acc[g], ones));
}

KERNEL void products(struct products *to, const uint8_t *labels, const struct kvd_label_query *q,
                     uint32_t n_q) {
        const uint8_t *later = labels + (size_t)8 * USUAL_BYTES;
        __m256 low[QUERIES], high[QUERIES];

        half_products(low, &to->sum.low, labels, q, n_q);
        half_products(high, &to->sum.high, later, q, n_q);
        for (uint32_t g = 0; g < n_q; g++)
                to->dot[g] = (lanes){low[g], high[g]};
        ends_of(&to->least.low, &to->step.low, labels);
        ends_of(&to->least.high, &to->step.high, later);
}

#elif defined(KVD_ISA_NEON)

KERNEL float product(uint8x16_t low, uint8x16_t high, const struct kvd_label_query *q) {
        uint8x16_t of_low = vld1q_u8(q->low), of_high = vld1q_u8(q->high);
        uint16x8_t sum = vmull_u8(vget_low_u8(low), vget_low_u8(of_low));

        sum = vmlal_high_u8(sum, low, of_low);
        sum = vmlal_u8(sum, vget_low_u8(high), vget_low_u8(of_high));
        return (float)vaddlvq_u16(vmlal_high_u8(sum, high, of_high));
}

KERNEL void products(struct products *to, const uint8_t *labels, const struct kvd_label_query *q,
                     uint32_t n_q) {
        float dot[QUERIES][KVD_LANES], sum[KVD_LANES];
        uint16_t ends[2][KVD_LANES];

        for (uint32_t t = 0; t < KVD_LANES; t++, labels += USUAL_BYTES) {
                uint8x16_t both = vld1q_u8(labels), low = vandq_u8(both, vdupq_n_u8(15)),
                           high = vshrq_n_u8(both, 4);

                for (uint32_t g = 0; g < n_q; g++)
                        dot[g][t] = product(low, high, q + g);
                sum[t] = (float)vaddlvq_u8(vaddq_u8(low, high));
                memcpy(&ends[0][t], labels + 16, 2);
                memcpy(&ends[1][t], labels + 18, 2);
        }
        for (uint32_t g = 0; g < n_q; g++)
                to->dot[g] = lanes_load(dot[g]);
        to->sum = lanes_load(sum);
        to->least = lanes_widen(ends[0], KVD_NUMBER_F16);
        to->step = lanes_widen(ends[1], KVD_NUMBER_F16);
}

#endif

/* One label at a time, for any number of channels. */
static void products_each(struct products *to, const uint8_t *labels,
                          const struct kvd_label_query *q, uint32_t n_q, uint32_t n_channels) {
        uint32_t bytes = (n_channels + 1) / 2;
        float dot[QUERIES][KVD_LANES], sum[KVD_LANES];
        uint16_t least[KVD_LANES], step[KVD_LANES];

        for (uint32_t t = 0; t < KVD_LANES; t++, labels += bytes + 4) {
                uint32_t own = 0;

                for (uint32_t g = 0; g < n_q; g++) {
                        uint32_t acc = 0;

                        for (uint32_t j = 0; j < bytes; j++)
                                acc += (uint32_t)((labels[j] & 15) * q[g].low[j] +
                                                  (labels[j] >> 4) * q[g].high[j]);
                        dot[g][t] = (float)acc;
                }
                for (uint32_t j = 0; j < bytes; j++)
                        own += (labels[j] & 15u) + (labels[j] >> 4);
                sum[t] = (float)own;
                memcpy(least + t, labels + bytes, 2);
                memcpy(step + t, labels + bytes + 2, 2);
        }
        for (uint32_t g = 0; g < n_q; g++)
                to->dot[g] = lanes_load(dot[g]);
        to->sum = lanes_load(sum);
        to->least = lanes_widen(least, KVD_NUMBER_F16);
        to->step = lanes_widen(step, KVD_NUMBER_F16);
}

#if defined(KVD_ISA_SCALAR)

KERNEL void products(struct products *to, const uint8_t *labels, const struct kvd_label_query *q,
                     uint32_t n_q) {
        products_each(to, labels, q, n_q, USUAL);
}

#endif

/* ---- scores ---- */

/* Values computed from a query once, for all labels. */
struct prepared {
        lanes least, step, offset;
};

KERNEL void prepare(struct prepared to[QUERIES], const struct kvd_label_query *q, uint32_t n_q,
                    uint32_t n_channels) {
        for (uint32_t g = 0; g < n_q; g++) {
                to[g].least = lanes_set(q[g].least);
                to[g].step = lanes_set(q[g].step);
                to[g].offset = lanes_set(
                        fmaf(q[g].step, (float)q[g].sum, (float)n_channels * q[g].least));
        }
}

/* Scores n of 16 labels. usual: n_channels is USUAL; n_q is then a constant at the call. */
KERNEL void score_lanes(float *out, size_t ld, const uint8_t *labels, uint32_t n_channels,
                        const struct kvd_label_query *q, const struct prepared *c, uint32_t n_q,
                        uint32_t n, bool usual) {
        struct products p;

        if (usual)
                products(&p, labels, q, n_q);
        else
                products_each(&p, labels, q, n_q, n_channels);
        for (uint32_t g = 0; g < n_q; g++) {
                lanes inner = lanes_fma(c[g].step, p.dot[g], lanes_mul(c[g].least, p.sum));
                lanes score = lanes_fma(p.step, inner, lanes_mul(p.least, c[g].offset));

                if (n == KVD_LANES)
                        lanes_store(out + g * ld, score);
                else
                        lanes_store_n(out + g * ld, score, n);
        }
}

/*
 * With several queries, the stores of scores keep the hardware prefetcher from fetching labels
 * early enough.
 */
KERNEL void fetch_ahead(const uint8_t *labels, size_t bytes) {
        lanes_expect(labels + AHEAD * bytes, KVD_LANES * bytes);
}

KERNEL void score_labels(float *out, size_t ld, const uint8_t *labels, uint32_t n_channels,
                         const struct kvd_label_query *q, uint32_t n_q, uint32_t n, bool usual) {
        uint8_t last[KVD_LANES * (KVD_LABEL_CHANNELS_MAX / 2 + 4)];
        size_t bytes = kvd_label_bytes(n_channels);
        struct prepared c[QUERIES];
        uint32_t i = 0;

        prepare(c, q, n_q, n_channels);
        for (; i + KVD_LANES <= n; i += KVD_LANES) {
                if (i + AHEAD < n)
                        fetch_ahead(labels + i * bytes, bytes);
                score_lanes(out + i, ld, labels + i * bytes, n_channels, q, c, n_q, KVD_LANES,
                            usual);
        }
        if (i == n)
                return;
        memset(last, 0, KVD_LANES * bytes);
        memcpy(last, labels + i * bytes, (n - i) * bytes);
        score_lanes(out + i, ld, last, n_channels, q, c, n_q, n - i, usual);
}

static void score_usual(float *out, size_t ld, const uint8_t *labels,
                        const struct kvd_label_query *q, uint32_t n_q, uint32_t n) {
        for (; n_q >= QUERIES; n_q -= QUERIES, q += QUERIES, out += QUERIES * ld)
                score_labels(out, ld, labels, USUAL, q, QUERIES, n, true);
        if (n_q == 3)
                score_labels(out, ld, labels, USUAL, q, 3, n, true);
        else if (n_q == 2)
                score_labels(out, ld, labels, USUAL, q, 2, n, true);
        else if (n_q == 1)
                score_labels(out, ld, labels, USUAL, q, 1, n, true);
}

/* Scores n contiguous labels. */
static void score_some(float *out, size_t ld, const uint8_t *labels, uint32_t n_channels,
                       const struct kvd_label_query *q, uint32_t n_q, uint32_t n) {
        if (n_channels == USUAL)
                score_usual(out, ld, labels, q, n_q, n);
        for (uint32_t g = 0; g < n_q && n_channels != USUAL; g += QUERIES)
                score_labels(out + g * ld, ld, labels, n_channels, q + g, MIN(QUERIES, n_q - g), n,
                             false);
}

/* Labels of different blocks can lie anywhere, so the hardware cannot prefetch the next ones. */
static void fetch_labels(const uint8_t *labels, size_t bytes) {
        lanes_expect(labels, MIN(bytes, 4096) + 63);
}

static void scores(float *to, size_t ld, const uint8_t *const *blocks, size_t offset,
                   uint32_t block_tokens, uint32_t n_channels,
                   const struct kvd_label_query *queries, uint32_t n_queries, uint32_t first,
                   uint32_t n) {
        size_t bytes = kvd_label_bytes(n_channels);

        for (uint32_t i = 0, count; i < n; i += count) {
                uint32_t block = (first + i) / block_tokens, slot = (first + i) % block_tokens;
                uint64_t ahead = block + (uint64_t)DIV_UP(AHEAD, block_tokens);

                count = MIN(n - i, block_tokens - slot);
                if (ahead * block_tokens < (uint64_t)first + n && blocks[ahead])
                        fetch_labels(blocks[ahead] + offset, block_tokens * bytes);
                if (blocks[block])
                        score_some(to + i, ld, blocks[block] + offset + slot * bytes, n_channels,
                                   queries, n_queries, count);
                for (uint32_t g = 0; !blocks[block] && g < n_queries; g++)
                        for (uint32_t j = 0; j < count; j++)
                                to[g * ld + i + j] = -INFINITY;
        }
}

const struct kvd_hshare_ops KVD_VARIANT(kvd_hshare) = {
        .label = KVD_VARIANT(kvd_labels_of_keys),
        .query = KVD_VARIANT(kvd_label_of_query),
        .scores = scores,
        .aggregate = KVD_VARIANT(kvd_critical_aggregate),
        .top = KVD_VARIANT(kvd_critical_top),
        .overlap = KVD_VARIANT(kvd_critical_overlap),
        .weigh = KVD_VARIANT(kvd_critical_weigh),
};
