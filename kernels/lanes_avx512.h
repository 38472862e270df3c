/* SPDX-License-Identifier: Apache-2.0 */

/*
 * AVX-512 (F, BW, VL, DQ, VNNI) for kernels/lanes.h, which includes it: one register, and masks for
 * partial vectors.
 */

#include <immintrin.h>

typedef __m512 lanes;

/* The first n < 16 lanes. */
KERNEL __mmask16 lanes_mask(uint32_t n) {
        return (__mmask16)((1u << n) - 1);
}

KERNEL lanes lanes_set(float value) {
        return _mm512_set1_ps(value);
}

KERNEL lanes lanes_constant(float value) {
        return lanes_set(value);
}

KERNEL lanes lanes_zero(void) {
        return _mm512_setzero_ps();
}

/* ---- memory ---- */

KERNEL lanes lanes_load(const float *from) {
        return _mm512_loadu_ps(from);
}

KERNEL lanes lanes_held(lanes a) {
        return a;
}

KERNEL lanes lanes_load_n(const float *from, uint32_t n) {
        return _mm512_maskz_loadu_ps(lanes_mask(n), from);
}

KERNEL void lanes_store(float *to, lanes a) {
        _mm512_storeu_ps(to, a);
}

KERNEL void lanes_store_n(float *to, lanes a, uint32_t n) {
        _mm512_mask_storeu_ps(to, lanes_mask(n), a);
}

KERNEL lanes lanes_from_half(__m256i half, enum kvd_number type) {
        if (type == KVD_NUMBER_F16)
                return _mm512_cvtph_ps(half);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

KERNEL __m256i lanes_to_half(lanes a, enum kvd_number type) {
        __m512i bits = _mm512_castps_si512(a), upper = _mm512_srli_epi32(bits, 16);
        __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);

        if (type == KVD_NUMBER_F16)
                return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(_mm512_srli_epi32(rounded, 16), nan,
                                                          upper, _mm512_set1_epi32(0x40)));
}

/* 32 bytes as F16; of E4M3, 2^-8 of each number. */
KERNEL __m512i lanes_half_of(__m256i bytes, enum kvd_number type) {
        __m512i wide = _mm512_cvtepi8_epi16(bytes), rest = _mm512_slli_epi16(wide, 9), half;
        __mmask32 nan = _mm512_cmpeq_epi16_mask(rest, _mm512_set1_epi16((short)0xfe00));

        if (type == KVD_NUMBER_E5M2)
                return _mm512_slli_epi16(wide, 8);
        half = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xbf80));
        return _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7e00));
}

KERNEL lanes lanes_from_half_of(__m256i half, enum kvd_number type) {
        lanes a = _mm512_cvtph_ps(half);

        return type == KVD_NUMBER_E4M3 ? _mm512_mul_ps(a, _mm512_set1_ps(0x1p8f)) : a;
}

KERNEL lanes lanes_from_bytes(__m128i bytes, enum kvd_number type) {
        __m512i half = lanes_half_of(_mm256_castsi128_si256(bytes), type);

        return lanes_from_half_of(_mm512_castsi512_si256(half), type);
}

KERNEL lanes lanes_widen(const void *from, enum kvd_number type) {
        if (type == KVD_NUMBER_F32)
                return _mm512_loadu_ps(from);
        if (lanes_are_bytes(type))
                return lanes_from_bytes(_mm_loadu_si128(from), type);
        return lanes_from_half(_mm256_loadu_si256(from), type);
}

KERNEL lanes lanes_widen_n(const void *from, uint32_t n, enum kvd_number type) {
        if (type == KVD_NUMBER_F32)
                return lanes_load_n(from, n);
        if (lanes_are_bytes(type))
                return lanes_from_bytes(_mm_maskz_loadu_epi8(lanes_mask(n), from), type);
        return lanes_from_half(_mm256_maskz_loadu_epi16(lanes_mask(n), from), type);
}

KERNEL void lanes_widen_2(const void *from, enum kvd_number type, lanes *a, lanes *b) {
        __m512i both;

        if (type == KVD_NUMBER_BF16) {
                both = _mm512_loadu_si512(from);
                *a = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                *b = _mm512_castsi512_ps(
                        _mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
                return;
        }
        if (lanes_are_bytes(type)) {
                both = lanes_half_of(_mm256_loadu_si256(from), type);
                *a = lanes_from_half_of(_mm512_castsi512_si256(both), type);
                *b = lanes_from_half_of(_mm512_extracti64x4_epi64(both, 1), type);
                return;
        }
        *a = lanes_widen(from, type);
        *b = lanes_widen((const char *)from + lanes_bytes(type), type);
}

KERNEL void lanes_narrow(void *to, lanes a, enum kvd_number type) {
        if (type == KVD_NUMBER_F32)
                _mm512_storeu_ps(to, a);
        else
                _mm256_storeu_si256(to, lanes_to_half(a, type));
}

KERNEL void lanes_narrow_n(void *to, lanes a, uint32_t n, enum kvd_number type) {
        if (type == KVD_NUMBER_F32)
                lanes_store_n(to, a, n);
        else
                _mm256_mask_storeu_epi16(to, lanes_mask(n), lanes_to_half(a, type));
}

KERNEL lanes lanes_first(lanes a, uint32_t n) {
        return _mm512_maskz_mov_ps(lanes_mask(n), a);
}

/* ---- codes ---- */

/* An integer each; of codes of 4 bits, the upper bits are arbitrary. */
typedef __m512i coded;

struct lanes_scale {
        __m512 scale, least; /* or, of codes of 4 bits, the number of each code, and nothing */
};

KERNEL struct lanes_scale lanes_scale_at(const void *from, enum kvd_number type) {
        const lanes each = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        __m128 both = _mm_cvtph_ps(_mm_loadu_si32(from));
        lanes scale = _mm512_broadcastss_ps(both),
              least = _mm512_broadcastss_ps(_mm_movehdup_ps(both));

        return (struct lanes_scale){type == KVD_NUMBER_Q4 ? _mm512_fmadd_ps(each, scale, least) :
                                                            scale,
                                    least};
}

KERNEL coded lanes_codes_of(__m128i some, enum kvd_number type) {
        if (type == KVD_NUMBER_Q4)
                some = _mm_unpacklo_epi8(some, _mm_srli_epi16(some, 4));
        return _mm512_cvtepu8_epi32(some);
}

KERNEL coded lanes_codes_n(const uint8_t *from, uint32_t n, enum kvd_number type) {
        __mmask16 there = lanes_mask(type == KVD_NUMBER_Q8 ? n : n / 2);

        return lanes_codes_of(_mm_maskz_loadu_epi8(there, from), type);
}

KERNEL coded lanes_codes(const uint8_t *from, enum kvd_number type) {
        return lanes_codes_of(type == KVD_NUMBER_Q8 ? _mm_loadu_si128((const void *)from) :
                                                      _mm_loadl_epi64((const void *)from),
                              type);
}

KERNEL void lanes_codes_2(const uint8_t *from, enum kvd_number type, coded *a, coded *b) {
        *a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
        *b = type == KVD_NUMBER_Q8 ? lanes_codes(from + KVD_LANES, type) : _mm512_srli_epi32(*a, 4);
}

KERNEL lanes lanes_decode(coded a, struct lanes_scale s, enum kvd_number type) {
        if (type == KVD_NUMBER_Q4)
                return _mm512_permutexvar_ps(a, s.scale);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(a), s.scale, s.least);
}

