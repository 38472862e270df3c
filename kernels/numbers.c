/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Converts numbers of 16 and 8 bits without special instructions: the reference for lanes_widen and
 * lanes_narrow.
 */

#include <math.h>
#include <string.h>

#include "ipc/base/format.h"
#include "kernels/variants.h"

static uint32_t float_bits(float f) {
        uint32_t bits;

        memcpy(&bits, &f, sizeof bits);
        return bits;
}

static float bits_float(uint32_t bits) {
        float f;

        memcpy(&f, &bits, sizeof f);
        return f;
}

static float widen_f16(uint16_t h) {
        uint32_t sign = (uint32_t)(h & 0x8000) << 16;
        uint32_t exponent = h >> 10 & 0x1f, fraction = h & 0x3ff;

        if (exponent == 0)
                return bits_float(sign | float_bits((float)fraction * 0x1p-24f));
        if (exponent == 0x1f)
                return bits_float(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
        return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}

static uint16_t narrow_f16(float f) {
        uint32_t bits = float_bits(f), magnitude = bits & 0x7fffffff;
        uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);

        if (magnitude > 0x7f800000) /* NaN: quiet, with the upper bits of its payload */
                return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
        if (magnitude >= 0x477ff000) /* rounds to more than the largest finite number */
                return sign | 0x7c00;
        if (magnitude < 0x38800000) /* a subnormal: the unit is 2^-24, let the addition round */
                return (uint16_t)(sign |
                                  (float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f)));
        return (uint16_t)(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

static uint16_t narrow_bf16(float f) {
        uint32_t bits = float_bits(f);

        if ((bits & 0x7fffffff) > 0x7f800000)
                return (uint16_t)(bits >> 16 | 0x40);
        return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void kvd_widen_scalar(float *to, const uint16_t *from, size_t n, enum kvd_number type) {
        for (size_t i = 0; i < n; i++)
                to[i] = type == KVD_NUMBER_F16 ? widen_f16(from[i]) :
                                                 bits_float((uint32_t)from[i] << 16);
}

static float widen_e4m3(uint8_t x) {
        uint16_t half = (uint16_t)((x & 0x80) << 8 | (x & 0x7f) << 7); /* 2^-8 of the number */

        return (x & 0x7f) == 0x7f ? NAN : 0x1p8f * widen_f16(half);
}

void kvd_widen_bytes_scalar(float *to, const uint8_t *from, size_t n, enum kvd_number type) {
        for (size_t i = 0; i < n; i++)
                to[i] = type == KVD_NUMBER_E4M3 ? widen_e4m3(from[i]) :
                                                  widen_f16((uint16_t)(from[i] << 8));
}

void kvd_narrow_scalar(uint16_t *to, const float *from, size_t n, enum kvd_number type) {
        for (size_t i = 0; i < n; i++)
                to[i] = type == KVD_NUMBER_F16 ? narrow_f16(from[i]) : narrow_bf16(from[i]);
}

size_t kvd_row_bytes(enum kvd_number type, uint32_t dim) {
        return kvd_format_row(type, dim);
}
