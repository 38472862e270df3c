/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Shared by all kinds of attention: which positions are seen, rotation of queries, adding up mass.
 */

#include "kernels/attend_inner.h"

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"

/* ---- visible positions ---- */

uint32_t kvd_attend_keys(const struct kvd_attention *a) {
        return a->n_keys ? a->n_keys : a->first + a->n;
}

uint32_t kvd_attend_window(const struct kvd_attention *a) {
        return a->n_keys ? 0 : a->window;
}

static uint32_t first_block(const struct kvd_attention *a) {
        uint32_t window = kvd_attend_window(a);

        return window && a->first >= window ? kvd_attend_block(a, a->first + 1 - window) : 0;
}

static uint32_t all_columns(const struct kvd_attention *a, const uint8_t **keys,
                            uint32_t *positions) {
        uint32_t n_keys = kvd_attend_keys(a), n_blocks = DIV_UP(n_keys, a->block_tokens), n = 0;

        for (uint32_t b = first_block(a); b < n_blocks; b++) {
                uint32_t first = b * a->block_tokens, count = MIN(a->block_tokens, n_keys - first);

                for (uint32_t i = 0; a->blocks[b] && i < count; i++, n++) {
                        keys[n] = a->blocks[b] + a->k_offset + i * a->stride;
                        positions[n] = first + i;
                }
        }
        return n;
}

static uint32_t chosen_columns(const struct kvd_attention *a, const uint8_t **keys,
                               uint32_t *positions) {
        uint32_t n_keys = kvd_attend_keys(a), n = 0;

        for (uint32_t i = 0; i < a->n_chosen && a->chosen[i] < n_keys; i++) {
                uint32_t position = a->chosen[i], b = kvd_attend_block(a, position);

                if (!a->blocks[b])
                        continue;
                keys[n] = a->blocks[b] + a->k_offset + (position - b * a->block_tokens) * a->stride;
                positions[n++] = position;
        }
        return n;
}

uint32_t kvd_attend_columns(const struct kvd_attention *a, const uint8_t **keys,
                            uint32_t *positions) {
        return a->chosen ? chosen_columns(a, keys, positions) : all_columns(a, keys, positions);
}

/* ---- rotated queries ---- */

void kvd_attend_rotate(const struct kvd_attention *a, float *rotated, const float *q,
                       uint32_t rotation, uint32_t rows) {
        const float *angles = a->rotations + (size_t)(rotation - 1) * a->dim;
        uint32_t half = a->dim / 2;

        memcpy(rotated, q, (size_t)rows * a->dim * sizeof *rotated);
        for (uint32_t r = 0; r < rows; r++)
                a->ops->rope(rotated + (size_t)r * a->dim, angles, angles + half, half);
}

uint32_t kvd_rotations(const int32_t *deltas, uint32_t n_blocks, const float *frequencies,
                       uint32_t half, uint32_t *rotation, float *rotations, uint32_t max) {
        uint32_t n = 0;

        for (uint32_t b = 0; b < n_blocks; b++) {
                uint32_t same = 0;

                while (same < b && deltas[same] != deltas[b])
                        same++;
                rotation[b] = deltas[b] == 0 ? 0 : same < b ? rotation[same] : ++n;
                if (n > max)
                        return UINT32_MAX;
                for (uint32_t i = 0; i < half && deltas[b] != 0 && same == b; i++) {
                        double angle = -(double)deltas[b] * (double)frequencies[i];

                        rotations[(size_t)(n - 1) * 2 * half + i] = (float)cos(angle);
                        rotations[(size_t)(n - 1) * 2 * half + half + i] = (float)sin(angle);
                }
        }
        return n;
}

/* ---- mass ---- */

/* Sums in 16 lanes: in a single chain, each addition would wait for the one before. */
static float sum_weights(const float *p, uint32_t n) {
        float lanes[KVD_PANEL] = {0};

        for (; n >= KVD_PANEL; n -= KVD_PANEL, p += KVD_PANEL)
                for (int j = 0; j < KVD_PANEL; j++)
                        lanes[j] += p[j];
        for (uint32_t j = 0; j < n; j++)
                lanes[j] += p[j];
        for (int width = KVD_PANEL / 2; width > 0; width /= 2)
                for (int j = 0; j < width; j++)
                        lanes[j] += lanes[j + width];
        return lanes[0];
}

void kvd_attend_mass(const struct kvd_attention *a, const float *weights, const uint32_t *positions,
                     uint32_t n) {
        for (uint32_t c = 0, end; a->block_mass && c < n; c = end) {
                uint32_t block = kvd_attend_block(a, positions[c]);

                for (end = c + 1; end < n && kvd_attend_block(a, positions[end]) == block;)
                        end++;
                a->block_mass[block] += sum_weights(weights + c, end - c);
        }
        for (uint32_t c = 0; a->token_mass && c < n; c++)
                a->token_mass[positions[c]] += weights[c];
}
