/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Between steps: each layer's parts are brought to their limits, what leaves the slots goes to what is left of it
 * (vague.h), what comes back gets a slot, and the slots are written anew in order of position.
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/note.h"
#include "tools/kvlm/tiers.h"

struct moving { /* of one layer at a time */
        struct tiers *t;
        struct relief *r;
        uint32_t layer;
        uint8_t **before; /* the block table with the old slots */
        float *scores;    /* by position */
        uint8_t *row;
        uint8_t *rows;    /* of all new slots */
        uint32_t *list;   /* tokens of the new slots */
        uint32_t *came;   /* tokens that come back, and */
        uint8_t *came_rows; /* what they bring */
        uint32_t n_came;
};

/* ---- rows ---- */

static uint8_t *slot_at(const struct relief *r, uint8_t *const *blocks, uint32_t layer, uint32_t head, uint32_t slot) {
        const struct block_shape *s = &r->setup.shape;

        return blocks[slot / s->tokens] + relief_keys(r, layer, head) + slot % s->tokens * (s->head_bytes / s->tokens);
}

static void read_slot(const struct moving *m, uint32_t slot, uint8_t *row) {
        const struct block_shape *s = &m->r->setup.shape;
        size_t bytes = s->head_bytes / s->tokens;

        for (uint32_t h = 0; h < m->r->heads; h++, row += 2 * bytes) {
                const uint8_t *at = slot_at(m->r, m->before, m->layer, h, slot);

                memcpy(row, at, bytes);
                memcpy(row + bytes, at + s->plane_bytes, bytes);
        }
}

static void write_slot(const struct moving *m, uint8_t *const *blocks, uint32_t slot, const uint8_t *row) {
        const struct block_shape *s = &m->r->setup.shape;
        size_t bytes = s->head_bytes / s->tokens;

        for (uint32_t h = 0; h < m->r->heads; h++, row += 2 * bytes) {
                uint8_t *at = slot_at(m->r, blocks, m->layer, h, slot);

                memcpy(at, row, bytes);
                memcpy(at + s->plane_bytes, row + bytes, bytes);
        }
}

static void read_token(const struct moving *m, uint32_t token, uint8_t *row) {
        const uint32_t *positions = relief_positions(m->r, m->layer, 0);
        uint32_t low = 0, n = m->r->n_slots;

        while (n > 0) {
                uint32_t half = n / 2;
                bool behind = positions[low + half] < token;

                low += behind ? half + 1 : 0;
                n = behind ? n - half - 1 : half;
        }
        read_slot(m, low, row);
}

/* ---- moves ---- */

static void demote(void *data, uint32_t token) {
        struct moving *m = data;

        read_token(m, token, m->row);
        vague_put(m->t->vague, m->r, m->layer, token, m->row);
}

static void bury(void *data, uint32_t token) {
        struct moving *m = data;

        vague_remove(m->t->vague, m->r, m->layer, token);
}

static bool promote(void *data, uint32_t token) {
        struct moving *m = data;
        struct vague *v = m->t->vague;

        if (!m->r->m->reviver.spill && !vague_answers(v, m->r, m->layer)) {
                m->r->stats.refused++;
                return false;
        }
        if (vague_row(v, m->r, m->layer, token, m->came_rows + m->n_came * v->row_bytes))
                m->r->stats.swapped_exact++;
        else
                m->r->stats.swapped_approximate++;
        vague_remove(v, m->r, m->layer, token);
        m->came[m->n_came++] = token;
        return true;
}

/* ---- a layer ---- */

static void score(struct moving *m) {
        const struct relief *r = m->r;

        for (uint32_t i = 0; i < r->n; i++) {
                m->scores[i] = 0.0f;
                for (uint32_t h = 0; h < r->heads; h++)
                        m->scores[i] += relief_score(r, m->layer, h, i) / (float)r->heads;
                if (i < r->m->sink_blocks * r->setup.shape.tokens)
                        m->scores[i] = INFINITY;
        }
}

