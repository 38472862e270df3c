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
#include "tools/kvlm/keydiff.h"
#include "tools/kvlm/note.h"

/* ---- scores ---- */

struct work { /* scratch memory of one eviction */
        float *scores; /* [head][n_slots] */
        float *scratch;
        uint32_t *slots, *numbers;
        uint8_t **before;
        bool *drop;
};

/* A number in [0, 1) that belongs to a token of a head, whenever it is asked for (splitmix64's mixing). */
static float chance(uint64_t seed, uint64_t head, uint32_t position) {
        uint64_t x = seed * 0x9e3779b97f4a7c15u + (head << 32 | position) + 0x9e3779b97f4a7c15u;

        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return (float)((x ^ x >> 31) >> 40) * 0x1p-24f;
}

static float score_slot(const struct relief *r, uint32_t layer, uint32_t head, uint32_t position) {
        bool blocks_go = r->m->unit == UNIT_BLOCK; /* and then for all heads alike */

        if (r->m->evict == EVICT_WINDOW)
                return (float)position;
        if (r->m->evict == EVICT_ATTENTION)
                return relief_score(r, layer, head, position);
        return chance(r->m->seed, blocks_go ? 0 : relief_index(r, layer, head),
                      blocks_go ? position / r->setup.shape.tokens : position);
}

/* Of all heads of a layer. */
static void score(const struct relief *r, uint8_t *const *blocks, uint32_t layer, struct work *w) {
        if (r->m->evict == EVICT_KEYDIFF) {
                keydiff_scores(r->setup.ops, &r->setup.shape, blocks, layer, r->n_slots, w->scores, w->scratch);
                return;
        }
        for (uint32_t h = 0; h < r->heads; h++) {
                const uint32_t *positions = relief_positions(r, layer, h);

                for (uint32_t i = 0; i < r->n_slots; i++)
                        w->scores[(size_t)h * r->n_slots + i] = score_slot(r, layer, h, positions[i]);
        }
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
        float *scores = w->scores + (size_t)head * r->n_slots;
        size_t keys = relief_keys(r, layer, head);

        protect(r, positions, scores);
        n = r->setup.ops->block->topk(w->slots, scores, r->n_slots, r->budget, true, w->numbers);
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
        for (uint32_t l = 0; l < r->setup.layers; l++) {
                score(r, w->before, l, w);
                for (uint32_t h = 0; h < r->heads; h++)
                        evict_of_head(r, s, l, h, w);
        }
        sequence_cut(s, r->budget);
        r->n_slots = r->budget;
        return 0;
}

/* ---- whole blocks ---- */

/* Mean over layers and heads of the largest score in a block; what is in the middle may go. */
static void score_blocks(const struct relief *r, const struct sequence *s, struct work *w, float *to, uint32_t whole) {
        uint32_t tokens = r->setup.shape.tokens;

        memset(to, 0, whole * sizeof *to);
        for (uint32_t l = 0; l < r->setup.layers; l++) {
                score(r, s->blocks, l, w);
                for (uint32_t h = 0; h < r->heads; h++)
                        for (uint32_t b = 0; b < whole; b++) {
                                const float *scores = w->scores + (size_t)h * r->n_slots + (size_t)b * tokens;
                                float best = -INFINITY;

                                for (uint32_t i = 0; i < tokens; i++)
                                        best = fmaxf(best, scores[i]);
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
        kept = r->setup.ops->block->topk(w->slots, scores, whole, whole - gone, true, w->numbers);
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
        _cleanup_(freep) float *floats = calloc(r->heads * n + keydiff_scratch(&r->setup.shape), sizeof *floats);
        _cleanup_(freep) uint32_t *numbers = calloc(2 * n, sizeof *numbers);
        _cleanup_(freep) uint8_t **before = calloc(blocks, sizeof *before);
        _cleanup_(freep) bool *drop = calloc(blocks, sizeof *drop);
        struct work w;

        if (!floats || !numbers || !before || !drop)
                return note(-ENOMEM, "out of memory for eviction");
        w = (struct work){
                .scores = floats,
                .scratch = floats + r->heads * n,
                .slots = numbers,
                .numbers = numbers + n,
                .before = before,
                .drop = drop,
        };
        return r->m->unit == UNIT_BLOCK ? evict_blocks(r, s, &w) : evict_heads(r, s, &w);
}
