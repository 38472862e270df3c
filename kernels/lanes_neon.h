/* SPDX-License-Identifier: Apache-2.0 */

/*
 * NEON of aarch64 for kernels/lanes.h, which includes it: lanes 4 q to 4 q + 3 in register q of
 * four.
 */

#include <arm_neon.h>

typedef struct {
        float32x4_t at[4];
} lanes;

/* q is a constant in the expression: compilers keep the registers of a loop over q in memory. */
#define EACH_QUARTER(expression) \
        ((lanes){{QUARTER(0, expression), QUARTER(1, expression), QUARTER(2, expression), \
                  QUARTER(3, expression)}})
#define QUARTER(number, expression) \
        ({ \
                enum { q = number }; \
                expression; \
        })

KERNEL lanes lanes_set(float value) {
        return EACH_QUARTER(vdupq_n_f32(value));
}

KERNEL lanes lanes_constant(float value) {
        return lanes_set(value);
}

KERNEL lanes lanes_zero(void) {
        return lanes_set(0.0f);
}

/* ---- memory ---- */

KERNEL lanes lanes_held(lanes a) {
        return a;
}

KERNEL lanes lanes_load(const float *from) {
        return EACH_QUARTER(vld1q_f32(from + (ptrdiff_t)4 * q));
}

/* How many of the first n lanes are in quarter q, or lie behind it. */
KERNEL uint32_t quarter_of(uint32_t n, uint32_t q) {
        return n > 4 * q ? n - 4 * q : 0;
}

KERNEL float32x4_t quarter_load(const float *from, uint32_t n) {
        float32x4_t a = vdupq_n_f32(0.0f);

        if (n >= 4)
                return vld1q_f32(from);
        if (n > 0)
                a = vld1q_lane_f32(from, a, 0);
        if (n > 1)
                a = vld1q_lane_f32(from + 1, a, 1);
        return n > 2 ? vld1q_lane_f32(from + 2, a, 2) : a;
}

KERNEL lanes lanes_load_n(const float *from, uint32_t n) {
        return EACH_QUARTER(quarter_load(from + (ptrdiff_t)4 * q, quarter_of(n, q)));
}

KERNEL void lanes_store(float *to, lanes a) {
        for (ptrdiff_t q = 0; q < 4; q++)
                vst1q_f32(to + 4 * q, a.at[q]);
}

KERNEL void quarter_store(float *to, float32x4_t a, uint32_t n) {
        if (n >= 4) {
                vst1q_f32(to, a);
                return;
        }
        if (n > 0)
                vst1q_lane_f32(to, a, 0);
        if (n > 1)
                vst1q_lane_f32(to + 1, a, 1);
        if (n > 2)
                vst1q_lane_f32(to + 2, a, 2);
}

KERNEL void lanes_store_n(float *to, lanes a, uint32_t n) {
        for (uint32_t q = 0; q < 4; q++)
                quarter_store(to + (size_t)4 * q, a.at[q], quarter_of(n, q));
}

KERNEL float32x4_t quarter_from_half(uint16x4_t half, enum kvd_number type) {
        if (type == KVD_NUMBER_F16)
                return vcvt_f32_f16(vreinterpret_f16_u16(half));
        return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
}

KERNEL uint16x4_t quarter_to_half(float32x4_t a, enum kvd_number type) {
        uint32x4_t bits = vreinterpretq_u32_f32(a), upper = vshrq_n_u32(bits, 16);
        uint32x4_t odd = vandq_u32(upper, vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        uint32x4_t quiet = vorrq_u32(upper, vdupq_n_u32(0x40));

        if (type == KVD_NUMBER_F16)
                return vreinterpret_u16_f16(vcvt_f16_f32(a));
        return vmovn_u32(vbslq_u32(vceqq_f32(a, a), vshrq_n_u32(rounded, 16), quiet));
}

/* Eight bytes as F16; of E4M3, 2^-8 of each number. */
KERNEL uint16x8_t half_of_bytes(uint8x8_t bytes, enum kvd_number type) {
        uint16x8_t wide = vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(bytes)));
        uint16x8_t nan = vceqq_u16(vshlq_n_u16(wide, 9), vdupq_n_u16(0xfe00));

        if (type == KVD_NUMBER_E5M2)
                return vshlq_n_u16(wide, 8);
        return vorrq_u16(vandq_u16(vshlq_n_u16(wide, 7), vdupq_n_u16(0xbf80)),
                         vandq_u16(nan, vdupq_n_u16(0x7e00)));
}

