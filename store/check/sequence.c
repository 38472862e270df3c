/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The invariants of sequences, Q1 and following, are checked in one go, as sums over all entries of
 * all of a space's sequences. Counts of references and holds are taken down by what was found,
 * compared with 0, and put up again: so each block's is compared, and nothing is allocated.
 */

#include <string.h>

#include "store/check/check.h"
#include "store/methods/methods.h"

static void each_sequence(struct walk *w, void (*look)(struct walk *, struct sequence *)) {
        for (uint32_t i = 0; i < KVD_MAX_SEQUENCES; i++)
                if (sequences_of(w->space)->at[i])
                        look(w, sequences_of(w->space)->at[i]);
        for (struct sequence *q = sequences_of(w->space)->closing; q; q = q->next)
                look(w, q);
}

static bool names_private(const struct space *s, const struct entry *e) {
        return e->ref && !(e->flags & KVD_ENTRY_BORROWED) && block_current(s, e->ref) &&
               s->blocks[kvd_ref_id(e->ref)].private;
}

/* Returns the job in flight, if it is this space's. */
static const struct job *job_of(const struct space *s) {
        const struct job *job = space_store(s)->jobs.job;

        return job->id && job->space == s ? job : NULL;
}

/* ---- references and holds -------------------------------------------------------------------- */

static void refs_down(struct walk *w, struct sequence *q) {
        for (uint32_t i = 0; i < q->n_entries; i++)
                if (names_private(w->space, &q->entries[i]))
                        w->space->blocks[kvd_ref_id(q->entries[i].ref)].refs--;
}

static void refs_up(struct walk *w, struct sequence *q) {
        for (uint32_t i = 0; i < q->n_entries; i++)
                if (names_private(w->space, &q->entries[i]))
                        w->space->blocks[kvd_ref_id(q->entries[i].ref)].refs++;
}

static void add_holds(struct walk *w, struct sequence *q, uint32_t n) {
        for (uint32_t i = 0; i < q->n_entries; i++)
                if (q->entries[i].busy == OFFERED && q->entries[i].other)
                        w->space->blocks[kvd_ref_id(q->entries[i].other)].holds += n;
}

static void holds_down(struct walk *w, struct sequence *q) {
        add_holds(w, q, UINT32_MAX);
}

static void holds_up(struct walk *w, struct sequence *q) {
        add_holds(w, q, 1);
}

static void add_job_holds(struct walk *w, uint32_t n) {
        const struct job *job = job_of(w->space);

        for (uint32_t i = 0; job && i < job->n_items; i++)
                if (job->items[i].held)
                        w->space->blocks[kvd_ref_id(job->items[i].held)].holds += n;
}

static void check_refs(struct walk *w) {
        struct space *s = w->space;

        each_sequence(w, refs_down);
        for (uint32_t i = 0; i < s->ix->capacity; i++)
                expect(w, s->blocks[i].refs == 0,
                       "Q2 block %u has not as many references as entries name it", i);
        each_sequence(w, refs_up);
        each_sequence(w, holds_down);
        add_job_holds(w, UINT32_MAX);
        for (uint32_t i = 0; i < s->ix->capacity; i++)
                expect(w, s->blocks[i].holds == 0,
                       "Q3 block %u is not held by as many jobs and offers as it says", i);
        add_job_holds(w, 1);
        each_sequence(w, holds_up);
}

/* ---- private blocks -------------------------------------------------------------------------- */

static void check_private(struct walk *w, uint32_t id) {
        const struct space *s = w->space;
        const struct block *b = &s->blocks[id];
        const struct kvd_desc *desc = kvd_index_desc(s->ix, id);

        expect(w,
               !b->indexed && !b->run && b->parent == NONE && b->child == NONE &&
                       desc->parent == KVD_ROOT && desc->key.lo == 0 && desc->key.hi == 0,
               "Q4 private block %u is in a table or a chain", id);
        expect(w,
               desc->flags & KVD_DESC_PRIVATE && desc->n_tokens >= 1 &&
                       desc->n_tokens <= s->ix->geometry.block_tokens,
               "Q5 private block %u has a wrong descriptor", id);
}

