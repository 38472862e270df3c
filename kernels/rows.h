/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ROWS_H
#define KVD_KERNELS_ROWS_H

/*
 * Rows of numbers of any type (ipc/base/format.h), read and written over lanes. A row is addressed
 * by its first byte and the number of an element, since the scales of quantised numbers lie behind
 * all codes. Codes are expanded in registers only. As in lanes.h, types are compile-time constants.
 *
 *   row_widen     n <= 16 elements from number d on, of one group; the other lanes are 0. d is a multiple of 8
 *   row_widen_2   32 elements from number d on, a multiple of 32, in the order of lanes_place_2()
 *   row_widen_scaled  the same, with the scale of their group, so that it is found once for all of it
 *   row_part      16 elements from number d on, as far as there are so many; the other lanes are 0
 *   key_group     up to 64 elements of a key from number d on, a multiple of 64, as floats
 *   key_plain     n <= 64 elements of a key from any number on, of the type that plain_type() returns
 *   row_write_part  row_step() elements from number d on, a multiple of that, or fewer at the end
 *
 * Quantised keys are stored transformed (kernels/turn.h). key_group and key_plain give the numbers
 * of a key, all others what is stored.
 */

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/bytes.h"
#include "kernels/lanes.h"
#include "kernels/turn.h"

/* Calls f, whose last argument is the type, with the type as a constant. */
#define TYPED(type, f, ...) \
        ((type) == KVD_NUMBER_F32  ? f(__VA_ARGS__, KVD_NUMBER_F32) : \
         (type) == KVD_NUMBER_F16  ? f(__VA_ARGS__, KVD_NUMBER_F16) : \
         (type) == KVD_NUMBER_BF16 ? f(__VA_ARGS__, KVD_NUMBER_BF16) : \
         (type) == KVD_NUMBER_E4M3 ? f(__VA_ARGS__, KVD_NUMBER_E4M3) : \
         (type) == KVD_NUMBER_E5M2 ? f(__VA_ARGS__, KVD_NUMBER_E5M2) : \
         (type) == KVD_NUMBER_Q8   ? f(__VA_ARGS__, KVD_NUMBER_Q8) : \
                                     f(__VA_ARGS__, KVD_NUMBER_Q4))

KERNEL const void *row_at(const void *row, uint32_t d, enum kvd_number type) {
        return (const uint8_t *)row + kvd_code_bytes(type, d);
}

/* The scale and the least number of element d's group. */
KERNEL const void *row_scale(const void *row, uint32_t d, uint32_t dim, enum kvd_number type) {
        return (const uint8_t *)row_at(row, dim, type) + (size_t)(d / KVD_GROUP * KVD_SCALE_BYTES);
}

/* ---- reading ---- */

/* The scale of element d's group; nothing if numbers are plain. */
KERNEL struct lanes_scale row_scale_of(const void *row, uint32_t d, uint32_t dim,
                                       enum kvd_number type) {
        return kvd_is_quantised(type) ? lanes_scale_at(row_scale(row, d, dim, type), type) :
                                        (struct lanes_scale){0};
}

KERNEL lanes row_widen(const void *row, uint32_t d, uint32_t n, uint32_t dim,
                       enum kvd_number type) {
        struct lanes_scale scale = row_scale_of(row, d, dim, type);
        const void *at = row_at(row, d, type);

        if (!kvd_is_quantised(type))
                return lanes_widen_to(at, n, type);
        if (n < KVD_LANES)
                return lanes_first(lanes_decode(lanes_codes_n(at, n, type), scale, type), n);
        return lanes_decode(lanes_codes(at, type), scale, type);
}

KERNEL void row_widen_scaled(struct lanes_scale scale, const void *row, uint32_t d,
                             enum kvd_number type, lanes *a, lanes *b) {
        coded low, high;

        if (!kvd_is_quantised(type)) {
                lanes_widen_2(row_at(row, d, type), type, a, b);
                return;
        }
        lanes_codes_2(row_at(row, d, type), type, &low, &high);
        *a = lanes_decode(low, scale, type);
        *b = lanes_decode(high, scale, type);
}

KERNEL void row_widen_2(const void *row, uint32_t d, uint32_t dim, enum kvd_number type, lanes *a,
                        lanes *b) {
        row_widen_scaled(row_scale_of(row, d, dim, type), row, d, type, a, b);
}

KERNEL lanes row_part(const void *row, uint32_t d, uint32_t dim, enum kvd_number type) {
        return d < dim ? row_widen(row, d, MIN(dim - d, KVD_LANES), dim, type) : lanes_zero();
}

/* Returns their number. */
KERNEL uint32_t key_group(float *to, const void *key, uint32_t d, uint32_t dim,
                          enum kvd_number type) {
        uint32_t n = MIN(dim - d, KVD_GROUP);

        for (uint32_t i = 0; i < n; i += KVD_LANES)
                lanes_store_to(to + i, row_widen(key, d + i, MIN(n - i, KVD_LANES), dim, type),
                               MIN(n - i, KVD_LANES));
        turn_key(to, n, type);
        return n;
}

