/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_INTERLEAVE_H
#define KVD_KERNELS_INTERLEAVE_H

/*
 * Transposes 64 bytes of each of 16 rows into 16 words of 64 bytes: word w has the 32-bit words
 * number w of all rows side by side. These are floats or pairs of BF16. Of F16, the even elements
 * come first, then the odd ones. So lanes_load() of a word gives element w of 16 rows, and
 * lanes_widen_2() gives elements 2 w and 2 w + 1.
 */

#include "kernels/lanes.h"

enum { KVD_LINE = 64, KVD_LINE_WORDS = 16 };

#if defined(KVD_ISA_AVX512)

KERNEL void lanes_store_word(uint8_t *to, __m512i word, enum kvd_number type) {
        const __m512i halves = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5,
                                                3, 1, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8,
                                                6, 4, 2, 0);

        _mm512_storeu_si512(to,
                            type == KVD_NUMBER_F16 ? _mm512_permutexvar_epi16(halves, word) : word);
}

/* Transposes bytes of 64 bytes, from byte at on, of each of 16 rows. */
KERNEL void lanes_interleave(uint8_t *to, const uint8_t *const *rows, size_t at, uint32_t bytes,
                             enum kvd_number type) {
        __mmask64 there = bytes == KVD_LINE ? ~UINT64_C(0) : (UINT64_C(1) << bytes) - 1;
        __m512i a[KVD_LINE_WORDS], b[KVD_LINE_WORDS];

        for (int i = 0; i < KVD_LINE_WORDS; i++)
                a[i] = _mm512_maskz_loadu_epi8(there, rows[i] + at);
        for (int i = 0; i < KVD_LINE_WORDS; i += 2) {
                b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
                b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < KVD_LINE_WORDS; i += 4)
                for (int j = 0; j < 2; j++) {
                        a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
                        a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
                }
        /* quarter w of a[4 i + j] has word 4 w + j of rows 4 i to 4 i + 3 */
        for (int j = 0; j < 4; j++) {
                __m512i even_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
                __m512i odd_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
                __m512i even_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
                __m512i odd_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
                uint8_t *word = to + (size_t)j * KVD_LINE;

                lanes_store_word(word, _mm512_shuffle_i32x4(even_low, even_high, 0x88), type);
                lanes_store_word(word + (size_t)4 * KVD_LINE,
                                 _mm512_shuffle_i32x4(odd_low, odd_high, 0x88), type);
                lanes_store_word(word + (size_t)8 * KVD_LINE,
                                 _mm512_shuffle_i32x4(even_low, even_high, 0xdd), type);
                lanes_store_word(word + (size_t)12 * KVD_LINE,
                                 _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd), type);
        }
}

#else

#if defined(KVD_ISA_AVX2)

/* Stores half a word, that of eight rows. */
KERNEL void lanes_store_half(uint8_t *to, int half, __m256i word, enum kvd_number type) {
        __m256i even = _mm256_and_si256(word, _mm256_set1_epi32(0xffff)),
                odd = _mm256_srli_epi32(word, 16);

        if (type != KVD_NUMBER_F16) {
                _mm256_storeu_si256((void *)(to + (size_t)half * 32), word);
                return;
        }
        _mm_storeu_si128((void *)(to + (size_t)half * 16),
                         _mm_packus_epi32(_mm256_castsi256_si128(even),
                                          _mm256_extracti128_si256(even, 1)));
        _mm_storeu_si128((void *)(to + 32 + (size_t)half * 16),
                         _mm_packus_epi32(_mm256_castsi256_si128(odd),
                                          _mm256_extracti128_si256(odd, 1)));
}

