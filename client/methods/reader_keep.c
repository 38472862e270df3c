/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KVReviver: a share of a sequence's blocks stays in the pool: the first, the newest, and those
 * that queries need most. The others have an exact copy (or are only in a sketch, if the space
 * keeps no copies). If a query's labels put a noticeable share of its attention into a missing
 * block, it waits for the block, and the least used block makes room. All blocks that a layer
 * misses are requested at once.
 */

#include <errno.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "client/internal.h"
#include "client/methods/reader.h"
#include "ipc/base/sys.h"

#define MEMORY 0.9f /* factor per token by which a block's score fades */

enum { TRIES = 8 }; /* of fetching blocks that the daemon takes away again */

struct residency {
        double budget;  /* fraction of the blocks that stays */
        uint32_t sinks; /* number of first blocks that stay */
        double recent;  /* fraction of the budget for the newest blocks */
        float missed;   /* a query waits for a missing block with this share (reader.h) */
        enum kvd_cool how;
        float *score;    /* [max_blocks] the largest share of a query, fading over time */
        float *wanted;   /* [max_blocks] the same, since the last fetch */
        uint32_t *order; /* [2 max_blocks] scratch */
};

int residency_new(struct kvd_reader *p) {
        struct residency *r = sys->calloc(1, sizeof *r);
        bool copies = reader_setting(p, "kvreviver.spill") > 0;

        p->residency = r;
        if (!r)
                return -ENOMEM;
        *r = (struct residency){.budget = reader_setting(p, "kvreviver.budget"),
                                .sinks = (uint32_t)MAX(reader_setting(p, "keydiff.sink_blocks"), 1),
                                .recent = reader_setting(p, "kvreviver.recent"),
                                .missed = (float)reader_setting(p, "kvreviver.wanted"),
                                .how = copies ? KVD_COOL_SPILL : KVD_COOL_VAGUE};
        r->score = sys->calloc(p->max_blocks, sizeof *r->score);
        r->wanted = sys->calloc(p->max_blocks, sizeof *r->wanted);
        r->order = sys->calloc(2 * (size_t)p->max_blocks, sizeof *r->order);
        return r->score && r->wanted && r->order ? 0 : -ENOMEM;
}

void residency_free(struct kvd_reader *p) {
        if (!p->residency)
                return;
        free(p->residency->score);
        free(p->residency->wanted);
        free(p->residency->order);
        free(p->residency);
        p->residency = NULL;
}

void residency_forget(struct kvd_reader *p) {
        memset(p->residency->wanted, 0, p->max_blocks * sizeof *p->residency->wanted);
}

static uint32_t budget_of(const struct kvd_reader *p) {
        const struct residency *r = p->residency;

        return MAX((uint32_t)ceil(r->budget * p->n_entries), r->sinks + 2);
}

uint32_t residency_first(const struct kvd_reader *p) {
        return MIN(p->residency->sinks, p->n_entries);
}

uint32_t residency_end(const struct kvd_reader *p) {
        uint32_t recent = MAX((uint32_t)lrint(p->residency->recent * budget_of(p)), 1);

        return p->n_entries - MIN(recent, p->n_entries);
}

/* The first and the newest blocks. */
static bool is_at_an_end(const struct kvd_reader *p, uint32_t i) {
        return i < residency_first(p) || i >= residency_end(p);
}

void residency_share(struct kvd_reader *p, const float *share) {
        struct residency *r = p->residency;

        for (uint32_t i = 0; i < p->n_entries; i++) {
                r->score[i] = MAX(r->score[i], share[i]);
                r->wanted[i] = MAX(r->wanted[i], share[i]);
        }
}

/* ---- moving blocks out and in ---------------------------------------------------------------- */

/* Whether a block is here and stays, or this sequence may not move it. */
static bool stays(const struct kvd_reader *p, uint32_t i) {
        uint32_t flags = p->entries[i].flags;

        return (p->entries[i].data && is_at_an_end(p, i)) || !(flags & KVD_ENTRY_OWN) ||
               flags & (KVD_ENTRY_SHARED | KVD_ENTRY_DROPPED);
}

