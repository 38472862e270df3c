/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The reference: what each operation means, one element after the other. It runs everywhere and is what the other
 * variants are compared with, bit for bit. fmaf() is an exact fused multiply-add also where the processor has none.
 */

#include <math.h>
#include <string.h>

#include "kernels/attend_rows.h"
#include "kernels/bicache.h"
#include "kernels/block.h"
#include "kernels/hshare.h"
#include "kernels/keydiff.h"
#include "kernels/memshare.h"
#include "kernels/sketch.h"
#include "kernels/variants.h"

static bool works(void) {
        return true;
}

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

static float exp_scalar(float x) {
        float clamped = EXP_HIGH < x ? EXP_HIGH : x;
        float shifted = fmaf(clamped, EXP_LOG2E, EXP_SHIFT);
        float n = shifted - EXP_SHIFT;
        float r = fmaf(n, -EXP_LN2_LOW, fmaf(n, -EXP_LN2_HIGH, clamped));
        float p = EXP_C5;

        p = fmaf(p, r, EXP_C4);
        p = fmaf(p, r, EXP_C3);
        p = fmaf(p, r, EXP_C2);
        p = fmaf(p, r, EXP_C1);
        p = fmaf(p, r, EXP_C0);
        p = fmaf(p, r * r, r + 1.0f);
        return clamped < EXP_LOW ? 0.0f : p * bits_float((float_bits(shifted) << 23) + EXP_ONE);
}

static float add_lanes(float lanes[KVD_PANEL]) {
        for (int width = KVD_PANEL / 2; width > 0; width /= 2)
                for (int j = 0; j < width; j++)
                        lanes[j] += lanes[j + width];
        return lanes[0];
}

void kvd_pack_scalar(float *panels, uint32_t first, const float *rows, size_t stride, uint32_t n, uint32_t dim) {
        for (uint32_t i = 0; i < n; i++) {
                uint32_t row = first + i;
                float *lane = panels + (size_t)(row / KVD_PANEL) * KVD_PANEL * dim + row % KVD_PANEL;

                for (uint32_t d = 0; d < dim; d++)
                        lane[(size_t)d * KVD_PANEL] = rows[i * stride + d];
        }
}

static void matmul(float *y, size_t ldy, const float *x, size_t ldx, uint32_t rows, const float *w, uint32_t n_in,
                   uint32_t n_out) {
        for (uint32_t r = 0; r < rows; r++)
                for (uint32_t o = 0; o < n_out; o++) {
                        const float *lane = w + (size_t)(o / KVD_PANEL) * KVD_PANEL * n_in + o % KVD_PANEL;
                        float acc = 0.0f;

                        for (uint32_t i = 0; i < n_in; i++)
                                acc = fmaf(x[r * ldx + i], lane[(size_t)i * KVD_PANEL], acc);
                        y[r * ldy + o] = acc;
                }
}

static void mix(float *y, size_t ldy, const float *p, size_t ldp, uint32_t rows, const struct kvd_rows *v,
                uint32_t from, uint32_t to) {
        for (uint32_t r = 0; r < rows; r++)
                for (uint32_t t = from; t < to; t++) {
                        const float *row = kvd_rows_at(v, t);

                        for (uint32_t d = 0; d < v->dim; d++)
                                y[r * ldy + d] = fmaf(p[r * ldp + t], row[d], y[r * ldy + d]);
                }
}

static void rmsnorm(float *y, const float *x, const float *w, uint32_t n, float eps) {
        float lanes[KVD_PANEL] = {0};
        float scale;

        for (uint32_t i = 0; i < n; i++)
                lanes[i % KVD_PANEL] = fmaf(x[i], x[i], lanes[i % KVD_PANEL]);
        scale = 1.0f / sqrtf(add_lanes(lanes) / (float)n + eps);
        for (uint32_t i = 0; i < n; i++)
                y[i] = x[i] * scale * w[i];
}

static void rope(float *x, const float *cosine, const float *sine, uint32_t half) {
        for (uint32_t i = 0; i < half; i++) {
                float low = x[i], high = x[i + half];

                x[i] = fmaf(-high, sine[i], low * cosine[i]);
                x[i + half] = fmaf(low, sine[i], high * cosine[i]);
        }
}

static void swiglu(float *y, const float *gate, const float *up, size_t n) {
        for (size_t i = 0; i < n; i++)
                y[i] = gate[i] / (1.0f + exp_scalar(-gate[i])) * up[i];
}

static void add(float *y, const float *x, size_t n) {
        for (size_t i = 0; i < n; i++)
                y[i] += x[i];
}

static float softmax(float *x, uint32_t n, float scale) {
        float lanes[KVD_PANEL] = {0};
        float max = x[0];

        for (uint32_t i = 1; i < n; i++)
                max = x[i] > max ? x[i] : max;
        max *= scale;
        for (uint32_t i = 0; i < n; i++) {
                x[i] = exp_scalar(fmaf(x[i], scale, -max));
                lanes[i % KVD_PANEL] += x[i];
        }
        return add_lanes(lanes);
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
                return (uint16_t)(sign | (float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f)));
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
                to[i] = type == KVD_NUMBER_F16 ? widen_f16(from[i]) : bits_float((uint32_t)from[i] << 16);
}

void kvd_narrow_scalar(uint16_t *to, const float *from, size_t n, enum kvd_number type) {
        for (size_t i = 0; i < n; i++)
                to[i] = type == KVD_NUMBER_F16 ? narrow_f16(from[i]) : narrow_bf16(from[i]);
}

static void copy_nt(void *to, const void *from, size_t bytes) {
        memcpy(to, from, bytes);
}

const struct kvd_ops kvd_ops_scalar = {
        .name = "scalar",
        .works = works,
        .pack = kvd_pack_scalar,
        .matmul = matmul,
        .mix = mix,
        .rmsnorm = rmsnorm,
        .rope = rope,
        .swiglu = swiglu,
        .add = add,
        .softmax = softmax,
        .widen = kvd_widen_scalar,
        .narrow = kvd_narrow_scalar,
        .copy_nt = copy_nt,
        .attend = &kvd_attend_scalar,
        .block = &kvd_block_scalar,
        .keydiff = &kvd_keydiff_scalar,
        .memshare = &kvd_memshare_scalar,
        .sketch = &kvd_sketch_scalar,
        .hshare = &kvd_hshare_scalar,
        .bicache = &kvd_bicache_scalar,
};
