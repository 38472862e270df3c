/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The invariants of sequences, Q1 and following. Each entry is checked by itself. Whether two sets
 * are the same (for example the entries that name a block, and the references that the block
 * counts) is checked by sums of hashes (check_mixed): one set adds to a sum, and the other
 * subtracts. So a walk may stop anywhere, and nothing is allocated.
 */

#include <string.h>

#include "store/check/check.h"
#include "store/below/bring.h"
#include "store/file/file.h"
#include "store/methods/methods.h"

static bool names_private(const struct space *s, const struct entry *e) {
        return e->ref && !(e->flags & KVD_ENTRY_BORROWED) && block_current(s, e->ref) &&
               s->blocks[kvd_ref_id(e->ref)].private;
}

/* ---- private blocks -------------------------------------------------------------------------- */

static void check_descriptor(struct walk *w, uint32_t id) {
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

void check_private(struct walk *w, uint32_t id) {
        const struct block *b = block_of(w->space, id);

        if (b->private && b->state == KVD_SEALED)
                check_descriptor(w, id);
        expect(w, !b->reviving || (b->state == KVD_FILLING && b->owner == NONE),
               "Q6 block %u is being revived, but is not FILLING or has an owner", id);
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
               "Q9 entry %u of sequence %u names a block that is gone, or not private", at,
               q->number);
        expect(w,
               !(desc->flags & KVD_DESC_COMPACT) == !(e->flags & KVD_ENTRY_COMPACT) &&
                       desc->n_tokens == e->slots,
               "Q23 entry %u of sequence %u and its block disagree about packing or slots", at,
               q->number);
        expect(w,
               desc->depth == e->position &&
                       (e->flags & KVD_ENTRY_COMPACT || has_tokens_of(q, e, desc)),
               "Q10 entry %u of sequence %u has other tokens than its block", at, q->number);
        expect(w, !(desc->flags & KVD_DESC_APPROX) == !(e->flags & KVD_ENTRY_APPROX),
               "Q11 entry %u of sequence %u and its block disagree about approximation", at,
               q->number);
}

