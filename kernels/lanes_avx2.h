/* SPDX-License-Identifier: Apache-2.0 */

/*
 * AVX2, FMA and F16C for kernels/lanes.h, which includes it: lanes 0 to 7 and 8 to 15 in two
 * registers.
 */

#include <immintrin.h>

typedef struct {
        __m256 low, high;
} lanes;

#define BOTH(operation, ...) \
        ((lanes){BOTH_(operation, low, __VA_ARGS__), BOTH_(operation, high, __VA_ARGS__)})
#define BOTH_(operation, half, ...) \
        BOTH_PICK(__VA_ARGS__, BOTH_3, BOTH_2, BOTH_1)(operation, half, __VA_ARGS__)
#define BOTH_PICK(a, b, c, name, ...) name
#define BOTH_1(operation, half, a) operation((a).half)
#define BOTH_2(operation, half, a, b) operation((a).half, (b).half)
#define BOTH_3(operation, half, a, b, c) operation((a).half, (b).half, (c).half)

/* Sets all bits of lanes j < n of eight. */
KERNEL __m256i lanes_mask(int n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

KERNEL lanes lanes_set(float value) {
        return (lanes){_mm256_set1_ps(value), _mm256_set1_ps(value)};
}

KERNEL lanes lanes_constant(float value) {
        __m256 all = _mm256_set1_ps(value);

        __asm__("" : "+x"(all)); /* otherwise every operation would load it again */
        return (lanes){all, all};
}

KERNEL lanes lanes_zero(void) {
        return (lanes){_mm256_setzero_ps(), _mm256_setzero_ps()};
}

/* ---- memory ---- */

KERNEL lanes lanes_load(const float *from) {
        return (lanes){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}

KERNEL lanes lanes_held(lanes a) {
        __asm__("" : "+x"(a.low), "+x"(a.high)); /* otherwise every use would load it again */
        return a;
}

KERNEL lanes lanes_load_n(const float *from, uint32_t n) {
        return (lanes){_mm256_maskload_ps(from, lanes_mask((int)n)),
                       n > 8 ? _mm256_maskload_ps(from + 8, lanes_mask((int)n - 8)) :
                               _mm256_setzero_ps()};
}

KERNEL void lanes_store(float *to, lanes a) {
        _mm256_storeu_ps(to, a.low);
        _mm256_storeu_ps(to + 8, a.high);
}

KERNEL void lanes_store_n(float *to, lanes a, uint32_t n) {
        _mm256_maskstore_ps(to, lanes_mask((int)n), a.low);
        if (n > 8)
                _mm256_maskstore_ps(to + 8, lanes_mask((int)n - 8), a.high);
}

KERNEL __m256 lanes_from_half(__m128i half, enum kvd_number type) {
        if (type == KVD_NUMBER_F16)
                return _mm256_cvtph_ps(half);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

KERNEL __m128i lanes_to_half(__m256 a, enum kvd_number type) {
        __m256i bits = _mm256_castps_si256(a), upper = _mm256_srli_epi32(bits, 16);
        __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(upper, _mm256_set1_epi32(0x40)));
        __m256 number = _mm256_castsi256_ps(_mm256_srli_epi32(rounded, 16));
        __m256i chosen = _mm256_castps_si256(
                _mm256_blendv_ps(number, quiet, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)));

        if (type == KVD_NUMBER_F16)
                return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
        /* The pack saturates signed 32-bit numbers; none here is negative or above 0xffff. */
        return _mm_packus_epi32(_mm256_castsi256_si128(chosen),
                                _mm256_extracti128_si256(chosen, 1));
}

/* 16 bytes as F16; of E4M3, 2^-8 of each number. */
KERNEL __m256i lanes_half_of(__m128i bytes, enum kvd_number type) {
        __m256i wide = _mm256_cvtepi8_epi16(bytes), rest = _mm256_slli_epi16(wide, 9),
                nan = _mm256_cmpeq_epi16(rest, _mm256_set1_epi16((short)0xfe00)),
                half = _mm256_and_si256(_mm256_slli_epi16(wide, 7),
                                        _mm256_set1_epi16((short)0xbf80));

        if (type == KVD_NUMBER_E5M2)
                return _mm256_slli_epi16(wide, 8);
        return _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
}

KERNEL lanes lanes_from_bytes(__m128i bytes, enum kvd_number type) {
        __m256i half = lanes_half_of(bytes, type);
        __m256 unit = _mm256_set1_ps(0x1p8f);
        lanes a = {_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
                   _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};

        if (type == KVD_NUMBER_E4M3)
                a = (lanes){_mm256_mul_ps(a.low, unit), _mm256_mul_ps(a.high, unit)};
        return a;
}

KERNEL lanes lanes_widen(const void *from, enum kvd_number type) {
        const __m128i *half = from;

        if (type == KVD_NUMBER_F32)
                return lanes_load(from);
        if (lanes_are_bytes(type))
                return lanes_from_bytes(_mm_loadu_si128(from), type);
        return (lanes){lanes_from_half(_mm_loadu_si128(half), type),
                       lanes_from_half(_mm_loadu_si128(half + 1), type)};
}

KERNEL lanes lanes_widen_n(const void *from, uint32_t n, enum kvd_number type) {
        uint16_t half[KVD_LANES] = {0};

        if (type == KVD_NUMBER_F32)
                return lanes_load_n(from, n);
        memcpy(half, from, n * (lanes_bytes(type) / KVD_LANES));
        return lanes_widen(half, type);
}

KERNEL __m256 lanes_even(__m256i both) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
}