KERNEL lanes lanes_from_bytes(const uint8_t *from, enum kvd_number type) {
        lanes a;

        for (ptrdiff_t q = 0; q < 4; q += 2) {
                uint16x8_t half = half_of_bytes(vld1_u8(from + 4 * q), type);

                a.at[q] = quarter_from_half(vget_low_u16(half), KVD_NUMBER_F16);
                a.at[q + 1] = quarter_from_half(vget_high_u16(half), KVD_NUMBER_F16);
        }
        if (type == KVD_NUMBER_E4M3)
                return EACH_QUARTER(vmulq_n_f32(a.at[q], 0x1p8f));
        return a;
}

KERNEL lanes lanes_widen(const void *from, enum kvd_number type) {
        const uint16_t *half = from;

        if (type == KVD_NUMBER_F32)
                return lanes_load(from);
        if (lanes_are_bytes(type))
                return lanes_from_bytes(from, type);
        return EACH_QUARTER(quarter_from_half(vld1_u16(half + (ptrdiff_t)4 * q), type));
}

KERNEL lanes lanes_widen_n(const void *from, uint32_t n, enum kvd_number type) {
        uint16_t half[KVD_LANES] = {0};

        if (type == KVD_NUMBER_F32)
                return lanes_load_n(from, n);
        memcpy(half, from, n * (lanes_bytes(type) / KVD_LANES));
        return lanes_widen(half, type);
}

KERNEL void lanes_widen_2(const void *from, enum kvd_number type, lanes *a, lanes *b) {
        const uint16_t *half = from;

        if (type == KVD_NUMBER_BF16) {
                for (ptrdiff_t q = 0; q < 4; q++) {
                        uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(half + 8 * q));

                        a->at[q] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
                        b->at[q] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
                }
                return;
        }
        *a = lanes_widen(from, type);
        *b = lanes_widen((const char *)from + lanes_bytes(type), type);
}

KERNEL void lanes_narrow(void *to, lanes a, enum kvd_number type) {
        uint16_t *half = to;

        if (type == KVD_NUMBER_F32) {
                lanes_store(to, a);
                return;
        }
        for (ptrdiff_t q = 0; q < 4; q++)
                vst1_u16(half + 4 * q, quarter_to_half(a.at[q], type));
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

KERNEL float32x4_t quarter_first(float32x4_t a, uint32_t n) {
        static const uint32_t each[] = {0, 1, 2, 3};
        uint32x4_t there = vcltq_u32(vld1q_u32(each), vdupq_n_u32(n));

        return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), there));
}

KERNEL lanes lanes_first(lanes a, uint32_t n) {
        return EACH_QUARTER(quarter_first(a.at[q], quarter_of(n, q)));
}

/* ---- codes ---- */

typedef uint8x16_t coded; /* a byte each */

struct lanes_scale {
        float32x4_t scale, least;
};

KERNEL struct lanes_scale lanes_scale_at(const void *from, enum kvd_number type) {
        uint16_t half[4] = {0};
        float32x4_t both;

        (void)type;
        memcpy(half, from, 2 * sizeof *half);
        both = quarter_from_half(vld1_u16(half), KVD_NUMBER_F16);
        return (struct lanes_scale){vdupq_laneq_f32(both, 0), vdupq_laneq_f32(both, 1)};
}

KERNEL coded lanes_codes(const uint8_t *from, enum kvd_number type) {
        uint8x16_t pairs;

        if (type == KVD_NUMBER_Q8)
                return vld1q_u8(from);
        pairs = vcombine_u8(vld1_u8(from), vdup_n_u8(0));
        return vzip1q_u8(vandq_u8(pairs, vdupq_n_u8(15)), vshrq_n_u8(pairs, 4));
}

KERNEL coded lanes_codes_n(const uint8_t *from, uint32_t n, enum kvd_number type) {
        uint8_t some[KVD_LANES] = {0};

        memcpy(some, from, type == KVD_NUMBER_Q8 ? n : n / 2);
        return lanes_codes(some, type);
}

KERNEL void lanes_codes_2(const uint8_t *from, enum kvd_number type, coded *a, coded *b) {
        *a = vld1q_u8(from);
        if (type == KVD_NUMBER_Q8) {
                *b = vld1q_u8(from + KVD_LANES);
                return;
        }
        *b = vshrq_n_u8(*a, 4);
        *a = vandq_u8(*a, vdupq_n_u8(15));
}

KERNEL lanes lanes_decode(coded a, struct lanes_scale s, enum kvd_number type) {
        uint16x8_t low = vmovl_u8(vget_low_u8(a)), high = vmovl_high_u8(a);
        uint32x4_t code[4] = {vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low),
                              vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)};

        (void)type;
        return EACH_QUARTER(vfmaq_f32(s.least, vcvtq_f32_u32(code[q]), s.scale));
}

/* Compilers have no intrinsic for a store past the caches, and an ordinary one needs no fence. */
KERNEL void lanes_stream(float *to, lanes a) {
        lanes_store(to, a);
}

KERNEL void lanes_fence(void) {
}

/* ---- lane by lane ---- */

