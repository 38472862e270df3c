/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KVReviver: a share of a sequence's blocks stays in the pool: the first, the newest, and those
 * that queries need most. The others have an exact copy (or are only in a sketch, if the space
 * keeps no copies). If a query's labels put a noticeable share of its attention into a missing
 * block, it waits for the block, and the least used block makes room. All blocks that a layer
 * misses are requested at once.
 */

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"
#include "tools/kvlm/pooled_internal.h"

#define WANTED 0.1f /* share of a query's attention from which a missing block counts as missed */
#define MEMORY 0.9f /* factor per token by which a block's score fades */

struct residency {
        double budget;  /* fraction of the blocks that stays */
        uint32_t sinks; /* number of first blocks that stay */
        double recent;  /* fraction of the budget for the newest blocks */
        enum kvd_cool how;
        float *score;    /* [blocks] largest share of a query's attention, fading over time */
        float *wanted;   /* [blocks] the same, since the last fetch */
        uint32_t *order; /* [2 blocks] scratch */
};

int residency_new(struct pooled *p) {
        struct residency *r = calloc(1, sizeof *r);

        p->residency = r;
        if (!r)
                return refuse(-ENOMEM, "out of memory");
        *r = (struct residency){.budget = pooled_setting(p, "kvreviver.budget"),
                                .sinks = (uint32_t)MAX(pooled_setting(p, "keydiff.sink_blocks"), 1),
                                .recent = pooled_setting(p, "kvreviver.recent"),
                                .how = pooled_setting(p, "kvreviver.spill") > 0 ? KVD_COOL_SPILL :
                                                                                  KVD_COOL_VAGUE};
        r->score = calloc(p->room, sizeof *r->score);
        r->wanted = calloc(p->room, sizeof *r->wanted);
        r->order = calloc(2 * (size_t)p->room, sizeof *r->order);
        return r->score && r->wanted && r->order ? 0 : refuse(-ENOMEM, "out of memory");
}

void residency_free(struct pooled *p) {
        if (!p->residency)
                return;
        free(p->residency->score);
        free(p->residency->wanted);
        free(p->residency->order);
        free(p->residency);
        p->residency = NULL;
}

void residency_share(struct pooled *p, const float *share) {
        struct residency *r = p->residency;

        for (uint32_t i = 0; i < p->n_entries; i++) {
                r->score[i] = MAX(r->score[i], share[i]);
                r->wanted[i] = MAX(r->wanted[i], share[i]);
        }
}

/* ---- moving blocks out and in ---------------------------------------------------------------- */

static uint32_t budget_of(const struct pooled *p) {
        const struct residency *r = p->residency;

        return MAX((uint32_t)ceil(r->budget * p->n_entries), r->sinks + 2);
}

/*
 * Whether a block stays: the first and the newest blocks, and those that this sequence may not
 * move.
 */
static bool stays(const struct pooled *p, uint32_t i) {
        const struct residency *r = p->residency;
        uint32_t recent = MAX((uint32_t)lrint(r->recent * budget_of(p)), 1);

        return i < r->sinks || i + recent >= p->n_entries || !(p->flags[i] & KVD_ENTRY_OWN) ||
               p->flags[i] & (KVD_ENTRY_SHARED | KVD_ENTRY_DROPPED);
}

/* Most needed first: by the current layer, then by earlier use. */
static int by_want(const void *a, const void *b, void *data) {
        const struct residency *r = data;
        uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
        float x = r->wanted[i] >= WANTED ? r->wanted[i] : 0,
              y = r->wanted[j] >= WANTED ? r->wanted[j] : 0;

        if (x == y) {
                x = r->score[i];
                y = r->score[j];
        }
        return (x < y) - (x > y);
}

/*
 * Lists the blocks that may be moved, most needed first; returns their number. *fit: how many of
 * them fit into the budget.
 */
static uint32_t rank(struct pooled *p, uint32_t *fit) {
        struct residency *r = p->residency;
        uint32_t n = 0, fixed = 0, budget = budget_of(p);

        for (uint32_t i = 0; i < p->n_entries; i++)
                if (!stays(p, i))
                        r->order[n++] = i;
                else
                        fixed += p->blocks[i] != NULL;
        qsort_r(r->order, n, sizeof *r->order, by_want, r);
        *fit = fixed < budget ? budget - fixed : 1;
        return n;
}

/*
 * Moves the least needed blocks out, as far as room is needed for those that come. Blocks within
 * the budget are first in the order, and stay.
 */
static void make_room(struct pooled *p, uint32_t n, uint32_t fit, uint32_t coming) {
        struct residency *r = p->residency;
        uint32_t here = coming, *leaving = r->order + n, n_leaving = 0;

        for (uint32_t k = 0; k < n; k++)
                here += p->blocks[r->order[k]] != NULL;
        for (uint32_t k = n; k-- > 0 && here > fit;)
                if (p->blocks[r->order[k]]) {
                        leaving[n_leaving++] = r->order[k];
                        here--;
                }
        if (n_leaving > 0)
                kvd_sequence_cool(p->table, n_leaving, leaving, r->how);
}

/* Requests missing blocks that are needed, within the budget. Returns how many come. */
static uint32_t revive(struct pooled *p, uint32_t n) {
        struct residency *r = p->residency;
        uint32_t coming = 0;

        for (uint32_t k = 0; k < n && r->wanted[r->order[k]] >= WANTED; k++) {
                uint32_t i = r->order[k];
                enum kvd_revive how = p->flags[i] & KVD_ENTRY_SPILLED ? KVD_REVIVE_EXACT :
                                                                        KVD_REVIVE_APPROX;

                if (p->blocks[i] || !(p->flags[i] & (KVD_ENTRY_SPILLED | KVD_ENTRY_VAGUE)))
                        continue;
                p->stats.misses++;
                coming += kvd_sequence_revive(p->table, 1, &i, how) > 0;
        }
        return coming;
}

static bool misses(const struct pooled *p) {
        for (uint32_t i = 0; i < p->n_entries; i++)
                if (!p->blocks[i] && p->residency->wanted[i] >= WANTED &&
                    !(p->flags[i] & KVD_ENTRY_DROPPED))
                        return true;
        return false;
}

static void count_resident(struct pooled *p) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < p->n_entries; i++)
                n += p->blocks[i] != NULL;
        p->stats.most_resident = MAX(p->stats.most_resident, n);
}

void residency_fetch(struct pooled *p) {
        double started = sys_now_ms();
        uint32_t n, fit, coming;

        if (misses(p) && !p->late) {
                n = rank(p, &fit);
                coming = revive(p, MIN(n, fit));
                make_room(p, n, fit, coming);
                if (coming > 0)
                        pooled_wait(p);
                count_resident(p);
        }
        memset(p->residency->wanted, 0, p->room * sizeof *p->residency->wanted);
        p->stats.fetch_ms += sys_now_ms() - started;
}

void residency_settle(struct pooled *p) {
        struct residency *r = p->residency;
        uint32_t n, fit;

        memset(r->wanted, 0, p->room * sizeof *r->wanted);
        n = rank(p, &fit);
        make_room(p, n, fit, 0);
        if (p->decoded == 0)
                pooled_wait(p);
        for (uint32_t i = 0; i < p->n_entries; i++)
                r->score[i] *= MEMORY;
        count_resident(p);
}