KERNEL __m256 lanes_odd(__m256i both) {
        return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)));
}

KERNEL void lanes_widen_2(const void *from, enum kvd_number type, lanes *a, lanes *b) {
        const __m256i *pairs = from;

        if (type == KVD_NUMBER_BF16) {
                __m256i first = _mm256_loadu_si256(pairs), second = _mm256_loadu_si256(pairs + 1);

                *a = (lanes){lanes_even(first), lanes_even(second)};
                *b = (lanes){lanes_odd(first), lanes_odd(second)};
                return;
        }
        *a = lanes_widen(from, type);
        *b = lanes_widen((const char *)from + lanes_bytes(type), type);
}

KERNEL void lanes_narrow(void *to, lanes a, enum kvd_number type) {
        __m128i *half = to;

        if (type == KVD_NUMBER_F32) {
                lanes_store(to, a);
                return;
        }
        _mm_storeu_si128(half, lanes_to_half(a.low, type));
        _mm_storeu_si128(half + 1, lanes_to_half(a.high, type));
}

KERNEL void lanes_narrow_n(void *to, lanes a, uint32_t n, enum kvd_number type) {
        uint16_t half[KVD_LANES];

        if (type == KVD_NUMBER_F32) {
                lanes_store_n(to, a, n);
                return;
        }
        lanes_narrow(half, a, type);
        memcpy(to, half, n * sizeof *half);
}

KERNEL __m256 half_first(__m256 a, int n) {
        return _mm256_and_ps(a, _mm256_castsi256_ps(lanes_mask(n)));
}

KERNEL lanes lanes_first(lanes a, uint32_t n) {
        return (lanes){half_first(a.low, (int)n), half_first(a.high, (int)n - 8)};
}

/* ---- codes ---- */

typedef __m128i coded; /* a byte each */

struct lanes_scale {
        __m256 scale, least;
};

KERNEL struct lanes_scale lanes_scale_at(const void *from, enum kvd_number type) {
        __m128 both = _mm_cvtph_ps(_mm_loadu_si32(from));

        (void)type;
        return (struct lanes_scale){_mm256_broadcastss_ps(both),
                                    _mm256_broadcastss_ps(_mm_movehdup_ps(both))};
}

KERNEL coded lanes_low_codes(__m128i pairs) {
        return _mm_and_si128(pairs, _mm_set1_epi8(15));
}

KERNEL coded lanes_high_codes(__m128i pairs) {
        return lanes_low_codes(_mm_srli_epi16(pairs, 4));
}

KERNEL coded lanes_codes(const uint8_t *from, enum kvd_number type) {
        __m128i pairs;

        if (type == KVD_NUMBER_Q8)
                return _mm_loadu_si128((const void *)from);
        pairs = _mm_loadl_epi64((const void *)from);
        return _mm_unpacklo_epi8(lanes_low_codes(pairs), lanes_high_codes(pairs));
}

KERNEL coded lanes_codes_n(const uint8_t *from, uint32_t n, enum kvd_number type) {
        uint8_t some[KVD_LANES] = {0};

        memcpy(some, from, type == KVD_NUMBER_Q8 ? n : n / 2);
        return lanes_codes(some, type);
}

KERNEL void lanes_codes_2(const uint8_t *from, enum kvd_number type, coded *a, coded *b) {
        *a = _mm_loadu_si128((const void *)from);
        if (type == KVD_NUMBER_Q8) {
                *b = _mm_loadu_si128((const void *)(from + KVD_LANES));
                return;
        }
        *b = lanes_high_codes(*a);
        *a = lanes_low_codes(*a);
}

KERNEL __m256 lanes_decode_8(coded a, struct lanes_scale s) {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(a)), s.scale, s.least);
}

KERNEL lanes lanes_decode(coded a, struct lanes_scale s, enum kvd_number type) {
        (void)type;
        return (lanes){lanes_decode_8(a, s), lanes_decode_8(_mm_unpackhi_epi64(a, a), s)};
}

