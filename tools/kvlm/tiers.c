/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/tiers.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/block.h"
#include "tools/kvlm/labels.h"
#include "tools/kvlm/note.h"
#include "tools/kvlm/quant.h"

enum { DIM_MAX = 512, QUERIES_PER_REVIVAL = 16 };

/* ---- life ---- */

/* Sinks are candidates that nobody can push out. The rest of the budget's bytes hold tokens at 4 bit. */
static struct parts_limits quantised(const struct relief *r) {
        const struct block_shape *s = &r->setup.shape;
        uint32_t sinks = r->m->sink_blocks * s->tokens;
        uint32_t recent = MAX((uint32_t)(r->m->recent * (float)r->budget), s->tokens);
        uint32_t exact = MIN(r->budget, sinks + recent);
        size_t bytes = 2 * s->head_bytes / s->tokens;

        return (struct parts_limits){
                .recent = exact - MIN(exact, sinks),
                .candidate = MIN(exact, sinks),
                .vague = (uint32_t)MIN((r->budget - exact) * bytes / (2 * quant_bytes(s->head_dim)), UINT32_MAX - 1),
                .replace_rate = 1.0f,
        };
}

static struct parts_limits limits(const struct relief *r) {
        const struct methods *m = r->m;
        struct parts_limits l = {
                .recent = (uint32_t)(m->reviver.recent * (float)r->budget),
                .candidate = (uint32_t)(m->reviver.candidate * (float)r->budget),
                .vague = UINT32_MAX,
                .replace_rate = m->reviver.replace_rate,
        };

        if (m->evict == EVICT_INT4)
                return quantised(r);
        l.swaps = m->paper ? l.candidate : MAX(l.candidate / 8, 1);
        return l;
}

static int allocate(struct tiers *t, const struct relief *r, const struct parts_limits *l) {
        size_t capacity = r->setup.capacity, dim = r->setup.shape.head_dim;
        int e;

        t->parts = calloc(r->setup.layers, sizeof(struct parts *));
        t->desks = calloc(r->heads, sizeof *t->desks);
        if (!t->parts || !t->desks)
                return note(-ENOMEM, "out of memory");
        for (uint32_t i = 0; i < r->setup.layers; i++) {
                e = parts_new(l, r->setup.capacity, t->parts + i);
                if (e < 0)
                        return e;
        }
        for (uint32_t h = 0; h < r->heads; h++) {
                struct tiers_desk *d = t->desks + h;

                d->keys = calloc(2 * capacity * dim, sizeof *d->keys);
                d->values = d->keys + capacity * dim;
                d->mass = calloc(capacity, sizeof *d->mass);
                d->tokens = calloc(capacity, sizeof *d->tokens);
                d->places = calloc(capacity, 3 * sizeof *d->places);
                d->scores = calloc(capacity, sizeof *d->scores);
                d->numbers = calloc(capacity, 3 * sizeof *d->numbers);
                d->hits = calloc(capacity, sizeof *d->hits);
                if (!d->keys || !d->mass || !d->tokens || !d->places || !d->scores || !d->numbers || !d->hits)
                        return note(-ENOMEM, "out of memory for a sequence of %u tokens", r->setup.capacity);
        }
        return vague_new(r, l->vague, &t->vague);
}

int tiers_new(const struct relief *r, struct tiers **ret) {
        const struct parts_limits l = limits(r);
        struct tiers *t;
        int e;

        if (r->setup.shape.head_dim > DIM_MAX)
                return note(-EINVAL, "--evict %s: heads have at most %d channels", evict_name(r->m->evict), DIM_MAX);
        t = calloc(1, sizeof *t);
        if (!t)
                return note(-ENOMEM, "out of memory");
        t->resident = l.recent + l.candidate;
        e = allocate(t, r, &l);
        if (e < 0) {
                tiers_free(t, r);
                return e;
        }
        *ret = t;
        return 0;
}

struct tiers *tiers_free(struct tiers *t, const struct relief *r) {
        if (!t)
                return NULL;
        for (uint32_t i = 0; t->parts && i < r->setup.layers; i++)
                parts_free(t->parts[i]);
        for (uint32_t h = 0; t->desks && h < r->heads; h++) {
                struct tiers_desk *d = t->desks + h;

                free(d->hits);
                free(d->numbers);
                free(d->scores);
                free(d->places);
                free(d->tokens);
                free(d->mass);
                free(d->keys);
        }
        free(t->desks);
        free(t->parts);
        vague_free(t->vague, r->setup.layers);
        free(t);
        return NULL;
}

uint64_t tiers_spilled_bytes(const struct tiers *t, const struct relief *r) {
        uint64_t tokens = 0;

        for (uint32_t l = 0; l < r->setup.layers && r->m->reviver.spill; l++)
                tokens += t->parts[l]->size[PART_VAGUE] + t->parts[l]->size[PART_GONE];
        return tokens * t->vague->row_bytes;
}

