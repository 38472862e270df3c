/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_LABEL_STORE_H
#define KVD_KERNELS_LABEL_STORE_H

/*
 * store_labels() stores 16 labels of 20 bytes. Lane t of low[w] and high[w] has the halves of word
 * w of label t, each of four codes; least and step are stored as f16.
 */

#include "kernels/critical.h"

#if defined(KVD_ISA_AVX512)

/* Two 16-bit numbers in a word, the first in the low half. */
KERNEL __m512i word_of(lanes low, lanes high) {
        return _mm512_or_si512(_mm512_cvttps_epi32(low),
                               _mm512_slli_epi32(_mm512_cvttps_epi32(high), 16));
}

KERNEL void store_quarter(uint8_t *labels, __m512i words, int quarter) {
        labels += (size_t)quarter * 4 * USUAL_BYTES;
        _mm_storeu_si128((void *)labels, quarter == 0 ? _mm512_castsi512_si128(words) :
                                         quarter == 1 ? _mm512_extracti32x4_epi32(words, 1) :
                                         quarter == 2 ? _mm512_extracti32x4_epi32(words, 2) :
                                                        _mm512_extracti32x4_epi32(words, 3));
}

KERNEL void store_labels(uint8_t *labels, const lanes low[4], const lanes high[4], lanes least,
                         lanes step) {
        __m512i a[4], b[4];
        uint32_t ends[KVD_LANES];

        for (int w = 0; w < 4; w++)
                a[w] = word_of(low[w], high[w]);
        for (int i = 0; i < 2; i++) {
                b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
                b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
                a[2 * i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
                a[2 * i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        }
        /* quarter i of a[j] has the codes of label 4 i + j */
        for (int i = 0; i < KVD_LANES; i++)
                store_quarter(labels + (size_t)(i % 4) * USUAL_BYTES, a[i % 4], i / 4);
        a[0] = _mm512_cvtepu16_epi32(lanes_to_half(least, KVD_NUMBER_F16));
        a[1] = _mm512_cvtepu16_epi32(lanes_to_half(step, KVD_NUMBER_F16));
        _mm512_storeu_si512(ends, _mm512_or_si512(a[0], _mm512_slli_epi32(a[1], 16)));
        for (int t = 0; t < KVD_LANES; t++)
                memcpy(labels + (size_t)t * USUAL_BYTES + 16, &ends[t], 4);
}

#elif defined(KVD_ISA_AVX2)

KERNEL __m256i word_of(__m256 low, __m256 high) {
        return _mm256_or_si256(_mm256_cvttps_epi32(low),
                               _mm256_slli_epi32(_mm256_cvttps_epi32(high), 16));
}

/* Stores eight labels; words[i] has word i of each. */
KERNEL void store_8(uint8_t *labels, const __m256i words[4], __m128i least, __m128i step) {
        __m256i a[4], b[4];
        uint32_t ends[8];

        for (int i = 0; i < 2; i++) {
                b[2 * i] = _mm256_unpacklo_epi32(words[2 * i], words[2 * i + 1]);
                b[2 * i + 1] = _mm256_unpackhi_epi32(words[2 * i], words[2 * i + 1]);
        }
        for (int i = 0; i < 2; i++) {
                a[2 * i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
                a[2 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        }
        _mm_storeu_si128((void *)ends, _mm_unpacklo_epi16(least, step));
        _mm_storeu_si128((void *)(ends + 4), _mm_unpackhi_epi16(least, step));
        for (int i = 0; i < 8; i++) {
                __m128i codes = i < 4 ? _mm256_castsi256_si128(a[i % 4]) :
                                        _mm256_extracti128_si256(a[i % 4], 1);

                _mm_storeu_si128((void *)(labels + (size_t)i * USUAL_BYTES), codes);
                memcpy(labels + (size_t)i * USUAL_BYTES + 16, &ends[i], 4);
        }
}

KERNEL void store_labels(uint8_t *labels, const lanes low[4], const lanes high[4], lanes least,
                         lanes step) {
        __m256i first[4], last[4];

        for (int w = 0; w < 4; w++) {
                first[w] = word_of(low[w].low, high[w].low);
                last[w] = word_of(low[w].high, high[w].high);
        }
        store_8(labels, first, lanes_to_half(least.low, KVD_NUMBER_F16),
                lanes_to_half(step.low, KVD_NUMBER_F16));
        store_8(labels + (size_t)8 * USUAL_BYTES, last, lanes_to_half(least.high, KVD_NUMBER_F16),
                lanes_to_half(step.high, KVD_NUMBER_F16));
}

#elif defined(KVD_ISA_NEON)

KERNEL uint32x4_t word_of(float32x4_t low, float32x4_t high) {
        return vorrq_u32(vcvtq_u32_f32(low), vshlq_n_u32(vcvtq_u32_f32(high), 16));
}

KERNEL void store_labels(uint8_t *labels, const lanes low[4], const lanes high[4], lanes least,
                         lanes step) {
        uint16_t ends[2][KVD_LANES];
        uint32_t codes[KVD_LANES][4];

        for (int q = 0; q < 4; q++) {
                uint32x4x4_t words;

                for (int w = 0; w < 4; w++)
                        words.val[w] = word_of(low[w].at[q], high[w].at[q]);
                vst4q_u32(codes[4 * q], words);
        }
        lanes_narrow(ends[0], least, KVD_NUMBER_F16);
        lanes_narrow(ends[1], step, KVD_NUMBER_F16);
        for (int t = 0; t < KVD_LANES; t++, labels += USUAL_BYTES) {
                memcpy(labels, codes[t], 16);
                memcpy(labels + 16, &ends[0][t], 2);
                memcpy(labels + 18, &ends[1][t], 2);
        }
}

#endif

#endif