KERNEL enum kvd_number plain_type(enum kvd_number type) {
        return kvd_is_quantised(type) ? KVD_NUMBER_F32 : type;
}

/* Where the elements are, or are expanded to: room, of two groups. */
KERNEL const uint8_t *key_plain(float *room, const void *key, uint32_t d, uint32_t n, uint32_t dim,
                                enum kvd_number type) {
        uint32_t first = d / KVD_GROUP * KVD_GROUP;

        if (!kvd_is_quantised(type))
                return row_at(key, d, type);
        for (uint32_t at = first; at < d + n; at += KVD_GROUP)
                key_group(room + (at - first), key, at, dim, type);
        return (const uint8_t *)(room + (d - first));
}

/* ---- writing ---- */

struct row_range {
        float scale, least; /* as stored */
};

/* What is stored of a number that f16 can hold. */
KERNEL float row_half(uint16_t *half, float number) {
        float stored;

        lanes_narrow_n(half, lanes_set(number), 1, KVD_NUMBER_F16);
        lanes_store_n(&stored, lanes_widen_n(half, 1, KVD_NUMBER_F16), 1);
        return stored;
}

/* Stores the scale and the least number of x, which has whole lanes. No numbers: NaN and 0. */
KERNEL struct row_range row_measure(void *scale, const float *x, uint32_t n, float most_code) {
        lanes least = lanes_load(x), most = least, check = lanes_zero();
        struct row_range r = {0.0f, NAN};
        uint16_t half[2] = {0, 0x7e00};

        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                lanes xi = lanes_load(x + i);

                least = lanes_min(least, xi);
                most = lanes_max(most, xi);
                check = lanes_add(check, lanes_sub(xi, xi)); /* NaN if xi is not finite */
        }
        if (lanes_sum(check) == 0.0f) {
                /* 0.0f is added so that -0 becomes 0 */
                r.least = row_half(half + 1,
                                   MIN(MAX(lanes_least(least), -65504.0f), 65504.0f) + 0.0f);
                r.scale = MIN((lanes_largest(most) - r.least) / most_code, 65504.0f);
                r.scale = row_half(half, MAX(r.scale, 0x1p-14f));
        }
        memcpy(scale, half, sizeof half);
        return r;
}

KERNEL void row_put_codes(uint8_t *to, const float *code, uint32_t n, enum kvd_number type) {
        for (uint32_t i = 0; i < n && type == KVD_NUMBER_Q8; i++)
                to[i] = (uint8_t)(int)code[i];
        for (uint32_t i = 0; i < n / 2 && type == KVD_NUMBER_Q4; i++)
                to[i] = (uint8_t)((int)code[2 * i] | (int)code[2 * i + 1] << 4);
}

/* Writes the n elements of the group that begins with number d. */
KERNEL void row_write_group(void *row, uint32_t d, const float *from, uint32_t n, uint32_t dim,
                            enum kvd_number type) {
        const float most_code = type == KVD_NUMBER_Q8 ? 255.0f : 15.0f;
        float x[KVD_GROUP];
        struct row_range r;

        memcpy(x, from, n * sizeof *x);
        for (uint32_t i = n; i % KVD_LANES != 0; i++)
                x[i] = x[0];
        r = row_measure((void *)row_scale(row, d, dim, type), x, n, most_code);
        for (uint32_t i = 0; i < n; i += KVD_LANES) {
                lanes code = lanes_div(lanes_sub(lanes_load(x + i), lanes_set(r.least)),
                                       lanes_set(r.scale));

                code = lanes_max(lanes_round(code), lanes_zero()); /* 0 if it is NaN */
                lanes_store(x + i, lanes_min(code, lanes_set(most_code)));
        }
        row_put_codes((uint8_t *)row_at(row, d, type), x, n, type);
}

/* Elements that are written together: those with a common scale, or a vector. */
KERNEL uint32_t row_step(enum kvd_number type) {
        return kvd_is_quantised(type) ? KVD_GROUP : KVD_LANES;
}

KERNEL void row_put_bytes(uint8_t *to, const float *from, uint32_t n, enum kvd_number type) {
        for (uint32_t i = 0; i < n; i++)
                to[i] = type == KVD_NUMBER_E4M3 ? e4m3_of(from[i]) : e5m2_of(from[i]);
}

KERNEL void row_write_part(void *row, uint32_t d, const float *from, uint32_t n, uint32_t dim,
                           enum kvd_number type) {
        if (kvd_is_quantised(type))
                row_write_group(row, d, from, n, dim, type);
        else if (lanes_are_bytes(type))
                row_put_bytes((uint8_t *)row_at(row, d, type), from, n, type);
        else
                lanes_narrow_to((void *)row_at(row, d, type), lanes_load_to(from, n), n, type);
}

#endif