/* ---- what a query sees ---- */

/* Of a block of a prompt, the last queries and a quarter of the others are asked. */
static bool asks(const struct kvd_attention *a, uint32_t i) {
        return i % 4 == 3 || i + 8 >= a->n;
}

/* The largest label score of each token without a slot, for any of the queries; -inf for those that have one. */
static void score_absent(struct tiers *t, struct relief *r, uint32_t layer, uint32_t head,
                         const struct kvd_attention *a) {
        const struct parts *p = t->parts[layer];
        float *best = t->desks[head].scores;

        for (uint32_t j = 0; j < p->oldest_recent; j++)
                best[j] = -INFINITY;
        for (uint32_t i = 0; i < a->n; i++) {
                const float *scores;

                if (!asks(a, i))
                        continue;
                scores = labels_score(r->labels, r, layer, head, a->q + i * a->ldq, 0, r->n);
                for (uint32_t j = 0; j < p->oldest_recent; j++)
                        best[j] = scores[j] > best[j] ? scores[j] : best[j];
        }
        for (uint32_t j = 0; j < p->oldest_recent; j++)
                best[j] = parts_resident(p, j) ? -INFINITY : best[j];
}

/* Tokens that come back exactly, ascending. */
static uint32_t revive(struct tiers *t, struct relief *r, uint32_t layer, uint32_t head, const struct kvd_attention *a,
                       uint32_t *to) {
        struct tiers_desk *d = t->desks + head;
        uint32_t most = r->m->reviver.revive * DIV_UP(a->n, QUERIES_PER_REVIVAL);

        if (!r->m->reviver.spill || most == 0 || (!t->vague->sketch && t->parts[layer]->size[PART_GONE] == 0))
                return 0;
        score_absent(t, r, layer, head, a);
        for (uint32_t i = 0; i < t->vague->layers[layer].n && !t->vague->sketch; i++)
                d->scores[t->vague->layers[layer].tokens[i]] = -INFINITY; /* 4 bits are enough */
        return r->setup.ops->hshare->top(to, d->scores, t->parts[layer]->oldest_recent, most, 0, d->numbers);
}

/* Reads into the rows from n on; returns how many there are then. exact: those that are read from the spill. */
static uint32_t read_rows(struct tiers *t, struct relief *r, uint32_t layer, uint32_t head, const uint32_t *tokens,
                          uint32_t n, bool exact, uint32_t at) {
        struct tiers_desk *d = t->desks + head;
        uint32_t dim = r->setup.shape.head_dim;

        memmove(d->tokens + at, tokens, n * sizeof *tokens);
        if (!exact)
                vague_read(t->vague, r, layer, head, d->tokens + at, n, d->keys + (size_t)at * dim,
                           d->values + (size_t)at * dim, d->places);
        for (uint32_t i = at; i < at + n && exact; i++)
                vague_read_spilled(t->vague, r, layer, head, d->tokens[i], d->keys + (size_t)i * dim,
                                   d->values + (size_t)i * dim);
        return at + n;
}

static bool among(const uint32_t *sorted, uint32_t n, uint32_t x) {
        uint32_t low = 0, end = n;

        while (n > 0) {
                uint32_t half = n / 2;

                if (sorted[low + half] < x) {
                        low += half + 1;
                        n -= half + 1;
                } else {
                        n = half;
                }
        }
        return low < end && sorted[low] == x;
}

/* Without a selection: what labels bring back, and approximations of the others. */
static uint32_t gather_all(struct tiers *t, struct relief *r, uint32_t layer, uint32_t head,
                           const struct kvd_attention *a) {
        struct tiers_desk *d = t->desks + head;
        const struct vague_layer *l = t->vague->layers + layer;
        uint32_t n = revive(t, r, layer, head, a, d->hits), left = 0;

        read_rows(t, r, layer, head, d->hits, n, true, 0);
        r->desks[head].stats.revived_exact += n;
        if (!vague_answers(t->vague, r, layer)) {
                r->desks[head].stats.refused += l->n > 0;
                return n;
        }
        for (uint32_t i = 0; i < l->n; i++)
                if (!among(d->hits, n, l->tokens[i]))
                        d->numbers[left++] = l->tokens[i];
        r->desks[head].stats.revived_approximate += left;
        return read_rows(t, r, layer, head, d->numbers, left, false, n);
}

