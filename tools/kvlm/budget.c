/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores say what stays: the more the better. A head's tokens are chosen and packed on their own (unit head), or
 * whole blocks leave the table for all layers and heads (unit block). What stays keeps its order, and its keys the
 * rotation of their positions.
 */

#include "tools/kvlm/budget.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/block.h"
#include "tools/kvlm/note.h"

/* ---- scores ---- */

struct work { /* scratch memory of one eviction */
        float *scores, *keys;
        double *anchor;
        uint32_t *slots, *scratch;
        uint8_t **before;
        bool *drop;
};

static const uint8_t *slot_at(const struct relief *r, uint8_t *const *blocks, size_t offset, uint32_t slot) {
        const struct block_shape *s = &r->setup.shape;

        return blocks[slot / s->tokens] + offset + slot % s->tokens * (s->head_bytes / s->tokens);
}

static void read_row(const struct relief *r, float *to, const uint8_t *from) {
        const struct block_shape *s = &r->setup.shape;

        if (s->type == KVD_NUMBER_F32)
                memcpy(to, from, s->head_dim * sizeof *to);
        else
                r->setup.ops->widen(to, (const uint16_t *)from, s->head_dim, s->type);
}

/* methods.md 2.5.1: minus the cosine to the mean of the normalised keys. */
static void keydiff(const struct relief *r, uint8_t *const *blocks, uint32_t layer, uint32_t head, struct work *w) {
        uint32_t d = r->setup.shape.head_dim;
        double *anchor = memset(w->anchor, 0, d * sizeof *w->anchor), length = 0.0;

        for (uint32_t i = 0; i < r->n_slots; i++) {
                float *k = w->keys + (size_t)i * d;
                double norm = 0.0;

                read_row(r, k, slot_at(r, blocks, relief_keys(r, layer, head), i));
                for (uint32_t j = 0; j < d; j++)
                        norm += (double)k[j] * k[j];
                norm = sqrt(norm);
                w->scores[i] = (float)norm;
                for (uint32_t j = 0; j < d && norm > 0.0 && isfinite(norm); j++)
                        anchor[j] += k[j] / norm;
        }
        for (uint32_t j = 0; j < d; j++)
                length += anchor[j] * anchor[j];
        for (uint32_t i = 0; i < r->n_slots; i++) {
                const float *k = w->keys + (size_t)i * d;
                double dot = 0.0, norm = w->scores[i];

                for (uint32_t j = 0; j < d; j++)
                        dot += anchor[j] * k[j];
                w->scores[i] = norm > 0.0 && isfinite(norm) ? (float)(-dot / fmax(sqrt(length) * norm, 1e-8)) : -INFINITY;
        }
}

/* A number in [0, 1) that belongs to a token of a head, whenever it is asked for (splitmix64's mixing). */
static float chance(uint64_t seed, uint64_t head, uint32_t position) {
        uint64_t x = seed * 0x9e3779b97f4a7c15u + (head << 32 | position) + 0x9e3779b97f4a7c15u;

        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return (float)((x ^ x >> 31) >> 40) * 0x1p-24f;
}

static void score(const struct relief *r, uint8_t *const *blocks, uint32_t layer, uint32_t head, struct work *w) {
        const uint32_t *positions = relief_positions(r, layer, head);
        bool blocks_go = r->m->unit == UNIT_BLOCK; /* and then for all heads alike */

        if (r->m->evict == EVICT_KEYDIFF)
                keydiff(r, blocks, layer, head, w);
        for (uint32_t i = 0; i < r->n_slots && r->m->evict != EVICT_KEYDIFF; i++)
                if (r->m->evict == EVICT_WINDOW)
                        w->scores[i] = (float)positions[i];
                else if (r->m->evict == EVICT_RANDOM)
                        w->scores[i] = chance(r->m->seed, blocks_go ? 0 : relief_index(r, layer, head),
                                              blocks_go ? positions[i] / r->setup.shape.tokens : positions[i]);
                else
                        w->scores[i] = relief_score(r, layer, head, positions[i]);
}

static uint32_t sink_tokens(const struct relief *r) {
        return r->m->sink_blocks * r->setup.shape.tokens;
}

/* The newest tokens that stay whatever their score. serve: a block of them at least. */
static uint32_t recent_tokens(const struct relief *r) {
        return MAX((uint32_t)(r->m->recent * (float)r->budget), r->m->paper ? 0 : r->setup.shape.tokens);
}

/* ---- a head's own tokens ---- */

static void protect(const struct relief *r, const uint32_t *positions, float *scores) {
        uint32_t recent = MIN(recent_tokens(r), r->n_slots);

        for (uint32_t i = 0; i < r->n_slots; i++)
                if (positions[i] < sink_tokens(r) || i >= r->n_slots - recent)
                        scores[i] = INFINITY;
}

static struct kvd_slots slots_of(const struct relief *r, uint8_t *const *blocks, size_t offset) {
        const struct block_shape *s = &r->setup.shape;
        size_t bytes = s->head_bytes / s->tokens;

        return (struct kvd_slots){blocks, offset, bytes, s->tokens, (uint32_t)bytes};
}

