/* SPDX-License-Identifier: Apache-2.0 */

/* The reference for kernels/lanes.h, which includes it: one lane after the other. */

typedef struct {
        float at[KVD_LANES];
} lanes;

#define EACH_LANE(expression) \
        ({ \
                lanes each_result; \
                for (int j = 0; j < KVD_LANES; j++) \
                        each_result.at[j] = (expression); \
                each_result; \
        })

KERNEL lanes lanes_set(float value) {
        return EACH_LANE(value);
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

KERNEL lanes lanes_load_n(const float *from, uint32_t n) {
        lanes a = lanes_zero();

        memcpy(a.at, from, n * sizeof(float));
        return a;
}

KERNEL lanes lanes_load(const float *from) {
        return lanes_load_n(from, KVD_LANES);
}

KERNEL void lanes_store_n(float *to, lanes a, uint32_t n) {
        memcpy(to, a.at, n * sizeof(float));
}

KERNEL void lanes_store(float *to, lanes a) {
        lanes_store_n(to, a, KVD_LANES);
}

KERNEL lanes lanes_widen_n(const void *from, uint32_t n, enum kvd_number type) {
        uint16_t half[KVD_LANES];
        lanes a = lanes_zero();

        if (type == KVD_NUMBER_F32)
                return lanes_load_n(from, n);
        if (lanes_are_bytes(type)) {
                kvd_widen_bytes_scalar(a.at, from, n, type);
                return a;
        }
        memcpy(half, from, n * sizeof *half);
        kvd_widen_scalar(a.at, half, n, type);
        return a;
}

KERNEL lanes lanes_widen(const void *from, enum kvd_number type) {
        return lanes_widen_n(from, KVD_LANES, type);
}

KERNEL void lanes_widen_2(const void *from, enum kvd_number type, lanes *a, lanes *b) {
        lanes low = lanes_widen(from, type),
              high = lanes_widen((const char *)from + lanes_bytes(type), type);

        for (uint32_t i = 0; i < 2 * KVD_LANES; i++) {
                uint32_t place = lanes_place_2(i, type);

                (place < KVD_LANES ? a : b)->at[place % KVD_LANES] =
                        (i < KVD_LANES ? low : high).at[i % KVD_LANES];
        }
}

KERNEL void lanes_narrow_n(void *to, lanes a, uint32_t n, enum kvd_number type) {
        uint16_t half[KVD_LANES];

        if (type == KVD_NUMBER_F32) {
                memcpy(to, a.at, n * sizeof(float));
                return;
        }
        kvd_narrow_scalar(half, a.at, n, type);
        memcpy(to, half, n * sizeof *half);
}

KERNEL void lanes_narrow(void *to, lanes a, enum kvd_number type) {
        lanes_narrow_n(to, a, KVD_LANES, type);
}

KERNEL lanes lanes_first(lanes a, uint32_t n) {
        return EACH_LANE((uint32_t)j < n ? a.at[j] : 0.0f);
}

/* ---- codes ---- */

typedef lanes coded; /* as floats */

struct lanes_scale {
        float scale, least;
};

KERNEL struct lanes_scale lanes_scale_at(const void *from, enum kvd_number type) {
        uint16_t half[2];
        float wide[2];

        (void)type;
        memcpy(half, from, sizeof half);
        kvd_widen_scalar(wide, half, 2, KVD_NUMBER_F16);
        return (struct lanes_scale){wide[0], wide[1]};
}

KERNEL coded lanes_codes_n(const uint8_t *from, uint32_t n, enum kvd_number type) {
        coded a = lanes_zero();

        for (uint32_t i = 0; i < n; i++)
                a.at[i] = type == KVD_NUMBER_Q8 ? from[i] : (from[i / 2] >> 4 * (i % 2) & 15);
        return a;
}

KERNEL coded lanes_codes(const uint8_t *from, enum kvd_number type) {
        return lanes_codes_n(from, KVD_LANES, type);
}

KERNEL void lanes_codes_2(const uint8_t *from, enum kvd_number type, coded *a, coded *b) {
        for (uint32_t i = 0; i < KVD_LANES; i++) {
                a->at[i] = type == KVD_NUMBER_Q8 ? from[i] : from[i] & 15;
                b->at[i] = type == KVD_NUMBER_Q8 ? from[KVD_LANES + i] : from[i] >> 4;
        }
}

KERNEL lanes lanes_decode(coded a, struct lanes_scale s, enum kvd_number type) {
        (void)type;
        return EACH_LANE(fmaf(a.at[j], s.scale, s.least));
}

KERNEL void lanes_stream(float *to, lanes a) {
        lanes_store(to, a);
}

KERNEL void lanes_fence(void) {
}

/* ---- lane by lane ---- */

KERNEL lanes lanes_add(lanes a, lanes b) {
        return EACH_LANE(a.at[j] + b.at[j]);
}

KERNEL lanes lanes_sub(lanes a, lanes b) {
        return EACH_LANE(a.at[j] - b.at[j]);
}

KERNEL lanes lanes_mul(lanes a, lanes b) {
        return EACH_LANE(a.at[j] * b.at[j]);
}

KERNEL lanes lanes_div(lanes a, lanes b) {
        return EACH_LANE(a.at[j] / b.at[j]);
}

KERNEL lanes lanes_fma(lanes a, lanes b, lanes c) {
        return EACH_LANE(fmaf(a.at[j], b.at[j], c.at[j]));
}

KERNEL lanes lanes_min(lanes a, lanes b) {
        return EACH_LANE(a.at[j] < b.at[j] ? a.at[j] : b.at[j]);
}

KERNEL lanes lanes_max(lanes a, lanes b) {
        return EACH_LANE(a.at[j] > b.at[j] ? a.at[j] : b.at[j]);
}

KERNEL lanes lanes_abs(lanes a) {
        return EACH_LANE(fabsf(a.at[j]));
}

KERNEL lanes lanes_sqrt(lanes a) {
        return EACH_LANE(sqrtf(a.at[j]));
}

KERNEL lanes lanes_round(lanes a) {
        return EACH_LANE(nearbyintf(a.at[j]));
}

KERNEL lanes lanes_select_less(lanes a, lanes b, lanes x, lanes y) {
        return EACH_LANE(a.at[j] < b.at[j] ? x.at[j] : y.at[j]);
}

KERNEL lanes lanes_spoil(lanes x, lanes a, lanes b) {
        return EACH_LANE(a.at[j] != a.at[j] || b.at[j] != b.at[j] ? NAN : x.at[j]);
}

/* 2^n, n being the low bits of n + EXP_SHIFT. */
KERNEL lanes lanes_power(lanes shifted) {
        uint32_t bits[KVD_LANES];
        lanes a;

        memcpy(bits, shifted.at, sizeof bits);
        for (int j = 0; j < KVD_LANES; j++)
                bits[j] = (bits[j] << 23) + EXP_ONE;
        memcpy(a.at, bits, sizeof bits);
        return a;
}

/* ---- across the lanes ---- */

KERNEL float lanes_sum(lanes a) {
        for (int width = KVD_LANES / 2; width > 0; width /= 2)
                for (int j = 0; j < width; j++)
                        a.at[j] += a.at[j + width];
        return a.at[0];
}

KERNEL float lanes_largest(lanes a) {
        for (int width = KVD_LANES / 2; width > 0; width /= 2)
                for (int j = 0; j < width; j++)
                        a.at[j] = a.at[j] > a.at[j + width] ? a.at[j] : a.at[j + width];
        return a.at[0];
}

KERNEL float lanes_least(lanes a) {
        for (int width = KVD_LANES / 2; width > 0; width /= 2)
                for (int j = 0; j < width; j++)
                        a.at[j] = a.at[j] < a.at[j + width] ? a.at[j] : a.at[j + width];
        return a.at[0];
}

KERNEL lanes lanes_sum_16(const lanes v[KVD_LANES]) {
        return EACH_LANE(lanes_sum(v[j]));
}

KERNEL lanes lanes_least_16(const lanes v[KVD_LANES]) {
        return EACH_LANE(lanes_least(v[j]));
}

KERNEL lanes lanes_largest_16(const lanes v[KVD_LANES]) {
        return EACH_LANE(lanes_largest(v[j]));
}

#undef EACH_LANE