KERNEL void lanes_stream(float *to, lanes a) {
        _mm512_stream_ps(to, a);
}

KERNEL void lanes_fence(void) {
        _mm_sfence();
}

/* ---- lane by lane ---- */

KERNEL lanes lanes_add(lanes a, lanes b) {
        return _mm512_add_ps(a, b);
}

KERNEL lanes lanes_sub(lanes a, lanes b) {
        return _mm512_sub_ps(a, b);
}

KERNEL lanes lanes_mul(lanes a, lanes b) {
        return _mm512_mul_ps(a, b);
}

KERNEL lanes lanes_div(lanes a, lanes b) {
        return _mm512_div_ps(a, b);
}

KERNEL lanes lanes_fma(lanes a, lanes b, lanes c) {
        return _mm512_fmadd_ps(a, b, c);
}

KERNEL lanes lanes_min(lanes a, lanes b) {
        return _mm512_min_ps(a, b);
}

KERNEL lanes lanes_max(lanes a, lanes b) {
        return _mm512_max_ps(a, b);
}

KERNEL lanes lanes_abs(lanes a) {
        return _mm512_abs_ps(a);
}

KERNEL lanes lanes_sqrt(lanes a) {
        return _mm512_sqrt_ps(a);
}

KERNEL lanes lanes_round(lanes a) {
        return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

KERNEL lanes lanes_select_less(lanes a, lanes b, lanes x, lanes y) {
        return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}

KERNEL lanes lanes_spoil(lanes x, lanes a, lanes b) {
        return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), _mm512_set1_ps(NAN));
}

/* 2^n, n being the low bits of n + EXP_SHIFT. */
KERNEL lanes lanes_power(lanes shifted) {
        __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);

        return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(EXP_ONE)));
}

/* ---- across the lanes ---- */

KERNEL float lanes_sum(lanes v) {
        __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

        b = _mm_add_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/*
 * The trees of 16 vectors at once: parts of width 8, 4, 2 and 1 of two vectors are brought side by
 * side, so that each step halves the number of vectors. Before the last step, the quarters hold
 * vectors 0 to 3, 4 to 7, 8 to 11, 12 to 15.
 */
#define FOLD(operation, shuffle, a, b, low, high) operation(shuffle(a, b, low), shuffle(a, b, high))
#define FOLD_8(operation, a, b) FOLD(operation, _mm512_shuffle_f32x4, a, b, 0x44, 0xee)
#define FOLD_4(operation, a, b) FOLD(operation, _mm512_shuffle_f32x4, a, b, 0x88, 0xdd)
#define FOLD_2(operation, a, b) FOLD(operation, _mm512_shuffle_ps, a, b, 0x44, 0xee)
#define FOLD_1(operation, a, b) FOLD(operation, _mm512_shuffle_ps, a, b, 0x88, 0xdd)
#define TREE_16(name, operation) \
        KERNEL lanes name(const lanes v[KVD_LANES]) { \
                lanes q[4]; \
\
                for (int i = 0; i < 4; i++) \
                        q[i] = FOLD_4(operation, FOLD_8(operation, v[i], v[i + 4]), \
                                      FOLD_8(operation, v[i + 8], v[i + 12])); \
                return FOLD_1(operation, FOLD_2(operation, q[0], q[1]), \
                              FOLD_2(operation, q[2], q[3])); \
        }

TREE_16(lanes_sum_16, lanes_add)
TREE_16(lanes_least_16, lanes_min)
TREE_16(lanes_largest_16, lanes_max)

#undef FOLD
#undef FOLD_8
#undef FOLD_4
#undef FOLD_2
#undef FOLD_1
#undef TREE_16

KERNEL float lanes_largest(lanes v) {
        __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

        b = _mm_max_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

KERNEL float lanes_least(lanes v) {
        __m256 a = _mm256_min_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        __m128 b = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

        b = _mm_min_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_min_ss(b, _mm_movehdup_ps(b)));
}
