/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/client/methods/attend_reference.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static float rounded_bf16(float x) {
        uint32_t bits;

        memcpy(&bits, &x, sizeof bits);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
        memcpy(&x, &bits, sizeof bits);
        return x;
}

/* Rounds to the eleven significant bits of a normal half-precision number. */
static float rounded_f16(float x) {
        int exponent;
        float fraction = frexpf(x, &exponent);

        return ldexpf(rintf(ldexpf(fraction, 11)), exponent - 11);
}

/* As numbers least + code * scale. */
static void round_group(float *x, uint32_t n, float most_code) {
        float least = INFINITY, most = -INFINITY, scale;

        for (uint32_t i = 0; i < n; i++) {
                least = fminf(least, x[i]);
                most = fmaxf(most, x[i]);
        }
        least = rounded_f16(least);
        scale = fmaxf(rounded_f16((most - least) / most_code), 0x1p-14f);
        for (uint32_t i = 0; i < n; i++)
                x[i] = fmaf(fmaxf(0, fminf(rintf((x[i] - least) / scale), most_code)), scale,
                            least);
}

static double sign(uint32_t i) {
        return UINT64_C(0x243f6a8885a308d3) >> i & 1 ? -1 : 1;
}

/* The orthonormal Walsh-Hadamard transform of n <= 64 numbers, by its definition, between signs. */
static void turn_power(float *x, uint32_t n) {
        double sum[64] = {0};

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t k = 0; k < n; k++)
                        sum[i] += (__builtin_parity(i & k) ? -sign(k) : sign(k)) * (double)x[k];
        for (uint32_t i = 0; i < n; i++)
                x[i] = (float)(sign(i) * sum[i] / sqrt(n));
}

static void turn_group(float *x, uint32_t n) {
        for (uint32_t part = 64; part > 0; part /= 2)
                if (n & part) {
                        turn_power(x, part);
                        x += part;
                }
}

void reference_round_key(float *row, uint32_t dim, uint32_t dtype) {
        bool turn = dtype == KVD_Q8 || dtype == KVD_Q4;

        for (uint32_t d = 0; turn && d < dim; d += 64)
                turn_group(row + d, dim - d < 64 ? dim - d : 64);
        reference_round(row, dim, dtype);
        for (uint32_t d = 0; turn && d < dim; d += 64)
                turn_group(row + d, dim - d < 64 ? dim - d : 64);
}

void reference_round(float *row, uint32_t dim, uint32_t dtype) {
        bool quantised = dtype == KVD_Q8 || dtype == KVD_Q4;

        for (uint32_t d = 0; quantised && d < dim; d += 64)
                round_group(row + d, dim - d < 64 ? dim - d : 64, dtype == KVD_Q8 ? 255 : 15);
        for (uint32_t d = 0; !quantised && dtype != KVD_F32 && d < dim; d++)
                row[d] = dtype == KVD_F16 ? rounded_f16(row[d]) : rounded_bf16(row[d]);
}

void reference_attend(const struct history *h, uint32_t position, const struct kvd_heads *heads,
                      uint32_t head, const float *q, double *out) {
        const struct kvd_geometry *g = h->geometry;
        size_t width = (size_t)g->kv_heads * g->head_dim,
               at = (size_t)(head / (heads->heads / g->kv_heads)) * g->head_dim;
        uint32_t first = heads->window && heads->window <= position ? position + 1 - heads->window :
                                                                      0;
        double *score = calloc(position + 1, sizeof *score),
               most = heads->sinks ? heads->sinks[head] : -INFINITY, total = 0;

        memset(out, 0, g->head_dim * sizeof *out);
        for (uint32_t p = first; p <= position; p++) {
                for (uint32_t d = 0; d < g->head_dim; d++)
                        score[p] += (double)heads->scale * q[d] * h->k[p * width + at + d];
                if (heads->cap > 0)
                        score[p] = heads->cap * tanh(score[p] / heads->cap);
                most = fmax(most, score[p]);
        }
        if (heads->sinks)
                total = exp(heads->sinks[head] - most);
        for (uint32_t p = first; p <= position; p++) {
                double weight = exp(score[p] - most);

                total += weight;
                for (uint32_t d = 0; d < g->head_dim; d++)
                        out[d] += weight * h->v[p * width + at + d];
        }
        for (uint32_t d = 0; d < g->head_dim; d++)
                out[d] /= total;
        free(score);
}