static void check_garbage(struct walk *w) {
        const struct space *s = w->space;
        uint64_t n_private = 0, n_garbage = 0, n_reviving = 0, listed = 0;
        uint32_t before = NONE;

        for (uint32_t i = 0; i < s->ix->capacity; i++) {
                const struct block *b = &s->blocks[i];

                n_private += b->private;
                n_garbage += block_is_garbage(b);
                n_reviving += b->reviving;
                if (b->private && b->state == KVD_SEALED)
                        check_private(w, i);
                expect(w, !b->reviving || (b->state == KVD_FILLING && b->owner == NONE),
                       "Q6 block %u is being revived and somebody's", i);
        }
        for (uint32_t id = block_list_first(&s->private.garbage);
             listed < s->private.garbage.n && id != NONE; id = s->blocks[id].next, listed++) {
                expect(w, block_is_garbage(&s->blocks[id]) && s->blocks[id].prev == before,
                       "Q7 block %u is in the list of garbage wrongly", id);
                before = id;
        }
        expect(w, listed == s->private.garbage.n && n_garbage == s->private.garbage.n,
               "Q7 garbage is lost");
        expect(w, n_private == s->private.n && n_reviving == s->private.n_reviving,
               "Q8 private blocks are miscounted");
}

/* Every block that waits to be filled is one that a job has, or a compaction that waits. */
static void count_waiting(struct walk *w, struct sequence *q) {
        for (uint32_t i = 0; i < q->n_entries; i++)
                w->waiting += q->entries[i].busy == COMPACT_WANTED && q->entries[i].other;
}

static void check_reviving(struct walk *w) {
        const struct job *job = job_of(w->space);

        w->waiting = 0;
        each_sequence(w, count_waiting);
        for (uint32_t i = 0; job && i < job->n_items; i++)
                w->waiting += job->items[i].held &&
                              w->space->blocks[kvd_ref_id(job->items[i].held)].reviving;
        expect(w, w->waiting == w->space->private.n_reviving,
               "Q24 a block that a worker was to fill is lost");
}

/* ---- entries --------------------------------------------------------------------------------- */

#define GONE (KVD_ENTRY_SPILLED | KVD_ENTRY_VAGUE | KVD_ENTRY_DROPPED)

static bool has_tokens_of(const struct sequence *q, const struct entry *e,
                          const struct kvd_desc *desc) {
        return e->slots == e->n_tokens &&
               memcmp(desc->tokens, q->tokens + e->position, e->n_tokens * sizeof *q->tokens) == 0;
}

static void check_block_of(struct walk *w, const struct sequence *q, uint32_t at) {
        const struct space *s = w->space;
        const struct entry *e = &q->entries[at];
        const struct kvd_desc *desc = kvd_index_desc(s->ix, kvd_ref_id(e->ref));

        if (!entry_is_own(e))
                return;
        expect(w, names_private(s, e),
               "Q9 entry %u of sequence %u names a block that is gone, or everybody's", at,
               q->number);
        expect(w,
               !(desc->flags & KVD_DESC_COMPACT) == !(e->flags & KVD_ENTRY_COMPACT) &&
                       desc->n_tokens == e->slots,
               "Q23 entry %u of sequence %u has a packed block and does not know, or the other way "
               "round",
               at, q->number);
        expect(w,
               desc->depth == e->position &&
                       (e->flags & KVD_ENTRY_COMPACT || has_tokens_of(q, e, desc)),
               "Q10 entry %u of sequence %u has other tokens than its block", at, q->number);
        expect(w, !(desc->flags & KVD_DESC_APPROX) == !(e->flags & KVD_ENTRY_APPROX),
               "Q11 entry %u of sequence %u passes an approximation for exact", at, q->number);
}

