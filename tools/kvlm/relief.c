/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/relief.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <time.h>

#include "ipc/base/util.h"
#include "tools/kvlm/budget.h"
#include "tools/kvlm/critical.h"
#include "tools/kvlm/labels.h"
#include "tools/kvlm/note.h"
#include "tools/kvlm/tiers.h"

/* ---- life ---- */

static bool wants_mass(const struct methods *m) {
        return m->evict >= EVICT_ATTENTION;
}

/* No less than the blocks that always stay, and one more. */
static uint32_t budget_of(const struct relief_setup *s) {
        const struct methods *m = s->methods;
        uint32_t least = (m->sink_blocks + 2) * s->shape.tokens;

        if (m->budget || m->evict == EVICT_NONE)
                return m->budget;
        return MAX(least, (uint32_t)ceilf(m->budget_share * (float)s->prompt));
}

static int allocate(struct relief *r) {
        const struct relief_setup *s = &r->setup;
        size_t lists = (size_t)s->layers * r->heads * s->capacity;

        r->positions = calloc(lists, sizeof *r->positions);
        r->mass = wants_mass(r->m) ? calloc(lists, sizeof *r->mass) : NULL;
        r->desks = calloc(r->heads, sizeof *r->desks);
        if (!r->positions || !r->desks || (wants_mass(r->m) && !r->mass))
                return note(-ENOMEM, "out of memory for a sequence of %u tokens", s->capacity);
        for (uint32_t h = 0; h < r->heads && wants_mass(r->m); h++) {
                r->desks[h].mass = calloc(s->capacity, sizeof(float));
                if (!r->desks[h].mass)
                        return note(-ENOMEM, "out of memory for a sequence of %u tokens", s->capacity);
        }
        return 0;
}

/* Who spills needs labels, too: they say what should come back. */
static int make_parts(struct relief *r) {
        const struct methods *m = r->m;
        bool tiers = m->evict >= EVICT_REVIVER;
        int e = tiers ? tiers_new(r, &r->tiers) : 0;

        if (e == 0 && (m->hshare.on || (tiers && m->reviver.spill && m->reviver.revive > 0)))
                e = labels_new(r, &r->labels);
        if (e == 0 && m->hshare.on)
                e = critical_new(r, &r->critical);
        return e;
}

int relief_new(const struct relief_setup *setup, struct relief **ret) {
        struct relief *r = calloc(1, sizeof *r);
        int e;

        if (!r)
                return note(-ENOMEM, "out of memory");
        *r = (struct relief){.setup = *setup, .m = setup->methods, .heads = setup->shape.kv_heads};
        r->setup.prompt -= MIN(r->m->decode_tail, setup->prompt - 1);
        r->budget = budget_of(setup);
        r->seen_from = UINT32_MAX;
        e = allocate(r);
        if (e == 0)
                e = make_parts(r);
        if (e < 0) {
                relief_free(r);
                return e;
        }
        *ret = r;
        return 0;
}

struct relief *relief_free(struct relief *r) {
        if (!r)
                return NULL;
        critical_free(r->critical, r);
        labels_free(r->labels, r->heads);
        tiers_free(r->tiers, r);
        for (uint32_t h = 0; r->desks && h < r->heads; h++) {
                free(r->desks[h].scratch);
                free(r->desks[h].mass);
        }
        free(r->desks);
        free(r->mass);
        free(r->positions);
        free(r);
        return NULL;
}

/* ---- during a step ---- */

uint32_t relief_step_limit(const struct relief *r, uint32_t first) {
        uint32_t every = r->m->evict == EVICT_NONE ? 0 : r->m->every;

        if (first >= r->setup.prompt)
                return 1;
        return MIN(r->setup.prompt - first, every ? every - first % every : UINT32_MAX);
}

uint32_t relief_not_found(const struct relief *r) {
        return r->m->decode_tail + (r->m->hshare.on ? CALIBRATION : 0);
}

static int make_room(struct desk *d, size_t floats) {
        if (floats <= d->room)
                return 0;
        free(d->scratch);
        d->room = 0;
        d->scratch = calloc(floats + floats / 2, sizeof *d->scratch);
        if (!d->scratch)
                return note(-ENOMEM, "out of memory for attention");
        d->room = floats + floats / 2;
        return 0;
}

/* What attention over all slots needs, over a list of them, and over rows that were gathered. */
static size_t scratch_needed(const struct relief *r, const struct kvd_attention *a) {
        struct kvd_attention listed = *a;
        size_t floats = kvd_attend_scratch(a);

        if (r->tiers)
                floats = MAX(floats, tiers_scratch(r->tiers, r, a));
        if (!r->critical)
                return floats;
        listed.chosen = r->critical->lists[0];
        listed.n_chosen = a->first + a->n;
        return MAX(floats, kvd_attend_scratch(&listed));
}

int relief_prepare(struct relief *r, const struct kvd_attention *a) {
        size_t floats = scratch_needed(r, a);

        r->seen_from = MIN(r->seen_from, r->n);
        for (uint32_t h = 0; h < r->heads; h++) {
                int e = make_room(r->desks + h, floats);

                if (e < 0)
                        return e;
        }
        return 0;
}

/* Slots that were filled by this step have no entry among the positions yet. */
static void keep_mass(struct relief *r, uint32_t layer, uint32_t head, const float *mass, uint32_t n) {
        const uint32_t *positions = relief_positions(r, layer, head);
        float *to = relief_mass(r, layer, head);

        for (uint32_t i = 0; i < n; i++)
                to[i < r->n_slots ? positions[i] : r->n + (i - r->n_slots)] += mass[i];
}

static double now_ms(void) {
        struct timespec ts;

        clock_gettime(CLOCK_MONOTONIC, &ts);
        return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec / 1e6;
}