KERNEL void lanes_stream(float *to, lanes a) {
        _mm256_stream_ps(to, a.low);
        _mm256_stream_ps(to + 8, a.high);
}

KERNEL void lanes_fence(void) {
        _mm_sfence();
}

/* ---- lane by lane ---- */

KERNEL lanes lanes_add(lanes a, lanes b) {
        return BOTH(_mm256_add_ps, a, b);
}

KERNEL lanes lanes_sub(lanes a, lanes b) {
        return BOTH(_mm256_sub_ps, a, b);
}

KERNEL lanes lanes_mul(lanes a, lanes b) {
        return BOTH(_mm256_mul_ps, a, b);
}

KERNEL lanes lanes_div(lanes a, lanes b) {
        return BOTH(_mm256_div_ps, a, b);
}

KERNEL lanes lanes_fma(lanes a, lanes b, lanes c) {
        return BOTH(_mm256_fmadd_ps, a, b, c);
}

KERNEL lanes lanes_min(lanes a, lanes b) {
        return BOTH(_mm256_min_ps, a, b);
}

KERNEL lanes lanes_max(lanes a, lanes b) {
        return BOTH(_mm256_max_ps, a, b);
}

KERNEL __m256 half_abs(__m256 a) {
        return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}

KERNEL lanes lanes_abs(lanes a) {
        return BOTH(half_abs, a);
}

KERNEL lanes lanes_sqrt(lanes a) {
        return BOTH(_mm256_sqrt_ps, a);
}

KERNEL __m256 half_round(__m256 a) {
        return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

KERNEL lanes lanes_round(lanes a) {
        return BOTH(half_round, a);
}

KERNEL __m256 half_less(__m256 a, __m256 b) {
        return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}

KERNEL lanes lanes_select_less(lanes a, lanes b, lanes x, lanes y) {
        lanes less = BOTH(half_less, a, b);

        return BOTH(_mm256_blendv_ps, y, x, less);
}

KERNEL __m256 half_spoil(__m256 x, __m256 a, __m256 b) {
        return _mm256_or_ps(x, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}

KERNEL lanes lanes_spoil(lanes x, lanes a, lanes b) {
        return BOTH(half_spoil, x, a, b);
}

KERNEL __m256 half_power(__m256 shifted) {
        __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);

        return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(EXP_ONE)));
}

/* 2^n, n being the low bits of n + EXP_SHIFT. */
KERNEL lanes lanes_power(lanes shifted) {
        return BOTH(half_power, shifted);
}

/* ---- across the lanes ---- */

KERNEL float lanes_sum(lanes v) {
        __m256 a = _mm256_add_ps(v.low, v.high);
        __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

        b = _mm_add_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/*
 * The trees of eight vectors at once: parts of width 8, 4, 2 and 1 of two vectors are brought side
 * by side.
 */
#define FOLD(operation, shuffle, a, b, low, high) operation(shuffle(a, b, low), shuffle(a, b, high))
#define FOLD_4(operation, a, b) FOLD(operation, _mm256_permute2f128_ps, a, b, 0x20, 0x31)
#define FOLD_2(operation, a, b) FOLD(operation, _mm256_shuffle_ps, a, b, 0x44, 0xee)
#define FOLD_1(operation, a, b) FOLD(operation, _mm256_shuffle_ps, a, b, 0x88, 0xdd)
#define TREE_16(name, operation) \
        KERNEL __m256 name##_of_8(const lanes v[8]) { \
                __m256 s[8], q[4]; \
\
                for (int i = 0; i < 8; i++) \
                        s[i] = operation(v[i].low, v[i].high); \
                for (int i = 0; i < 4; i++) \
                        q[i] = FOLD_4(operation, s[i], s[i + 4]); \
                return FOLD_1(operation, FOLD_2(operation, q[0], q[1]), \
                              FOLD_2(operation, q[2], q[3])); \
        } \
\
        KERNEL lanes name(const lanes v[KVD_LANES]) { \
                return (lanes){name##_of_8(v), name##_of_8(v + 8)}; \
        }

TREE_16(lanes_sum_16, _mm256_add_ps)
TREE_16(lanes_least_16, _mm256_min_ps)
TREE_16(lanes_largest_16, _mm256_max_ps)

#undef FOLD
#undef FOLD_4
#undef FOLD_2
#undef FOLD_1
#undef TREE_16

KERNEL float lanes_largest(lanes v) {
        __m256 a = _mm256_max_ps(v.low, v.high);
        __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

        b = _mm_max_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

KERNEL float lanes_least(lanes v) {
        __m256 a = _mm256_min_ps(v.low, v.high);
        __m128 b = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

        b = _mm_min_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_min_ss(b, _mm_movehdup_ps(b)));
}

#undef BOTH
#undef BOTH_
#undef BOTH_PICK
#undef BOTH_1
#undef BOTH_2
#undef BOTH_3