static void check_state_of(struct walk *w, struct sequence *q, uint32_t at) {
        const struct entry *e = &q->entries[at];
        const struct sketch *k = e->ordinal == KVD_NO_ORDINAL ? NULL : sketch_find(q, e->sketch);

        expect(w, !e->ref == !!(e->flags & GONE),
               "Q12 entry %u of sequence %u is neither here nor gone, or both", at, q->number);
        expect(w,
               !(e->flags & KVD_ENTRY_DROPPED) ==
                       !!(e->ref || (e->flags & (KVD_ENTRY_SPILLED | KVD_ENTRY_VAGUE))),
               "Q12 entry %u of sequence %u is dropped and has a copy, or is lost without a word",
               at, q->number);
        expect(w, !(e->flags & KVD_ENTRY_SPILLED) || e->place != KVD_NOWHERE,
               "Q13 entry %u of sequence %u is spilled to nowhere", at, q->number);
        expect(w, !(e->flags & KVD_ENTRY_VAGUE) || e->ordinal != KVD_NO_ORDINAL,
               "Q14 entry %u of sequence %u is vague and in no sketch", at, q->number);
        expect(w,
               !(e->flags & KVD_ENTRY_COMPACT) ||
                       (e->ordinal == KVD_NO_ORDINAL && !(e->flags & KVD_ENTRY_DROPPED)),
               "Q14 entry %u of sequence %u is packed, and in a sketch or dropped", at, q->number);
        expect(w,
               e->ordinal == KVD_NO_ORDINAL ||
                       (k && (uint64_t)e->ordinal + e->n_tokens <= k->n_ordinals),
               "Q14 entry %u of sequence %u has ordinals that its sketch did not give", at,
               q->number);
}

static void check_entries(struct walk *w, struct sequence *q) {
        uint32_t own = 0, copies = 0, at = 0;

        if (!q->attachment) /* its blocks are being let go of */
                return;
        for (uint32_t i = 0; i < q->n_entries; i++) {
                const struct entry *e = &q->entries[i];

                expect(w, e->position == at, "Q15 entry %u of sequence %u is at another place", i,
                       q->number);
                at += e->n_tokens;
                own += entry_is_own(e);
                copies += e->place != KVD_NOWHERE;
                check_state_of(w, q, i);
                if (e->ref)
                        check_block_of(w, q, i);
        }
        expect(w, at == q->n_tokens && own == q->n_own && copies == q->n_copies,
               "Q15 sequence %u miscounts", q->number);
}

/* ---- lists ----------------------------------------------------------------------------------- */

static void check_list(struct walk *w, const struct sequence *q, const struct list *list,
                       enum entry_busy busy) {
        uint32_t n = 0, all = 0;

        for (uint32_t at = list->first; n < list->n && at != NONE; at = q->entries[at].next, n++)
                expect(w, q->entries[at].busy == busy,
                       "Q16 entry %u of sequence %u is in the wrong list", at, q->number);
        for (uint32_t i = 0; i < q->n_entries; i++)
                all += q->entries[i].busy == busy;
        expect(w, n == list->n && all == n, "Q16 list %u of sequence %u is broken", busy,
               q->number);
}

static void check_lists_of(struct walk *w, struct sequence *q) {
        const struct job *job = job_of(w->space);
        uint32_t busy = 0, in_job = 0;

        if (!q->attachment)
                return;
        check_list(w, q, &q->cool, COOL_WANTED);
        check_list(w, q, &q->revive, REVIVE_WANTED);
        check_list(w, q, &q->forget, FORGET_WANTED);
        check_list(w, q, &q->compact, COMPACT_WANTED);
        check_list(w, q, &q->changes, OFFERED);
        expect(w, q->n_sent <= q->changes.n, "Q17 sequence %u has sent more than it has to offer",
               q->number);
        for (uint32_t i = 0; i < q->n_entries; i++) {
                enum entry_busy b = q->entries[i].busy;

                busy += b == COOLING || b == REVIVING || b == FORGETTING || b == COMPACTING;
        }
        if (job && job->ticket && (job->ticket == &q->cooling || job->ticket == &q->reviving ||
                                   job->ticket == &q->forgetting))
                in_job = job->n_items;
        if (job && job->ticket == &q->compacting)
                for (uint32_t i = 0; i < job->n_items; i++)
                        in_job += job->items[i].flags == KVD_JOB_SOURCE;
        expect(w, busy == in_job, "Q18 entries of sequence %u wait for a job that is not there",
               q->number);
}

