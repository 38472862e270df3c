/* SPDX-License-Identifier: Apache-2.0 */

/*
 * HShare's kernels; compiled once for each instruction set. The inner product of two labels is one
 * of small integers (at most 256 products of at most 225), exact in any order; what is left is a
 * few fused operations a token.
 */

#include "kernels/hshare.h"

#include <string.h>

#include "ipc/base/util.h"
#include "kernels/hshare_select.h"
#include "kernels/lanes.h"

enum { QUERIES = 4, AHEAD = 128 }; /* labels fetched ahead */

/* Sums over the channels of 16 labels, one label a lane. */
struct products {
        lanes dot[QUERIES]; /* of code times query's code */
        lanes sum;          /* of codes */
        lanes least, step;
};

/* ---- inner products of 16 labels of 32 channels with a few queries --------------------------- */

#if !defined(KVD_ISA_SCALAR)

KERNEL int four_codes(const uint8_t *codes) {
        int word;

        memcpy(&word, codes, 4);
        return word;
}

#endif

#if defined(KVD_ISA_AVX512)

/* Dword w of each of 16 labels of five: label t's is the number 5 t + w of the 80. */
KERNEL __m512i column(const __m512i part[5], int w) {
        const __m512i at = _mm512_setr_epi32(w, w + 5, w + 10, w + 15, w + 20, w + 25, w + 30,
                                             w + 35, w + 40, w + 45, w + 50, w + 55, w + 60, w + 65,
                                             w + 70, w + 75);
        /* those from number 32 on, and from 64 */
        const __mmask16 second = (__mmask16)(0xffff << DIV_UP(32 - w, 5));
        const __mmask16 third = (__mmask16)(0xffff << DIV_UP(64 - w, 5));
        __m512i first = _mm512_permutex2var_epi32(part[0], at, part[1]);
        __m512i rest = _mm512_permutex2var_epi32(part[2], at, part[3]);

        return _mm512_mask_permutexvar_epi32(_mm512_mask_mov_epi32(first, second, rest), third, at,
                                             part[4]);
}

/*
 * Bytes are multiplied and added in pairs: of 32 codes, 16 products come together in 16 bits, at
 * most 3,600.
 */
KERNEL void products(struct products *to, const uint8_t *labels, const struct kvd_label_query *q,
                     uint32_t n_q) {
        const __m512i nibble = _mm512_set1_epi8(15), ones = _mm512_set1_epi16(1);
        __m512i part[5], acc[QUERIES], codes = _mm512_setzero_si512(), ends;

        for (int i = 0; i < 5; i++)
                part[i] = _mm512_loadu_si512(labels + (size_t)i * 64);
        for (uint32_t g = 0; g < n_q; g++)
                acc[g] = _mm512_setzero_si512();
        for (int w = 0; w < 4; w++) {
                __m512i both = column(part, w), low = _mm512_and_si512(both, nibble);
                __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);

                codes = _mm512_add_epi8(codes, _mm512_add_epi8(low, high));
                for (uint32_t g = 0; g < n_q; g++) {
                        __m512i ql = _mm512_set1_epi32(four_codes(q[g].low + 4 * w));
                        __m512i qh = _mm512_set1_epi32(four_codes(q[g].high + 4 * w));

                        acc[g] = _mm512_add_epi16(acc[g],
                                                  _mm512_add_epi16(_mm512_maddubs_epi16(low, ql),
                                                                   _mm512_maddubs_epi16(high, qh)));
                }
        }
        codes = _mm512_maddubs_epi16(codes, _mm512_set1_epi8(1));
        to->sum = _mm512_cvtepi32_ps(_mm512_madd_epi16(codes, ones));
        for (uint32_t g = 0; g < n_q; g++)
                to->dot[g] = _mm512_cvtepi32_ps(_mm512_madd_epi16(acc[g], ones));
        ends = column(part, 4);
        to->least = lanes_from_half(_mm512_cvtepi32_epi16(ends), KVD_NUMBER_F16);
        to->step = lanes_from_half(_mm512_cvtepi32_epi16(_mm512_srli_epi32(ends, 16)),
                                   KVD_NUMBER_F16);
}

#elif defined(KVD_ISA_AVX2)