/* HShare's positions, or NULL; as slots they are also put into the call. */
static const uint32_t *select_tokens(struct relief *r, uint32_t layer, uint32_t head, struct kvd_attention *a,
                                     uint32_t *n) {
        double started = now_ms();
        const uint32_t *positions = NULL;

        if (r->critical && r->n >= r->setup.prompt)
                positions = critical_choose(r->critical, r, layer, head, a, n);
        if (positions) {
                a->chosen = r->critical->slots[head];
                a->n_chosen = critical_slots(r, layer, head, positions, *n, r->critical->slots[head]);
        }
        r->desks[head].stats.selection_ms += r->critical ? now_ms() - started : 0.0;
        return positions;
}

void relief_attend(struct relief *r, uint32_t layer, uint32_t head, struct kvd_attention *a) {
        struct desk *d = r->desks + head;
        uint32_t n = a->first + a->n, n_positions = 0;
        const uint32_t *positions;

        a->scratch = d->scratch;
        if (r->labels)
                labels_follow(r->labels, r, layer, head, a);
        positions = select_tokens(r, layer, head, a, &n_positions);
        if (r->tiers) {
                tiers_attend(r->tiers, r, layer, head, a, positions, n_positions);
                return;
        }
        if (r->mass)
                a->token_mass = memset(d->mass, 0, n * sizeof *d->mass);
        kvd_attend(a);
        if (r->mass)
                keep_mass(r, layer, head, d->mass, n);
}

float relief_score(const struct relief *r, uint32_t layer, uint32_t head, uint32_t position) {
        uint32_t seen = r->n - MAX(position, MIN(r->seen_from, r->n - 1));

        return relief_mass(r, layer, head)[position] / (float)(seen * r->setup.group);
}

/* ---- after a step ---- */

static void append(struct relief *r, uint32_t n_computed) {
        for (size_t i = 0; i < (size_t)r->setup.layers * r->heads; i++) {
                uint32_t *positions = r->positions + i * r->setup.capacity + r->n_slots;

                for (uint32_t p = r->n; p < n_computed; p++)
                        *positions++ = p;
        }
        r->n_slots += n_computed - r->n;
        r->n = n_computed;
}

void relief_found(struct relief *r, uint32_t n_computed) {
        if (n_computed > r->n)
                append(r, n_computed);
}

/* Within the budget nothing is lost at all; KVReviver's exact parts are less than the budget. */
static bool evicts(const struct relief *r, uint32_t n_slots, uint32_t n_computed) {
        uint32_t every = r->m->every, prompt = r->setup.prompt, least = r->tiers ? r->tiers->resident : r->budget;

        if (r->m->evict == EVICT_NONE || n_computed <= r->budget || n_slots <= least)
                return false;
        if (n_computed > prompt)
                return n_slots > least + r->m->slack;
        return n_computed == prompt || (every && n_computed % every == 0);
}

bool relief_loses(const struct relief *r, uint32_t n_computed) {
        bool sparse = r->critical && n_computed == r->setup.prompt;

        return !r->lossy && (sparse || evicts(r, r->n_slots + (n_computed - r->n), n_computed));
}

static uint64_t kv_bytes(const struct relief *r, const struct sequence *s) {
        uint64_t bytes = (uint64_t)s->n_blocks * r->setup.shape.block_bytes;

        return bytes + (r->tiers ? vague_bytes(r->tiers->vague, r) : 0);
}

static int evict(struct relief *r, struct sequence *s) {
        uint32_t before = r->n_slots;
        int e = 0;

        r->lossy = true;
        sequence_keep_private(s);
        if (r->tiers && r->labels && !r->labels->ready)
                e = labels_make(r->labels, r, s->blocks);
        if (e == 0)
                e = r->tiers ? tiers_compress(r->tiers, r, s) : budget_evict(r, s);
        if (e < 0)
                return e;
        r->stats.evictions++;
        r->stats.evicted += before - r->n_slots;
        return 0;
}

/* At the prompt's end: from here on queries see critical tokens only. */
static int go_sparse(struct relief *r, struct sequence *s) {
        int e = r->labels->ready ? 0 : labels_make(r->labels, r, s->blocks);

        r->lossy = true;
        sequence_keep_private(s);
        return e < 0 ? e : critical_plan(r->critical, r);
}

int relief_settle(struct relief *r, struct sequence *s, uint32_t n_computed) {
        int e = 0;

        append(r, n_computed);
        r->stats.kv_bytes_peak = MAX(r->stats.kv_bytes_peak, kv_bytes(r, s));
        if (r->critical && n_computed == r->setup.prompt)
                e = go_sparse(r, s);
        if (e == 0 && evicts(r, r->n_slots, n_computed))
                e = evict(r, s);
        return e;
}

struct relief_stats relief_stats(const struct relief *r, const struct sequence *s) {
        struct relief_stats stats = r->stats;

        stats.kv_bytes = kv_bytes(r, s);
        stats.label_bytes = r->labels && r->labels->ready ? labels_bytes(r->labels, r) : 0;
        stats.spill_bytes = r->tiers ? tiers_spilled_bytes(r->tiers, r) : 0;
        for (uint32_t h = 0; h < r->heads; h++) {
                const struct relief_stats *d = &r->desks[h].stats;

                stats.selections += d->selections;
                stats.selection_ms += d->selection_ms;
                stats.revived_exact += d->revived_exact;
                stats.revived_approximate += d->revived_approximate;
                stats.refused += d->refused;
        }
        return stats;
}

void relief_hits(const struct relief *r, uint32_t block_tokens, uint32_t *hits) {
        if (r->critical && r->critical->ready)
                critical_count(r->critical, r, block_tokens, hits);
}