/* Of a selection, ascending: those without a slot. */
static uint32_t gather_selected(struct tiers *t, struct relief *r, uint32_t layer, uint32_t head,
                                const uint32_t *positions, uint32_t n) {
        struct tiers_desk *d = t->desks + head;
        const struct parts *p = t->parts[layer];
        uint32_t exact = 0, vague = 0;

        for (uint32_t i = 0; i < n && positions[i] < p->oldest_recent; i++) {
                bool listed = vague_has(t->vague, layer, positions[i]);

                if (parts_resident(p, positions[i]))
                        continue;
                if (r->m->reviver.spill && (t->vague->sketch || !listed))
                        exact = read_rows(t, r, layer, head, positions + i, 1, true, exact);
                else if (listed && vague_answers(t->vague, r, layer))
                        d->numbers[vague++] = positions[i];
        }
        r->desks[head].stats.revived_exact += exact;
        r->desks[head].stats.revived_approximate += vague;
        return read_rows(t, r, layer, head, d->numbers, vague, false, exact);
}

/* ---- attention over rows: what came back, then slots ---- */

static void copy_slot(const struct relief *r, const struct kvd_attention *a, uint32_t slot, float *key, float *value) {
        const uint8_t *block = a->blocks[slot / a->block_tokens];
        size_t at = (size_t)(slot % a->block_tokens) * a->stride;

        if (a->type == KVD_NUMBER_F32) {
                memcpy(key, (const float *)(block + a->k_offset) + at, a->dim * sizeof *key);
                memcpy(value, (const float *)(block + a->v_offset) + at, a->dim * sizeof *value);
                return;
        }
        r->setup.ops->widen(key, (const uint16_t *)(block + a->k_offset) + at, a->dim, a->type);
        r->setup.ops->widen(value, (const uint16_t *)(block + a->v_offset) + at, a->dim, a->type);
}

static uint32_t position_of(const struct relief *r, uint32_t layer, uint32_t head, uint32_t slot) {
        return slot < r->n_slots ? relief_positions(r, layer, head)[slot] : r->n + (slot - r->n_slots);
}

static uint32_t append_slots(struct tiers *t, const struct relief *r, uint32_t layer, uint32_t head,
                             const struct kvd_attention *a, uint32_t n) {
        struct tiers_desk *d = t->desks + head;
        uint32_t slots = a->chosen ? a->n_chosen : a->first + a->n;

        for (uint32_t i = 0; i < slots; i++, n++) {
                uint32_t slot = a->chosen ? a->chosen[i] : i;

                copy_slot(r, a, slot, d->keys + (size_t)n * a->dim, d->values + (size_t)n * a->dim);
                d->tokens[n] = position_of(r, layer, head, slot);
        }
        return n;
}

/* The rows as one block of floats. */
static struct kvd_attention over_rows(const struct kvd_attention *a, const uint8_t *const *rows,
                                      const struct tiers_desk *d, uint32_t n) {
        struct kvd_attention b = *a;

        b.blocks = rows;
        b.k_offset = 0;
        b.v_offset = (size_t)((const uint8_t *)d->values - (const uint8_t *)d->keys);
        b.stride = a->dim;
        b.type = KVD_NUMBER_F32;
        b.block_tokens = MAX(n, 1);
        b.first = n - a->n;
        b.chosen = NULL;
        b.token_mass = d->mass;
        return b;
}

size_t tiers_scratch(const struct tiers *t, const struct relief *r, const struct kvd_attention *a) {
        const struct tiers_desk *d = t->desks;
        const uint8_t *rows = (const uint8_t *)d->keys;
        const struct kvd_attention b = over_rows(a, &rows, d, r->n + a->n);

        return kvd_attend_scratch(&b);
}

static void attend_rows(struct tiers *t, struct relief *r, uint32_t layer, uint32_t head,
                        const struct kvd_attention *a, uint32_t n) {
        struct tiers_desk *d = t->desks + head;
        const uint8_t *rows = (const uint8_t *)d->keys;
        const struct kvd_attention b = over_rows(a, &rows, d, n);
        float *mass = relief_mass(r, layer, head);

        memset(d->mass, 0, n * sizeof *d->mass);
        kvd_attend(&b);
        for (uint32_t i = 0; i < n; i++)
                mass[d->tokens[i]] += d->mass[i];
}

static void attend_slots(struct tiers *t, struct relief *r, uint32_t layer, uint32_t head, struct kvd_attention *a) {
        struct tiers_desk *d = t->desks + head;
        float *mass = relief_mass(r, layer, head);
        uint32_t n = a->first + a->n;

        a->token_mass = memset(d->mass, 0, n * sizeof *d->mass);
        kvd_attend(a);
        for (uint32_t i = 0; i < n; i++)
                mass[position_of(r, layer, head, i)] += d->mass[i];
}

void tiers_attend(struct tiers *t, struct relief *r, uint32_t layer, uint32_t head, struct kvd_attention *a,
                  const uint32_t *positions, uint32_t n) {
        uint32_t absent = 0;

        if (r->n_slots < r->n)
                absent = positions ? gather_selected(t, r, layer, head, positions, n)
                                   : gather_all(t, r, layer, head, a);
        if (absent == 0)
                attend_slots(t, r, layer, head, a);
        else
                attend_rows(t, r, layer, head, a, append_slots(t, r, layer, head, a, absent));
}