KERNEL lanes lanes_add(lanes a, lanes b) {
        return EACH_QUARTER(vaddq_f32(a.at[q], b.at[q]));
}

KERNEL lanes lanes_sub(lanes a, lanes b) {
        return EACH_QUARTER(vsubq_f32(a.at[q], b.at[q]));
}

KERNEL lanes lanes_mul(lanes a, lanes b) {
        return EACH_QUARTER(vmulq_f32(a.at[q], b.at[q]));
}

KERNEL lanes lanes_div(lanes a, lanes b) {
        return EACH_QUARTER(vdivq_f32(a.at[q], b.at[q]));
}

KERNEL lanes lanes_fma(lanes a, lanes b, lanes c) {
        return EACH_QUARTER(vfmaq_f32(c.at[q], a.at[q], b.at[q]));
}

/* Not vminq_f32, vmaxq_f32: these return NaN if either is, and order -0 before 0. */
KERNEL float32x4_t quarter_min(float32x4_t a, float32x4_t b) {
        return vbslq_f32(vcltq_f32(a, b), a, b);
}

KERNEL float32x4_t quarter_max(float32x4_t a, float32x4_t b) {
        return vbslq_f32(vcgtq_f32(a, b), a, b);
}

KERNEL lanes lanes_min(lanes a, lanes b) {
        return EACH_QUARTER(quarter_min(a.at[q], b.at[q]));
}

KERNEL lanes lanes_max(lanes a, lanes b) {
        return EACH_QUARTER(quarter_max(a.at[q], b.at[q]));
}

KERNEL lanes lanes_abs(lanes a) {
        return EACH_QUARTER(vabsq_f32(a.at[q]));
}

KERNEL lanes lanes_sqrt(lanes a) {
        return EACH_QUARTER(vsqrtq_f32(a.at[q]));
}

KERNEL lanes lanes_round(lanes a) {
        return EACH_QUARTER(vrndnq_f32(a.at[q]));
}

KERNEL lanes lanes_select_less(lanes a, lanes b, lanes x, lanes y) {
        return EACH_QUARTER(vbslq_f32(vcltq_f32(a.at[q], b.at[q]), x.at[q], y.at[q]));
}

KERNEL lanes lanes_spoil(lanes x, lanes a, lanes b) {
        return EACH_QUARTER(
                vbslq_f32(vandq_u32(vceqq_f32(a.at[q], a.at[q]), vceqq_f32(b.at[q], b.at[q])),
                          x.at[q], vdupq_n_f32(NAN)));
}

KERNEL float32x4_t quarter_power(float32x4_t shifted) {
        uint32x4_t bits = vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23);

        return vreinterpretq_f32_u32(vaddq_u32(bits, vdupq_n_u32(EXP_ONE)));
}

/* 2^n, n being the low bits of n + EXP_SHIFT. */
KERNEL lanes lanes_power(lanes shifted) {
        return EACH_QUARTER(quarter_power(shifted.at[q]));
}

/* ---- across the lanes ---- */

/* Words 0 and 1 of two vectors, or words 2 and 3. */
KERNEL float32x4_t low_halves(float32x4_t a, float32x4_t b) {
        return vcombine_f32(vget_low_f32(a), vget_low_f32(b));
}

KERNEL float32x4_t high_halves(float32x4_t a, float32x4_t b) {
        return vcombine_f32(vget_high_f32(a), vget_high_f32(b));
}

/*
 * The trees of four vectors at once: parts of width 8, 4, 2 and 1 of them are brought side by side.
 * A single vector goes the same way.
 */
#define TREE_16(name, all, operation) \
        KERNEL float32x4_t name##_of_4(const lanes *v) { \
                float32x4_t s[4], low, high; \
\
                for (int i = 0; i < 4; i++) \
                        s[i] = operation(operation(v[i].at[0], v[i].at[2]), \
                                         operation(v[i].at[1], v[i].at[3])); \
                low = operation(low_halves(s[0], s[1]), high_halves(s[0], s[1])); \
                high = operation(low_halves(s[2], s[3]), high_halves(s[2], s[3])); \
                return operation(vuzp1q_f32(low, high), vuzp2q_f32(low, high)); \
        } \
\
        KERNEL lanes all(const lanes v[KVD_LANES]) { \
                return EACH_QUARTER(name##_of_4(v + (ptrdiff_t)4 * q)); \
        } \
\
        KERNEL float name(lanes v) { \
                const lanes same[4] = {v, v, v, v}; \
\
                return vgetq_lane_f32(name##_of_4(same), 0); \
        }

TREE_16(lanes_sum, lanes_sum_16, vaddq_f32)
TREE_16(lanes_least, lanes_least_16, quarter_min)
TREE_16(lanes_largest, lanes_largest_16, quarter_max)

#undef TREE_16
#undef EACH_QUARTER
#undef QUARTER
