/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Queries are counted from the prompt's end, and the first of each group of `every` chooses: the first decoding query
 * always does, so that no choice has to be carried over from the prompt. Choices are positions, not slots, so that
 * they hold for heads that keep different tokens, and after an eviction.
 */

#include "tools/kvlm/critical.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/note.h"

/* ---- life ---- */

static int allocate(struct critical *c, const struct relief *r) {
        size_t heads = (size_t)r->setup.layers * r->heads;

        c->layers = calloc(r->setup.layers, sizeof *c->layers);
        c->heads = calloc(heads, sizeof *c->heads);
        c->choices = calloc(heads, sizeof *c->choices);
        c->lists = calloc(r->heads, sizeof *c->lists);
        c->slots = calloc(r->heads, sizeof *c->slots);
        if (!c->layers || !c->heads || !c->choices || !c->lists || !c->slots)
                return -ENOMEM;
        for (size_t i = 0; i < heads; i++) {
                c->choices[i].middle = calloc(MAX(c->window.middle, 1), sizeof(uint32_t));
                if (!c->choices[i].middle)
                        return -ENOMEM;
        }
        for (uint32_t h = 0; h < r->heads; h++) {
                c->lists[h] = calloc(r->setup.capacity, sizeof(uint32_t));
                c->slots[h] = calloc(r->setup.capacity, sizeof(uint32_t));
                if (!c->lists[h] || !c->slots[h])
                        return -ENOMEM;
        }
        return 0;
}

int critical_new(const struct relief *r, struct critical **ret) {
        struct critical *c = calloc(1, sizeof *c);
        const struct methods *m = r->m;

        if (!c)
                return note(-ENOMEM, "out of memory");
        c->window = (struct kvd_window){m->hshare.sinks, m->hshare.recent, m->hshare.middle};
        c->every = (uint32_t)MAX(lrintf(1.0f / m->hshare.query), 1);
        c->dense = MIN(m->hshare.dense_layers, r->setup.layers);
        if (allocate(c, r) < 0) {
                critical_free(c, r);
                return note(-ENOMEM, "out of memory for a sequence of %u tokens", r->setup.capacity);
        }
        *ret = c;
        return 0;
}

struct critical *critical_free(struct critical *c, const struct relief *r) {
        if (!c)
                return NULL;
        for (size_t i = 0; c->choices && i < (size_t)r->setup.layers * r->heads; i++)
                free(c->choices[i].middle);
        for (uint32_t h = 0; c->lists && h < r->heads; h++)
                free(c->lists[h]);
        for (uint32_t h = 0; c->slots && h < r->heads; h++)
                free(c->slots[h]);
        free(c->slots);
        free(c->lists);
        free(c->choices);
        free(c->heads);
        free(c->layers);
        free(c);
        return NULL;
}

/* ---- who resembles whom ---- */

struct sets { /* [layer][head][query of CALIBRATION] bits, one per position */
        uint64_t *bits;
        uint32_t *sizes;
        uint32_t words, rows; /* rows: queries */
};

static void remove_absent(const struct relief *r, uint32_t layer, uint32_t head, float *scores, uint32_t from,
                          uint32_t n) {
        const uint32_t *positions = relief_positions(r, layer, head);
        uint32_t next = from;

        if (r->n_slots == r->n)
                return;
        for (uint32_t i = 0; i < r->n_slots && next < from + n; i++) {
                if (positions[i] < from)
                        continue;
                for (; next < MIN(positions[i], from + n); next++)
                        scores[next - from] = -INFINITY;
                next = positions[i] + 1;
        }
        for (; next < MIN(from + n, r->n); next++)
                scores[next - from] = -INFINITY;
}

static uint32_t choose_middle(struct critical *c, struct relief *r, uint32_t layer, uint32_t head, const float *q,
                              uint32_t from, uint32_t n, uint32_t *to) {
        float *scores = labels_score(r->labels, r, layer, head, q, from, n);

        if (!r->tiers) /* who spills can bring them back */
                remove_absent(r, layer, head, scores, from, n);
        return r->setup.ops->hshare->top(to, scores, n, c->window.middle, from, r->labels->desks[head].numbers);
}

static void fill_sets(struct critical *c, struct relief *r, const struct sets *s, uint32_t from, uint32_t n) {
        for (uint32_t l = c->dense; l < r->setup.layers; l++)
                for (uint32_t h = 0; h < r->heads; h++)
                        for (uint32_t i = 0; i < s->rows; i++) {
                                size_t row = relief_index(r, l, h) * s->rows + i;
                                const float *q = labels_query(r->labels, r, l, h, r->n - s->rows + i);
                                uint32_t *list = c->lists[h];

                                s->sizes[row] = choose_middle(c, r, l, h, q, from, n, list);
                                for (uint32_t j = 0; j < s->sizes[row]; j++)
                                        s->bits[row * s->words + list[j] / 64] |= UINT64_C(1) << list[j] % 64;
                        }
}

/* Of n things of so many rows each: how alike each is to those before it. */
static void compare(const struct relief *r, const struct sets *s, size_t first, uint32_t n, uint32_t rows,
                    uint32_t *both, float *similarity) {
        for (uint32_t i = 0; i < n; i++)
                for (uint32_t j = 0; j < i; j++) {
                        size_t a = first + (size_t)i * rows, b = first + (size_t)j * rows;

                        r->setup.ops->hshare->overlap(both, s->bits + a * s->words, s->bits + b * s->words, rows,
                                                      s->words);
                        similarity[i * n + j] = (float)kvd_share_similarity(both, s->sizes + a, s->sizes + b, rows);
                }
}