/* Some blocks of the two tables are the same. Indices ascend, so that what is overwritten has been moved before. */
static void pack_plane(const struct relief *r, uint8_t *const *to, uint8_t *const *from, size_t offset,
                       const uint32_t *slots, uint32_t n) {
        const struct kvd_slots target = slots_of(r, to, offset), source = slots_of(r, from, offset);

        r->setup.ops->block->compact(&target, &source, slots, n);
}

static void evict_of_head(struct relief *r, struct sequence *s, uint32_t layer, uint32_t head, struct work *w) {
        uint32_t *positions = relief_positions(r, layer, head), n;
        size_t keys = relief_keys(r, layer, head);

        score(r, w->before, layer, head, w);
        protect(r, positions, w->scores);
        n = r->setup.ops->block->topk(w->slots, w->scores, r->n_slots, r->budget, true, w->scratch);
        pack_plane(r, s->blocks, w->before, keys, w->slots, n);
        pack_plane(r, s->blocks, w->before, keys + r->setup.shape.plane_bytes, w->slots, n);
        for (uint32_t i = 0; i < n; i++)
                positions[i] = positions[w->slots[i]];
}

static int evict_heads(struct relief *r, struct sequence *s, struct work *w) {
        int e;

        memcpy(w->before, s->blocks, s->n_blocks * sizeof *w->before);
        e = sequence_own(s, DIV_UP(r->budget, r->setup.shape.tokens), w->before);
        if (e < 0)
                return e;
        for (uint32_t l = 0; l < r->setup.layers; l++)
                for (uint32_t h = 0; h < r->heads; h++)
                        evict_of_head(r, s, l, h, w);
        sequence_cut(s, r->budget);
        r->n_slots = r->budget;
        return 0;
}

/* ---- whole blocks ---- */

/* Mean over layers and heads of the largest score in a block; what is in the middle may go. */
static void score_blocks(const struct relief *r, const struct sequence *s, struct work *w, float *to, uint32_t whole) {
        uint32_t tokens = r->setup.shape.tokens;

        memset(to, 0, whole * sizeof *to);
        for (uint32_t l = 0; l < r->setup.layers; l++)
                for (uint32_t h = 0; h < r->heads; h++) {
                        score(r, s->blocks, l, h, w);
                        for (uint32_t b = 0; b < whole; b++) {
                                float best = -INFINITY;

                                for (uint32_t i = b * tokens; i < (b + 1) * tokens; i++)
                                        best = fmaxf(best, w->scores[i]);
                                to[b] += best;
                        }
                }
        for (uint32_t b = 0; b < whole; b++)
                if (r->positions[b * tokens] < sink_tokens(r) || (b + 1) * tokens + recent_tokens(r) > r->n_slots)
                        to[b] = INFINITY;
}

static void forget_blocks(struct relief *r, const bool *drop) {
        uint32_t tokens = r->setup.shape.tokens, n = 0;

        for (size_t i = 0; i < (size_t)r->setup.layers * r->heads; i++) {
                uint32_t *positions = r->positions + i * r->setup.capacity;

                n = 0;
                for (uint32_t slot = 0; slot < r->n_slots; slot++)
                        if (!drop[slot / tokens])
                                positions[n++] = positions[slot];
        }
        r->n_slots = n;
}

static int evict_blocks(struct relief *r, struct sequence *s, struct work *w) {
        uint32_t tokens = r->setup.shape.tokens, whole = r->n_slots / tokens;
        uint32_t gone = MIN(whole, DIV_UP(r->n_slots - r->budget, tokens)), kept;
        float *scores = calloc(whole, sizeof *scores);

        if (!scores)
                return note(-ENOMEM, "out of memory for eviction");
        score_blocks(r, s, w, scores, whole);
        kept = r->setup.ops->block->topk(w->slots, scores, whole, whole - gone, true, w->scratch);
        memset(w->drop, 0, s->n_blocks * sizeof *w->drop);
        memset(w->drop, true, whole * sizeof *w->drop);
        for (uint32_t i = 0; i < kept; i++)
                w->drop[w->slots[i]] = false;
        free(scores);
        forget_blocks(r, w->drop);
        sequence_drop(s, w->drop);
        return 0;
}

/* ---- eviction ---- */

int budget_evict(struct relief *r, struct sequence *s) {
        size_t n = r->n_slots, blocks = s->n_blocks;
        _cleanup_(freep) float *scores = calloc(n, sizeof *scores), *keys = NULL;
        _cleanup_(freep) uint32_t *slots = calloc(2 * n, sizeof *slots);
        _cleanup_(freep) double *anchor = calloc(r->setup.shape.head_dim, sizeof *anchor);
        _cleanup_(freep) uint8_t **before = calloc(blocks, sizeof *before);
        _cleanup_(freep) bool *drop = calloc(blocks, sizeof *drop);
        struct work w;

        keys = calloc(r->m->evict == EVICT_KEYDIFF ? n * r->setup.shape.head_dim : 1, sizeof *keys);
        if (!scores || !keys || !slots || !anchor || !before || !drop)
                return note(-ENOMEM, "out of memory for eviction");
        w = (struct work){scores, keys, anchor, slots, slots + n, before, drop};
        return r->m->unit == UNIT_BLOCK ? evict_blocks(r, s, &w) : evict_heads(r, s, &w);
}