/* Most needed first: by the current layer, then by earlier use. */
static int by_want(const void *a, const void *b, void *data) {
        const struct residency *r = data;
        uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
        float x = r->wanted[i] >= r->missed ? r->wanted[i] : 0,
              y = r->wanted[j] >= r->missed ? r->wanted[j] : 0;

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
static uint32_t rank(struct kvd_reader *p, uint32_t *fit) {
        struct residency *r = p->residency;
        uint32_t n = 0, fixed = 0, budget = budget_of(p);

        for (uint32_t i = 0; i < p->n_entries; i++)
                if (!stays(p, i))
                        r->order[n++] = i;
                else
                        fixed += p->entries[i].data != NULL;
        qsort_r(r->order, n, sizeof *r->order, by_want, r);
        *fit = fixed < budget ? budget - fixed : 1;
        return n;
}

/*
 * Moves the least needed blocks out, as far as room is needed for those that come. Blocks within
 * the budget are first in the order, and stay. Whatever fails is tried again later.
 */
static void make_room(struct kvd_reader *p, uint32_t n, uint32_t fit, uint32_t coming) {
        struct residency *r = p->residency;
        uint32_t here = coming, *leaving = r->order + n, n_leaving = 0;

        for (uint32_t k = 0; k < n; k++)
                here += p->entries[r->order[k]].data != NULL;
        for (uint32_t k = n; k-- > 0 && here > fit;)
                if (p->entries[r->order[k]].data) {
                        leaving[n_leaving++] = r->order[k];
                        here--;
                }
        if (n_leaving > 0)
                kvd_sequence_cool(p->sequence, n_leaving, leaving, r->how);
}

static bool is_missed(const struct kvd_reader *p, uint32_t i) {
        return !p->entries[i].data && p->residency->wanted[i] >= p->residency->missed &&
               !(p->entries[i].flags & KVD_ENTRY_DROPPED);
}

/* Under pressure the daemon may have taken one of those at the ends: it is needed first of all. */
static bool misses(const struct kvd_reader *p) {
        bool missed = false;

        for (uint32_t i = 0; i < p->n_entries; i++) {
                if (!p->entries[i].data && is_at_an_end(p, i))
                        p->residency->wanted[i] = FLT_MAX;
                missed |= is_missed(p, i);
        }
        return missed;
}

/*
 * Requests missing blocks among the first n of the order. What only a sketch has is requested, too,
 * and may not come. Returns how many come.
 */
static int revive(struct kvd_reader *p, uint32_t n) {
        int coming = 0;

        for (uint32_t k = 0; k < n; k++) {
                uint32_t i = p->residency->order[k], flags = p->entries[i].flags;
                int r;

                if (!is_missed(p, i) || !(flags & (KVD_ENTRY_SPILLED | KVD_ENTRY_VAGUE)))
                        continue;
                p->stats.misses++;
                r = kvd_sequence_revive(p->sequence, 1, &i,
                                        flags & KVD_ENTRY_SPILLED ? KVD_REVIVE_EXACT :
                                                                    KVD_REVIVE_APPROX);
                if (r < 0 && r != -ENODATA)
                        return r;
                coming += r > 0;
        }
        return coming;
}

/* After the wait: -errno if a requested block that has an exact copy is still missing. */
static int check_here(const struct kvd_reader *p, uint32_t n) {
        uint32_t gone = 0;

        for (uint32_t k = 0; k < n; k++) {
                uint32_t i = p->residency->order[k];

                gone += is_missed(p, i) && p->entries[i].flags & KVD_ENTRY_SPILLED;
        }
        if (gone && p->failed < 0)
                return client_fail(p->failed,
                                   "%u blocks that a query needs are gone with their daemon", gone);
        if (gone && p->late)
                return client_fail(-ETIMEDOUT, "%u blocks that a query needs have not come yet",
                                   gone);
        if (gone)
                return client_fail(-ENOBUFS, "there is no room for %u blocks that a query needs",
                                   gone);
        return 0;
}

static void count_resident(struct kvd_reader *p) {
        uint64_t n = 0;

        for (uint32_t i = 0; i < p->n_entries; i++)
                n += p->entries[i].data != NULL;
        p->stats.most_resident = MAX(p->stats.most_resident, n);
}

/*
 * How many blocks are fetched at once: all that are missed, or half of those that fit, so that
 * blocks of high score stay while others come and go.
 */
static uint32_t batch(const struct kvd_reader *p, uint32_t n, uint32_t fit) {
        uint32_t missed = 0, half = MAX(fit / 2, 1);

        for (uint32_t k = 0; k < n; k++)
                missed += is_missed(p, p->residency->order[k]);
        return missed <= fit || !p->in_rounds ? MIN(n, fit) : half;
}

static int fetch_once(struct kvd_reader *p) {
        uint64_t misses_before = p->stats.misses;
        uint32_t fit, n = rank(p, &fit), most = batch(p, n, fit);
        int coming = revive(p, most), changed, r;

        if (coming < 0 || p->stats.misses == misses_before)
                return MIN(coming, 0);
        make_room(p, n, fit, (uint32_t)coming);
        changed = reader_wait(p);
        r = check_here(p, most);
        count_resident(p);
        return r < 0 ? r : changed;
}

/* Under pressure the daemon may take other blocks meanwhile, which are needed, too. */
static int fetch(struct kvd_reader *p) {
        int r = 0;

        for (uint32_t i = 0; i < TRIES && misses(p); i++) {
                r = fetch_once(p);
                if (r != -ENOBUFS)
                        break;
        }
        return r;
}

int residency_fetch(struct kvd_reader *p) {
        uint64_t started = sys_now_ns();
        int r = fetch(p);

        p->stats.fetch_ns += sys_now_ns() - started;
        return r;
}

/* Marks what is here as seen. Returns whether anything is that was not. */
static bool see(struct kvd_reader *p, bool *seen) {
        bool any = false;

        for (uint32_t i = 0; i < p->n_entries; i++) {
                any |= p->entries[i].data && !seen[i];
                seen[i] |= p->entries[i].data != NULL;
                if (seen[i])
                        p->residency->wanted[i] = -1; /* less than any that is missed */
        }
        return any;
}

int residency_fetch_more(struct kvd_reader *p, bool *seen) {
        bool any = see(p, seen);
        int r = any ? residency_fetch(p) : 0;

        for (uint32_t i = 0; r > 0 && i < p->n_entries; i++)
                if (p->entries[i].data && !seen[i])
                        return 1;
        return MIN(r, 0);
}

int residency_settle(struct kvd_reader *p) {
        struct residency *r = p->residency;
        uint32_t n, fit;
        int changed = 0;

        residency_forget(p);
        n = rank(p, &fit);
        make_room(p, n, fit, 0);
        if (p->decoded == 0)
                changed = reader_wait(p);
        for (uint32_t i = 0; i < p->n_entries; i++)
                r->score[i] *= MEMORY;
        count_resident(p);
        return changed;
}