static void plan(struct critical *c, const struct relief *r, const struct sets *s, uint32_t *both, float *similarity) {
        enum kvd_share how = r->m->hshare.star ? KVD_SHARE_STAR : KVD_SHARE_GREEDY_ROOT;
        uint32_t n = r->setup.layers - c->dense, most = MAX(r->setup.layers, r->heads);
        float *scratch = similarity + (size_t)most * most;

        compare(r, s, relief_index(r, c->dense, 0) * s->rows, n, r->heads * s->rows, both, similarity);
        kvd_share_plan(similarity, n, kvd_share_count((double)r->m->hshare.layer, n), how, c->layers + c->dense,
                       scratch);
        for (uint32_t l = c->dense; l < r->setup.layers; l++) {
                c->layers[l] += c->dense;
                compare(r, s, relief_index(r, l, 0) * s->rows, r->heads, s->rows, both, similarity);
                kvd_share_plan(similarity, r->heads, kvd_share_count((double)r->m->hshare.head, r->heads), how,
                               c->heads + relief_index(r, l, 0), scratch);
        }
}

/* A prompt within the window has nothing to compare: everybody chooses for himself. */
static void plan_nothing(struct critical *c, const struct relief *r) {
        for (uint32_t l = 0; l < r->setup.layers; l++) {
                c->layers[l] = l;
                for (uint32_t h = 0; h < r->heads; h++)
                        c->heads[relief_index(r, l, h)] = h;
        }
}

int critical_plan(struct critical *c, struct relief *r) {
        size_t heads = (size_t)r->setup.layers * r->heads, most = MAX(r->setup.layers, r->heads);
        struct sets s = {.words = DIV_UP(r->n, 64), .rows = MIN(CALIBRATION, r->n)};
        uint32_t from, n = kvd_window_middle(&c->window, r->n, &from);
        _cleanup_(freep) uint64_t *bits = NULL;
        _cleanup_(freep) uint32_t *sizes = NULL, *both = NULL;
        _cleanup_(freep) float *similarity = NULL;

        plan_nothing(c, r);
        c->ready = true;
        if (n == 0 || c->dense == r->setup.layers)
                return 0;
        s.bits = bits = calloc(heads * s.rows * s.words, sizeof *bits);
        s.sizes = sizes = calloc(heads * s.rows, sizeof *sizes);
        both = calloc((size_t)r->heads * s.rows, sizeof *both);
        similarity = calloc(most * most + most, sizeof *similarity);
        if (!bits || !sizes || !both || !similarity)
                return note(-ENOMEM, "out of memory for a sharing configuration");
        fill_sets(c, r, &s, from, n);
        plan(c, r, &s, both, similarity);
        return 0;
}

/* ---- a decoding query ---- */

uint32_t critical_slots(const struct relief *r, uint32_t layer, uint32_t head, const uint32_t *positions, uint32_t n,
                        uint32_t *slots) {
        const uint32_t *held = relief_positions(r, layer, head);
        uint32_t slot = 0, found = 0;

        for (uint32_t i = 0; i < n; i++) {
                if (r->n_slots == r->n)
                        slot = positions[i];
                while (slot < r->n_slots && held[slot] < positions[i])
                        slot++;
                if (positions[i] >= r->n)
                        slots[found++] = r->n_slots + (positions[i] - r->n);
                else if (slot < r->n_slots && held[slot] == positions[i])
                        slots[found++] = slot;
        }
        return found;
}

const uint32_t *critical_choose(struct critical *c, struct relief *r, uint32_t layer, uint32_t head,
                                const struct kvd_attention *a, uint32_t *n) {
        uint32_t now = r->n + 1, from, middle, root = c->layers[layer];
        const struct choice *used = c->choices + relief_index(r, root, c->heads[relief_index(r, root, head)]);

        if (!c->ready || layer < c->dense)
                return NULL;
        middle = kvd_window_middle(&c->window, now, &from);
        if (kvd_share_chooses(c->layers, c->heads, r->heads, layer, head, r->n - r->setup.prompt, c->every)) {
                struct choice *choice = c->choices + relief_index(r, layer, head);

                choice->n_then = now;
                choice->n_middle = middle ? choose_middle(c, r, layer, head, a->q, from, middle, choice->middle) : 0;
                r->desks[head].stats.selections += middle > 0;
        }
        if (middle == 0 || kvd_window_middle(&c->window, used->n_then, &from) == 0)
                return NULL;
        *n = kvd_window_positions(&c->window, used->middle, used->n_middle, used->n_then, now, c->lists[head]);
        return c->lists[head];
}

void critical_count(const struct critical *c, const struct relief *r, uint32_t block_tokens, uint32_t *hits) {
        for (size_t i = relief_index(r, c->dense, 0); i < (size_t)r->setup.layers * r->heads; i++)
                for (uint32_t k = 0; k < c->choices[i].n_middle; k++)
                        hits[c->choices[i].middle[k] / block_tokens]++;
}