static void check_state_of(struct walk *w, struct sequence *q, uint32_t at) {
        const struct entry *e = &q->entries[at];
        const struct sketch *k = e->ordinal == KVD_NO_ORDINAL ? NULL : sketch_find(q, e->sketch);

        expect(w, !e->ref == !!(e->flags & GONE),
               "Q12 entry %u of sequence %u is neither resident nor gone, or both", at, q->number);
        expect(w,
               !(e->flags & KVD_ENTRY_DROPPED) ==
                       !!(e->ref || (e->flags & (KVD_ENTRY_SPILLED | KVD_ENTRY_VAGUE))),
               "Q12 entry %u of sequence %u is dropped and has a copy, or is lost and not dropped",
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

/* Do its neighbours among the entries of its sketch name it? */
static void check_neighbours(struct walk *w, struct sequence *q, uint32_t at) {
        const struct entry *e = &q->entries[at];
        const struct sketch *k = e->ordinal == KVD_NO_ORDINAL ? NULL : sketch_find(q, e->sketch);
        uint32_t next = e->sketch_next, before = e->sketch_prev;

        if (!k)
                return;
        expect(w,
               (before == NONE        ? k->first :
                before < q->n_entries ? q->entries[before].sketch_next :
                                        NONE) == at &&
                       (next == NONE ||
                        (next < q->n_entries && q->entries[next].sketch_prev == at)),
               "Q14 entry %u of sequence %u is not in its sketch's list", at, q->number);
}

/* The position at which the next entry begins, or the sequence ends. */
static uint32_t next_position(const struct sequence *q, uint32_t at) {
        return at + 1 < q->n_entries ? q->entries[at + 1].position : q->n_tokens;
}

/* The list in which entries of that state wait; NULL if in none. */
static const struct list *list_of(const struct sequence *q, enum entry_busy busy) {
        return busy == COOL_WANTED    ? &q->cool :
               busy == REVIVE_WANTED  ? &q->revive :
               busy == FORGET_WANTED  ? &q->forget :
               busy == COMPACT_WANTED ? &q->compact :
               busy == OFFERED        ? &q->changes :
                                        NULL;
}

/* A list must have exactly the entries of its state: its first one, and each one's next. */
static void count_listed(struct audit *audit, const struct sequence *q, uint32_t at) {
        const struct entry *e = &q->entries[at];
        const struct list *list = list_of(q, e->busy);

        audit->sequence.busy[e->busy]++;
        if (!list)
                return;
        audit->sequence.listed[e->busy] += check_mixed(at);
        if (at != list->last)
                audit->sequence.listed[e->busy] -= check_mixed(e->next);
}

static void count_copy(struct audit *audit, const struct entry *e) {
        if (e->place == KVD_NOWHERE)
                return;
        audit->places += check_mixed(e->place);
        audit->n_places++;
        audit->sequence.copies++;
}

static void count_entry(struct walk *w, const struct sequence *q, uint32_t at) {
        struct audit *audit = w->audit;
        const struct entry *e = &q->entries[at];

        count_listed(audit, q, at);
        count_copy(audit, e);
        audit->sequence.own += entry_is_own(e);
        audit->sequence.sketched += e->ordinal != KVD_NO_ORDINAL ? check_mixed(e->sketch) : 0;
        audit->shared += !!(e->flags & KVD_ENTRY_SHARED);
        audit->spilled += !!(e->flags & KVD_ENTRY_SPILLED);
        audit->vague += !!(e->flags & KVD_ENTRY_VAGUE);
        audit->leaving += e->leaving;
        audit->waiting += e->busy == COMPACT_WANTED && e->other;
        if (names_private(w->space, e))
                audit->refs -= check_mixed(kvd_ref_id(e->ref));
        if (e->busy == OFFERED && e->other)
                audit->holds -= check_mixed(kvd_ref_id(e->other));
}

static void check_entry(struct walk *w, struct sequence *q, uint32_t at) {
        const struct entry *e = &q->entries[at];

        count_entry(w, q, at);
        expect(w, e->position + e->n_tokens == next_position(q, at),
               "Q15 entry %u of sequence %u does not end where the next one begins", at, q->number);
        check_state_of(w, q, at);
        check_neighbours(w, q, at);
        if (e->ref)
                check_block_of(w, q, at);
}

/* ---- a sequence ------------------------------------------------------------------------------ */

static void begin_sequence(struct walk *w, const struct sequence *q) {
        memset(&w->audit->sequence, 0, sizeof w->audit->sequence);
        expect(w, q->n_sent <= q->changes.n, "Q17 sequence %u has sent more changes than it has",
               q->number);
}

static void check_lists(struct walk *w, const struct sequence *q) {
        const struct audit *audit = w->audit;

        for (uint32_t busy = 0; busy <= OFFERED; busy++) {
                const struct list *list = list_of(q, busy);

                if (list)
                        expect(w,
                               audit->sequence.busy[busy] == list->n &&
                                       audit->sequence.listed[busy] ==
                                               (list->n ? check_mixed(list->first) : 0),
                               "Q16 list %u of sequence %u is broken", busy, q->number);
        }
}

/* Number of its entries in a job in flight. */
static uint32_t in_job(const struct job *job, const struct sequence *q) {
        uint32_t n = 0;

        if (!job->ticket)
                return 0;
        if (job->ticket == &q->cooling || job->ticket == &q->reviving ||
            job->ticket == &q->forgetting)
                return job->n_items;
        for (uint32_t i = 0; job->ticket == &q->compacting && i < job->n_items; i++)
                n += job->items[i].flags == KVD_JOB_SOURCE;
        return n;
}

static uint32_t in_jobs(const struct space *s, const struct sequence *q) {
        uint32_t n = 0;

        for (const struct job *job = NULL; (job = job_in_flight(s, job));)
                n += in_job(job, q);
        return n;
}

static void end_sequence(struct walk *w, const struct sequence *q) {
        struct audit *audit = w->audit;
        const uint32_t *busy = audit->sequence.busy;
        uint64_t sketched = 0;

        if (!audit->whole)
                return;
        for (const struct sketch *k = q->sketches; k; k = k->next) {
                sketched += k->n_entries * check_mixed(k->number);
                audit->sketches++;
                audit->sketch_bytes += k->bytes;
        }
        expect(w, sketched == audit->sequence.sketched,
               "Q19 a sketch of sequence %u does not have the entries that it counts", q->number);
        expect(w,
               audit->sequence.own == q->n_own && audit->sequence.copies == q->n_copies &&
                       busy[FETCHING] == q->n_fetching,
               "Q15 entries of sequence %u are miscounted", q->number);
        check_lists(w, q);
        expect(w,
               busy[COOLING] + busy[REVIVING] + busy[FORGETTING] + busy[COMPACTING] ==
                       in_jobs(w->space, q),
               "Q18 entries of sequence %u wait for a job that is not there", q->number);
}

#define ENTRY_NS 300u
#define SKETCH_NS 5u

/* check_entry searches all of the sequence's sketches. */
static uint32_t entry_ns(const struct sequence *q) {
        uint32_t ns = ENTRY_NS;

        for (const struct sketch *k = q->sketches; k; k = k->next)
                ns += SKETCH_NS;
        return ns;
}

/* False: there is more. */
static bool walk_sequence(struct walk *w, struct sequence *q, uint32_t *at) {
        uint32_t ns = entry_ns(q);

        if (*at == 0)
                begin_sequence(w, q);
        for (w->spent += ns; *at < q->n_entries && check_may_go_on(w); w->spent += ns)
                check_entry(w, q, (*at)++);
        if (*at < q->n_entries)
                return false;
        end_sequence(w, q);
        return true;
}

/* *at has a sequence's seat in its upper half, and an entry of that sequence in its lower. */
bool check_sequences(struct walk *w, uint64_t *at) {
        uint32_t seat = (uint32_t)(*at >> 32), entry = (uint32_t)*at;

        while (seat < KVD_MAX_SEQUENCES && check_may_go_on(w)) {
                struct sequence *q = sequences_of(w->space)->at[seat];

                w->spent += 2;
                if (q && !walk_sequence(w, q, &entry))
                        break;
                seat++;
                entry = 0;
        }
        *at = seat * (UINT64_C(1) << 32) + entry;
        return seat >= KVD_MAX_SEQUENCES;
}

/* ---- places ---------------------------------------------------------------------------------- */

#define PLACE_NS 5u

static void count_carried(struct walk *w, uint32_t place) {
        w->audit->places += check_mixed(place);
        w->audit->n_places++;
}

/* A place that was erased during a transfer has no owner until the transfer ends. */
static void count_moved(struct walk *w, uint32_t place) {
        const struct place *p = place_moved(w->space, place);

        if (!p || p->state == PLACE_HERE)
                return;
        w->audit->moved++;
        w->audit->below += p->state == PLACE_BELOW || p->state == PLACE_WANTED;
        if (p->erased)
                count_carried(w, place);
}

/* Each slot that the space has in the file belongs to one place. */
static void check_moved(struct walk *w) {
        const struct file *file = space_store(w->space)->file;
        const struct audit *audit = w->audit;
        uint64_t slots = 0;

        if (file && file_space_of(w->space)->number >= 0)
                slots = file->catalog.spaces[file_space_of(w->space)->number].copy_bytes /
                        file_slot_bytes(space_block_bytes(w->space), 0);
        expect(w, audit->below == places_of(w->space)->n_below && audit->moved == slots,
               "Q25 a copy in a file has no place, or a place has no copy");
}

/*
 * A place before the end is on the stack of unused places, or belongs to an entry or a job. Places
 * behind the end are still at the bottom of the stack.
 */
static void count_place(struct walk *w, uint32_t place) {
        const struct places *p = places_of(w->space);
        uint32_t on_stack = p->n - p->end + place;

        w->audit->places -= check_mixed(place);
        w->audit->n_places--;
        count_moved(w, place);
        if (on_stack >= p->n_free)
                return;
        w->audit->places += check_mixed(place_free_at(w->space, on_stack));
        w->audit->n_places++;
}

bool check_places(struct walk *w, uint64_t *at) {
        uint32_t end = places_of(w->space)->end;

        for (; *at < end && check_may_go_on(w); ++*at) {
                w->spent += PLACE_NS;
                count_place(w, (uint32_t)*at);
        }
        return *at >= end;
}

/* ---- sums ------------------------------------------------------------------------------------ */

static void count_job(struct walk *w, const struct job *job) {
        struct audit *audit = w->audit;

        for (uint32_t i = 0; i < job->n_items; i++) {
                const struct job_item *item = &job->items[i];
                uint32_t id = kvd_ref_id(item->held);

                audit->holds -= item->held ? check_mixed(id) : 0;
                audit->waiting += item->held && block_of(w->space, id)->reviving;
                audit->places += item->place != KVD_NOWHERE ? check_mixed(item->place) : 0;
                audit->n_places += item->place != KVD_NOWHERE;
        }
}

static void count_moving(struct walk *w, kvd_ref block) {
        w->audit->holds -= check_mixed(kvd_ref_id(block));
        w->audit->waiting += block_of(w->space, kvd_ref_id(block))->reviving;
}

static void count_fetch(struct walk *w, const struct fetch *f) {
        if (f->space != w->space)
                return;
        w->audit->fetches++;
        w->audit->fetch_bytes += f->bytes;
        if (f->last)
                w->audit->holds -= check_mixed(kvd_ref_id(f->last));
}

/* Places of copies that are moving to or from a place below, and spare places of such moves. */
static void count_carry(struct walk *w, const struct carry *c) {
        if (!c || c->last != w->space)
                return;
        for (uint32_t i = 0; i < c->n; i++)
                if (!c->items[i].borrowed && c->items[i].place != KVD_NOWHERE)
                        count_carried(w, c->items[i].place);
        for (uint32_t i = 0; i < c->n_spare; i++)
                count_carried(w, c->spare[i]);
}

static void count_below(struct walk *w, const struct below *b) {
        for (uint32_t i = 0; b->space == w->space && i < b->n_blocks; i++)
                count_moving(w, b->blocks[i]);
        count_carry(w, b->carry);
        for (struct kvd_list_node *node = b->fetches.first; node; node = node->next)
                count_fetch(w, container_of(node, struct fetch, waiting));
}

static void count_sessions(struct walk *w) {
        const struct space *s = w->space;

        for (uint32_t i = 0; i < s->leaves.sessions.n_used; i++) {
                const struct session_chain *c = session_chain(s, i);

                if (c->block != NONE && chain_session(s, c)->keep == KVD_keep_pinned)
                        w->audit->holds -= check_mixed(c->block);
        }
        w->spent += s->leaves.sessions.n_used * 2;
}

/* Nothing is compared while a closed sequence still has references: idle work releases them. */
void check_sequence_sums(struct walk *w) {
        const struct space *s = w->space;
        const struct sequences *all = sequences_of(s);
        struct audit *audit = w->audit;

        if (all->closing) {
                audit->whole = false;
                return;
        }
        for (const struct job *job = NULL; (job = job_in_flight(s, job));)
                count_job(w, job);
        for (const struct below *b = space_store(s)->below; b; b = b->next)
                count_below(w, b);
        count_sessions(w);
        for (const struct sketch *k = sketches_of(s)->dead; k; k = k->next, audit->sketches++)
                audit->sketch_bytes += k->bytes;
        expect(w, audit->refs == 0, "Q2 references of blocks differ from entries that name them");
        expect(w, audit->holds == 0,
               "Q3 holds of blocks differ from jobs, offers, transfers and sessions");
        expect(w, audit->waiting == s->private.n_reviving,
               "Q24 a block that a worker was to fill is lost");
        expect(w, places_of(s)->spill_bytes == places_bytes(s) + audit->sketch_bytes,
               "Q20 memory of copies and sketches is miscounted");
        check_moved(w);
        expect(w, audit->places == 0 && audit->n_places == 0,
               "Q21 a place of the exact copies has no owner, or two");
        expect(w,
               audit->shared == all->n_shared && audit->spilled == all->n_spilled &&
                       audit->vague == all->n_vague && audit->leaving == all->n_leaving,
               "Q22 entries are miscounted");
}