/* Of the keys that are there when the first one leaves. */
static void find_mean(const struct moving *m) {
        const struct relief *r = m->r;
        const struct block_shape *s = &r->setup.shape;
        float *mean = m->t->vague->layers[m->layer].mean, key[512];

        for (uint32_t h = 0; h < r->heads; h++)
                for (uint32_t i = 0; i < r->n_slots; i++) {
                        const uint8_t *at = slot_at(r, m->before, m->layer, h, i);

                        if (s->type == KVD_NUMBER_F32)
                                memcpy(key, at, s->head_dim * sizeof *key);
                        else
                                r->setup.ops->widen(key, (const uint16_t *)at, s->head_dim, s->type);
                        for (uint32_t d = 0; d < s->head_dim; d++)
                                mean[h * s->head_dim + d] += key[d] / (float)r->n_slots;
                }
}

static const uint8_t *came_row(const struct moving *m, uint32_t token) {
        for (uint32_t i = 0; i < m->n_came; i++)
                if (m->came[i] == token)
                        return m->came_rows + i * m->t->vague->row_bytes;
        return NULL;
}

/* All rows are read before one is written: a token that comes back moves others up. */
static uint32_t arrange(const struct moving *m, uint8_t *const *blocks) {
        const struct parts *p = m->t->parts[m->layer];
        size_t bytes = m->t->vague->row_bytes;
        uint32_t n = 0;

        for (uint32_t i = 0; i < p->n; i++) {
                const uint8_t *came;

                if (!parts_resident(p, i))
                        continue;
                came = came_row(m, i);
                if (came)
                        memcpy(m->rows + n * bytes, came, bytes);
                else
                        read_token(m, i, m->rows + n * bytes);
                m->list[n++] = i;
        }
        for (uint32_t i = 0; i < n; i++)
                write_slot(m, blocks, i, m->rows + i * bytes);
        return n;
}

static int compress_layer(struct moving *m, uint8_t *const *blocks, uint32_t *n) {
        const struct parts_moves moves = {demote, bury, promote, m};
        struct parts *p = m->t->parts[m->layer];
        int e;

        m->n_came = 0;
        parts_push(p, m->r->n - p->n);
        score(m);
        if (vague_wants_mean(m->t->vague, m->r, m->layer))
                find_mean(m);
        e = parts_compress(p, m->scores, &moves);
        if (e < 0)
                return e;
        *n = arrange(m, blocks);
        for (uint32_t h = 0; h < m->r->heads; h++)
                memcpy(relief_positions(m->r, m->layer, h), m->list, *n * sizeof *m->list);
        return 0;
}

/* ---- all layers ---- */

static int compress(struct moving *m, struct sequence *s) {
        struct relief *r = m->r;
        uint32_t n = 0;
        int e;

        memcpy(m->before, s->blocks, s->n_blocks * sizeof *m->before);
        e = sequence_own(s, DIV_UP(MIN(m->t->resident, r->n_slots), r->setup.shape.tokens), m->before);
        for (m->layer = 0; e == 0 && m->layer < r->setup.layers; m->layer++) {
                e = compress_layer(m, s->blocks, &n);
                r->stats.load = fmax(r->stats.load, vague_load(m->t->vague, m->layer));
        }
        if (e < 0)
                return e;
        sequence_cut(s, n);
        r->n_slots = n;
        return 0;
}

int tiers_compress(struct tiers *t, struct relief *r, struct sequence *s) {
        size_t bytes = t->vague->row_bytes, swaps = t->parts[0]->limits.swaps;
        _cleanup_(freep) uint8_t **before = calloc(s->n_blocks, sizeof *before);
        _cleanup_(freep) float *scores = calloc(r->n, sizeof *scores);
        _cleanup_(freep) uint8_t *rows = calloc(t->resident + swaps + 1, bytes);
        _cleanup_(freep) uint32_t *list = calloc(t->resident + swaps + 1, sizeof *list);
        struct moving m = {t, r, 0, before, scores, NULL, rows, list, NULL, NULL, 0};

        if (!before || !scores || !rows || !list)
                return note(-ENOMEM, "out of memory for compression");
        m.came = list + t->resident;
        m.came_rows = rows + t->resident * bytes;
        m.row = rows + (t->resident + swaps) * bytes;
        return compress(&m, s);
}
