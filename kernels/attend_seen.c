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

struct kvd_stretch kvd_attend_begin(const struct kvd_attention *a) {
        uint32_t window = kvd_attend_window(a);
        struct kvd_stretch r = {0};

        if (window && !a->chosen && a->first >= window)
                r.next = (a->first + 1 - window) / a->block_tokens;
        return r;
}

static bool next_dense(const struct kvd_attention *a, struct kvd_stretch *r) {
        uint32_t n_keys = kvd_attend_keys(a), n_blocks = DIV_UP(n_keys, a->block_tokens);

        while (r->next < n_blocks && !a->blocks[r->next])
                r->next++;
        if (r->next >= n_blocks)
                return false;
        r->block = r->next++;
        r->position = r->block * a->block_tokens;
        r->n = MIN(a->block_tokens, n_keys - r->position);
        return true;
}

/*
 * Chosen positions are usually close together, and a division would cost more than everything else
 * here. So try the previous block first.
 */
static uint32_t block_of(const struct kvd_attention *a, uint32_t position, uint32_t guess) {
        return position - guess * a->block_tokens < a->block_tokens ? guess :
                                                                      position / a->block_tokens;
}

static bool next_chosen(const struct kvd_attention *a, struct kvd_stretch *r) {
        uint32_t n_keys = kvd_attend_keys(a), i = r->next, block = r->block, position = 0, from,
                 end;

        for (; i < a->n_chosen; i++) {
                position = a->chosen[i];
                if (position >= n_keys)
                        return false;
                block = block_of(a, position, block);
                if (a->blocks[block])
                        break;
        }
        if (i >= a->n_chosen)
                return false;
        end = MIN(n_keys, (block + 1) * a->block_tokens);
        r->position = position;
        r->block = block;
        from = i;
        do
                i++;
        while (i < a->n_chosen && a->chosen[i] == ++position && position < end);
        r->n = i - from;
        r->next = i;
        return true;
}

bool kvd_attend_next(const struct kvd_attention *a, struct kvd_stretch *r) {
        r->column += r->n;
        r->n = 0;
        return a->chosen ? next_chosen(a, r) : next_dense(a, r);
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

void kvd_attend_mass(const struct kvd_attention *a, const float *p, float total,
                     uint32_t n_columns) {
        struct kvd_stretch r = kvd_attend_begin(a);

        while (kvd_attend_next(a, &r) && r.column < n_columns) {
                uint32_t n = MIN(r.n, n_columns - r.column);

                if (a->block_mass)
                        a->block_mass[r.block] += sum_weights(p + r.column, n) / total;
                for (uint32_t i = 0; a->token_mass && i < n; i++)
                        a->token_mass[r.position + i] += p[r.column + i] / total;
        }
}