/* Dwords 0 to 3 of each of 8 labels. */
KERNEL void columns(__m256i column[4], const uint8_t *labels) {
        __m256i t[4], ab_low, ab_high, cd_low, cd_high;

        for (int i = 0; i < 4; i++)
                t[i] = _mm256_inserti128_si256(
                        _mm256_castsi128_si256(
                                _mm_loadu_si128((const void *)(labels + (size_t)i * USUAL_BYTES))),
                        _mm_loadu_si128((const void *)(labels + (size_t)(i + 4) * USUAL_BYTES)), 1);
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

        *least = lanes_from_half(_mm_packus_epi32(_mm_and_si128(a, low), _mm_and_si128(b, low)), KVD_NUMBER_F16);
        *step = lanes_from_half(_mm_packus_epi32(_mm_srli_epi32(a, 16), _mm_srli_epi32(b, 16)), KVD_NUMBER_F16);
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

#endif

/* One label after the other, for any number of channels. */
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

/* What is made of a query's numbers once for all labels. */
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

/* n of 16 labels; n_q is a constant where it is passed. */
KERNEL void score_lanes(float *out, size_t ld, const uint8_t *labels, uint32_t n_channels,
                        const struct kvd_label_query *q, const struct prepared *c, uint32_t n_q,
                        uint32_t n) {
        struct products p;

        if (n_channels == USUAL)
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
 * With several queries the scores that are written keep the processor from fetching labels early
 * enough.
 */
KERNEL void fetch_ahead(const uint8_t *labels, size_t bytes) {
        for (size_t at = 0; at < KVD_LANES * bytes; at += 64)
                __builtin_prefetch(labels + AHEAD * bytes + at);
}

KERNEL void score_labels(float *out, size_t ld, const uint8_t *labels, uint32_t n_channels,
                         const struct kvd_label_query *q, uint32_t n_q, uint32_t n) {
        uint8_t last[KVD_LANES * (KVD_LABEL_CHANNELS_MAX / 2 + 4)];
        size_t bytes = kvd_label_bytes(n_channels);
        struct prepared c[QUERIES];
        uint32_t i = 0;

        prepare(c, q, n_q, n_channels);
        for (; i + KVD_LANES <= n; i += KVD_LANES) {
                if (i + AHEAD < n)
                        fetch_ahead(labels + i * bytes, bytes);
                score_lanes(out + i, ld, labels + i * bytes, n_channels, q, c, n_q, KVD_LANES);
        }
        if (i == n)
                return;
        memset(last, 0, KVD_LANES * bytes);
        memcpy(last, labels + i * bytes, (n - i) * bytes);
        score_lanes(out + i, ld, last, n_channels, q, c, n_q, n - i);
}

/* n labels that lie one after the other. */
static void score_some(float *out, size_t ld, const uint8_t *labels, uint32_t n_channels,
                       const struct kvd_label_query *q, uint32_t n_q, uint32_t n) {
        for (; n_q >= QUERIES; n_q -= QUERIES, q += QUERIES, out += QUERIES * ld)
                score_labels(out, ld, labels, n_channels, q, QUERIES, n);
        if (n_q == 3)
                score_labels(out, ld, labels, n_channels, q, 3, n);
        else if (n_q == 2)
                score_labels(out, ld, labels, n_channels, q, 2, n);
        else if (n_q == 1)
                score_labels(out, ld, labels, n_channels, q, 1, n);
}

/* Blocks' labels lie anywhere: no processor guesses where the next ones are. */
static void fetch_labels(const uint8_t *labels, size_t bytes) {
        for (size_t at = 0; at < MIN(bytes, 4096) + 63; at += 64)
                __builtin_prefetch(labels + at);
}

static void scores(float *to, size_t ld, const uint8_t *const *blocks, size_t offset,
                   uint32_t block_tokens, uint32_t n_channels,
                   const struct kvd_label_query *queries, uint32_t n_queries, uint32_t first,
                   uint32_t n) {
        for (uint32_t i = 0, count; i < n; i += count) {
                uint32_t block = (first + i) / block_tokens, slot = (first + i) % block_tokens;
                uint64_t ahead = block + (uint64_t)DIV_UP(AHEAD, block_tokens);

                count = MIN(n - i, block_tokens - slot);
                if (ahead * block_tokens < (uint64_t)first + n && blocks[ahead])
                        fetch_labels(blocks[ahead] + offset,
                                     block_tokens * kvd_label_bytes(n_channels));
                if (blocks[block])
                        score_some(to + i, ld,
                                   blocks[block] + offset + slot * kvd_label_bytes(n_channels),
                                   n_channels, queries, n_queries, count);
                for (uint32_t g = 0; !blocks[block] && g < n_queries; g++)
                        for (uint32_t j = 0; j < count; j++)
                                to[g * ld + i + j] = -INFINITY;
        }
}

const struct kvd_hshare_ops KVD_VARIANT(kvd_hshare) = {
        .label = KVD_VARIANT(kvd_hshare_label),
        .query = KVD_VARIANT(kvd_hshare_query),
        .scores = scores,
        .aggregate = KVD_VARIANT(kvd_hshare_aggregate),
        .top = KVD_VARIANT(kvd_hshare_top),
        .overlap = KVD_VARIANT(kvd_hshare_overlap),
        .weigh = KVD_VARIANT(kvd_hshare_weigh),
};