/* Eight words of eight rows. */
KERNEL void lanes_interleave_8(uint8_t *to, const uint8_t *const *rows, size_t at, int half,
                               enum kvd_number type) {
        __m256i a[8], b[8];

        for (int i = 0; i < 8; i++)
                a[i] = _mm256_loadu_si256((const void *)(rows[i] + at));
        for (int i = 0; i < 8; i += 2) {
                b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
                b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
                for (int j = 0; j < 2; j++) {
                        a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
                        a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
                }
        for (int j = 0; j < 4; j++) {
                uint8_t *word = to + (size_t)j * KVD_LINE;

                lanes_store_half(word, half, _mm256_permute2x128_si256(a[j], a[j + 4], 0x20), type);
                lanes_store_half(word + (size_t)4 * KVD_LINE, half,
                                 _mm256_permute2x128_si256(a[j], a[j + 4], 0x31), type);
        }
}

KERNEL void lanes_interleave_whole(uint8_t *to, const uint8_t *const *rows, size_t at,
                                   enum kvd_number type) {
        for (int half = 0; half < 2; half++)
                for (int part = 0; part < 2; part++)
                        lanes_interleave_8(to + (size_t)part * 8 * KVD_LINE,
                                           rows + (size_t)half * 8, at + (size_t)part * 32, half,
                                           type);
}

#elif defined(KVD_ISA_NEON)

/* Stores a quarter of a word, that of four rows. */
KERNEL void lanes_store_quarter(uint8_t *to, int quarter, uint32x4_t word, enum kvd_number type) {
        if (type != KVD_NUMBER_F16) {
                vst1q_u8(to + (ptrdiff_t)quarter * 16, vreinterpretq_u8_u32(word));
                return;
        }
        to += (ptrdiff_t)quarter * 8;
        vst1_u8(to, vreinterpret_u8_u16(vmovn_u32(word)));
        vst1_u8(to + 32, vreinterpret_u8_u16(vshrn_n_u32(word, 16)));
}

/* Four words of four rows. */
KERNEL void lanes_interleave_4(uint8_t *to, const uint8_t *const *rows, size_t at, int quarter,
                               enum kvd_number type) {
        uint32x4_t a[4];
        uint64x2_t b[4];

        for (int i = 0; i < 4; i++)
                a[i] = vreinterpretq_u32_u8(vld1q_u8(rows[i] + at));
        for (int i = 0; i < 4; i += 2) {
                b[i] = vreinterpretq_u64_u32(vtrn1q_u32(a[i], a[i + 1]));
                b[i + 1] = vreinterpretq_u64_u32(vtrn2q_u32(a[i], a[i + 1]));
        }
        for (int j = 0; j < 2; j++) {
                a[j] = vreinterpretq_u32_u64(vtrn1q_u64(b[j], b[j + 2]));
                a[j + 2] = vreinterpretq_u32_u64(vtrn2q_u64(b[j], b[j + 2]));
        }
        for (int j = 0; j < 4; j++)
                lanes_store_quarter(to + (size_t)j * KVD_LINE, quarter, a[j], type);
}

KERNEL void lanes_interleave_whole(uint8_t *to, const uint8_t *const *rows, size_t at,
                                   enum kvd_number type) {
        for (int quarter = 0; quarter < 4; quarter++)
                for (int part = 0; part < 4; part++)
                        lanes_interleave_4(to + (size_t)part * 4 * KVD_LINE,
                                           rows + (size_t)quarter * 4, at + (size_t)part * 16,
                                           quarter, type);
}

#else

KERNEL void lanes_interleave_whole(uint8_t *to, const uint8_t *const *rows, size_t at,
                                   enum kvd_number type) {
        for (size_t w = 0; w < KVD_LINE_WORDS; w++, to += KVD_LINE, at += 4)
                for (size_t i = 0; i < KVD_LINE_WORDS; i++)
                        if (type == KVD_NUMBER_F16) {
                                memcpy(to + i * 2, rows[i] + at, 2);
                                memcpy(to + 32 + i * 2, rows[i] + at + 2, 2);
                        } else {
                                memcpy(to + i * 4, rows[i] + at, 4);
                        }
}

#endif

KERNEL void lanes_interleave(uint8_t *to, const uint8_t *const *rows, size_t at, uint32_t bytes,
                             enum kvd_number type) {
        uint8_t last[KVD_LINE_WORDS][KVD_LINE];
        const uint8_t *padded[KVD_LINE_WORDS];

        if (bytes == KVD_LINE) {
                lanes_interleave_whole(to, rows, at, type);
                return;
        }
        memset(last, 0, sizeof last);
        for (int i = 0; i < KVD_LINE_WORDS; i++)
                padded[i] = memcpy(last[i], rows[i] + at, bytes);
        lanes_interleave_whole(to, padded, 0, type);
}

#endif

#endif
