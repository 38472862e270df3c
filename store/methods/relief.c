/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Relief makes room when too much of a space is taken by blocks that cannot simply be evicted:
 * private blocks that sequences use, and blocks being filled. Prefixes are evicted only by
 * allocations that need room; until then they stay useful. The cheapest loss comes first:
 *
 *      1  private blocks without references (private_blocks.c)   in every allocation, and as idle work
 *      2  unused prefixes (evict.c)                              in every allocation
 *      3  the largest sequences are compared once more           MemShare
 *      4  their blocks of lowest priority leave, copied exactly  KVReviver, down to its budget of each sequence
 *      5  ... put into the sketch only, if copies are off (kvreviver.spill), or there is no room for one and
 *         kvreviver.drop allows it
 *      6  ... dropped, if kvreviver.drop allows it and there is no sketch
 *      7  allocations are refused
 *
 * Relief does not make a sketch in addition to exact copies: both are in host memory, and the copy
 * is as close. A client can request one (KVD_COOL_VAGUE). Nothing here waits: relief queues jobs,
 * and clients take the resulting changes when they can.
 */

#include <errno.h>
#include <string.h>

#include "store/hooks.h"
#include "store/methods/methods.h"

static struct pressure *pressure_of(struct space *space) {
        return &space->pressure;
}

/* ---- how much -------------------------------------------------------------------------------- */

static void end_of_need(struct space *space) {
        pressure_of(space)->relieving = false;
        for (uint32_t i = 0; i < KVD_MAX_SEQUENCES; i++)
                if (sequences_of(space)->at[i]) {
                        sequences_of(space)->at[i]->passed = false;
                        sequences_of(space)->at[i]->spent = 0;
                }
}

/* blocks to free after an allocation found none, whatever the watermarks say */
#define STARVED_BLOCKS 16u

/* Counts the blocks that should leave in addition to those that are leaving already. */
static uint64_t blocks_needed(struct space *space) {
        struct pressure *p = pressure_of(space);
        double all = space->memory.max_blocks;
        double high = setting(space, KVD_pressure_high) * all;
        double low = setting(space, KVD_pressure_low) * all;
        uint64_t now = blocks_committed(space), want = 0;

        if (now > high)
                p->relieving = true;
        if (p->relieving && now > low)
                want = now - (uint64_t)low;
        else if (p->relieving)
                end_of_need(space);
        if (p->starved)
                want = MAX(want, STARVED_BLOCKS);
        return want > sequences_of(space)->n_leaving ? want - sequences_of(space)->n_leaving : 0;
}

/* ---- which blocks leave ---------------------------------------------------------------------- */

/*
 * Finds the sequence with the most private blocks. A sequence that had none to give is skipped
 * until it has more or fewer.
 */
static struct sequence *largest(const struct space *space) {
        struct sequence *best = NULL;

        for (uint32_t i = 0; sequences_of(space)->n && i < KVD_MAX_SEQUENCES; i++) {
                struct sequence *q = sequences_of(space)->at[i];

                if (q && q->n_own && q->n_own != q->spent && (!best || q->n_own > best->n_own))
                        best = q;
        }
        return best;
}

static bool may_leave(const struct sequence *q, const struct entry *e) {
        return e->busy == IDLE && entry_is_own(e) && e->priority < PRIORITY_MOST &&
               block_of(q->space, kvd_ref_id(e->ref))->refs == 1;
}

/* Returns the priority up to which n of the ranked entries may leave. */
static uint32_t cut(const struct sequence *q, uint64_t n) {
        uint32_t *counts = space_store(q->space)->ranks;
        uint64_t below = 0;

        memset(counts, 0, STORE_RANKS * sizeof *counts);
        for (uint32_t i = q->ranked.from; i < q->ranked.to; i++)
                if (may_leave(q, &q->entries[i]))
                        counts[q->entries[i].priority]++;
        for (uint32_t p = 0; p < PRIORITY_MOST; p++) {
                below += counts[p];
                if (below >= n)
                        return p;
        }
        return PRIORITY_MOST;
}

/* Lets up to n ranked entries of lowest priority leave. Returns their number. */
static uint32_t cool_lowest(struct sequence *q, uint64_t n, enum kvd_cool how) {
        uint32_t limit = cut(q, n), offered = q->changes.n, cooled = 0;
        struct cool_room room = {0};

        /* entries at the limit last: not all of them may be needed */
        for (uint32_t pass = 0; pass < 2; pass++)
                for (uint32_t i = q->ranked.from; i < q->ranked.to && cooled < n; i++) {
                        const struct entry *e = &q->entries[i];

                        if (may_leave(q, e) && (pass ? e->priority == limit : e->priority < limit))
                                cooled += cool_entry(q, i, how, &room);
                }
        if (q->changes.n > offered)
                sync_news(q->space);
        space_count(q->space, KVD_SPACE_RELIEVED, cooled);
        pressure_of(q->space)->starved &= !cooled;
        q->ranked.in_vain = cooled ? 0 : q->ranked.in_vain;
        return cooled;
}

/*
 * Lets entries of the next piece leave. Returns their number; 0: no entry of the sequence may
 * leave; -EAGAIN: not all pieces were tried.
 */
static int cool_some(struct sequence *q, uint64_t n, enum kvd_cool how) {
        uint32_t cooled;

        priority_rank(q);
        cooled = cool_lowest(q, n, how);
        if (cooled || q->ranked.in_vain < q->n_entries)
                return cooled ? (int)cooled : -EAGAIN;
        q->ranked.in_vain = 0;
        return 0;
}

#define COOL_PIECE 256u /* entries of one call */

/*
 * Positive: relief is under way; 0: the sequence has nothing to give; -EAGAIN: not all was tried.
 */
static int relieve(struct sequence *q, uint64_t need) {
        enum kvd_cool how = cool_means(q->space);
        uint64_t n = MIN(MIN(need, cool_most(q)), COOL_PIECE);

        if (!q->passed && is_on(q->space, KVD_memshare_on)) {
                q->passed = true;
                if (sequence_compare_all(q))
                        return 1;
        }
        if (!how || !n)
                return 0;
        if (priority_lacks_scores(q))
                job_ask(&q->scoring);
        if (job_pending(&q->scoring) || job_pending(&q->comparing))
                return 1; /* this is called again when these jobs have ended */
        return cool_some(q, n, how);
}

int relief_swap(struct sequence *q, uint32_t n) {
        enum kvd_cool how = cool_means(q->space);

        return how ? cool_some(q, n, how) : 0;
}

/* Does one piece for one sequence. */
static bool idle(struct space *space) {
        struct sequence *q;
        uint64_t need;
        int r;

        if (!is_on(space, KVD_pressure_on) || !sequences_of(space)->n ||
            !(is_on(space, KVD_kvreviver_on) || is_on(space, KVD_memshare_on)))
                return false;
        need = blocks_needed(space);
        q = need ? largest(space) : NULL;
        if (!q) {
                pressure_of(space)->starved = false;
                return false;
        }
        r = relieve(q, need);
        if (r == 0)
                q->spent = q->n_own;
        return r <= 0;
}

const struct hooks relief_hooks = {.idle = idle};