/* ---- copies and sketches --------------------------------------------------------------------- */

static uint64_t mixed(uint64_t place) {
        place = (place + 1) * UINT64_C(0x9e3779b97f4a7c15);
        return (place ^ place >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
}

struct sums {
        uint64_t places, n_places, shared, spilled, vague, leaving, sketch_bytes;
};
static struct sums sums; /* of one check; one thread */

static void add_up(struct walk *w, struct sequence *q) {
        for (uint32_t i = 0; i < q->n_entries; i++) {
                const struct entry *e = &q->entries[i];

                sums.places += e->place != KVD_NOWHERE ? mixed(e->place) : 0;
                sums.n_places += e->place != KVD_NOWHERE;
                sums.shared += !!(e->flags & KVD_ENTRY_SHARED);
                sums.spilled += !!(e->flags & KVD_ENTRY_SPILLED);
                sums.vague += !!(e->flags & KVD_ENTRY_VAGUE);
                sums.leaving += e->leaving;
        }
        for (const struct sketch *k = q->sketches; k; k = k->next) {
                uint32_t n = 0;

                sums.sketch_bytes += k->bytes;
                for (uint32_t i = 0; i < q->n_entries; i++)
                        n += q->entries[i].ordinal != KVD_NO_ORDINAL &&
                             q->entries[i].sketch == k->number;
                expect(w, !q->attachment || n == k->n_entries,
                       "Q19 sketch %u does not have the entries that it counts", k->number);
        }
}

/* Every place is an entry's, the job's, or unused. */
static void check_places(struct walk *w) {
        const struct space *s = w->space;
        uint64_t all = 0;

        for (uint32_t t = 0; t < KVD_N_TIERS; t++)
                for (uint32_t i = 0; i < tiers_of(s)->places[t].n_free; i++, sums.n_places++)
                        sums.places += mixed(place_free_at(s, t, i));
        for (uint32_t i = 0; i < kvd_places(s->ix); i++)
                all += mixed(i);
        expect(w, sums.places == all && sums.n_places == kvd_places(s->ix),
               "Q21 a place of the exact copies is nobody's, or two entries'");
}

static void check_sums(struct walk *w) {
        const struct space *s = w->space;
        const struct job *job = job_of(s);

        sums = (struct sums){0};
        each_sequence(w, add_up);
        for (const struct sketch *k = sketches_of(s)->dead; k; k = k->next)
                sums.sketch_bytes += k->bytes;
        for (uint32_t i = 0; job && i < job->n_items; i++)
                if (job->items[i].place != KVD_NOWHERE) {
                        sums.places += mixed(job->items[i].place);
                        sums.n_places++;
                }
        expect(w,
               tiers_of(s)->spill_bytes ==
                       places_used(s, KVD_TIER_memory) * s->ix->block_bytes + sums.sketch_bytes,
               "Q20 memory of copies and sketches is miscounted");
        check_places(w);
        expect(w,
               sums.shared == sequences_of(s)->n_shared &&
                       sums.spilled == sequences_of(s)->n_spilled &&
                       sums.vague == sequences_of(s)->n_vague &&
                       sums.leaving == sequences_of(s)->n_leaving,
               "Q22 entries are miscounted");
}

void check_sequences(struct walk *w) {
        check_refs(w);
        check_garbage(w);
        check_reviving(w);
        each_sequence(w, check_entries);
        each_sequence(w, check_lists_of);
        check_sums(w);
}
