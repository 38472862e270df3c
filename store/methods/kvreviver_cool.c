/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KVReviver removes blocks of sequences from the pool: a worker copies the block and puts its
 * tokens into the sketch, then the change is proposed to the client. Until the client takes it, the
 * block stays as it is. A block that was revived from a sketch is never copied or put into a sketch
 * again: the entry returns to its old sketch.
 */

#include <errno.h>

#include "store/account.h"
#include "store/below/carry.h"
#include "store/file/cold_copies.h"
#include "store/hooks.h"
#include "store/methods/methods.h"

/* Entries that wait to be revived may find room now. */
static void room_again(struct sequence *q) {
        if (q->revive.n)
                job_ask(&q->reviving);
}

/* ---- what the settings allow ----------------------------------------------------------------- */

uint64_t cool_recent_from(const struct sequence *q) {
        double recent = setting(q->space, KVD_kvreviver_recent) *
                        setting(q->space, KVD_kvreviver_budget) * q->n_tokens;

        return q->n_tokens - (uint64_t)MIN(recent, q->n_tokens);
}

enum kvd_cool cool_means(struct space *space) {
        bool vague = setting(space, KVD_kvreviver_vague) > 0;

        if (!is_on(space, KVD_kvreviver_on))
                return 0;
        if (is_on(space, KVD_kvreviver_spill) && copies_have_room(space))
                return KVD_COOL_SPILL;
        if (vague && !is_on(space, KVD_kvreviver_spill))
                return KVD_COOL_VAGUE;
        return is_on(space, KVD_kvreviver_drop) ? vague ? KVD_COOL_VAGUE : KVD_COOL_DROP : 0;
}

uint64_t cool_most(const struct sequence *q) {
        double parts = setting(q->space, KVD_kvreviver_recent) +
                       setting(q->space, KVD_kvreviver_candidate);
        double budget = setting(q->space, KVD_kvreviver_budget) * MIN(parts, 1) * q->n_entries;

        return q->n_own > budget + q->n_leaving ? (uint64_t)(q->n_own - budget - q->n_leaving) : 0;
}

/* ---- requests -------------------------------------------------------------------------------- */

static void offer_leave(struct sequence *q, uint32_t at, uint32_t how) {
        uint32_t kept = how & KVD_ENTRY_DROPPED ? 0 : q->entries[at].flags & KVD_ENTRY_COMPACT;
        struct offer offer = {.kind = KVD_CHANGE_LEAVE, .flags = KVD_ENTRY_OWN | kept | how};

        entry_set_leaving(q, &q->entries[at], true);
        change_offer(q, at, &offer);
}

/* A revived block still has its copy, or its tokens in the sketch: it can leave without a job. */
static bool leave_again(struct sequence *q, uint32_t at) {
        const struct entry *e = &q->entries[at];
        uint32_t how = (e->place != KVD_NOWHERE ? KVD_ENTRY_SPILLED : 0) |
                       (e->ordinal != KVD_NO_ORDINAL ? KVD_ENTRY_VAGUE : 0);

        if (!how)
                return false;
        offer_leave(q, at, how);
        return true;
}

/*
 * Entries that wait may need a sketch, which is made when they are copied. If there is memory for
 * it now, another copy must not take that.
 */
static bool leaves_sketch(struct sequence *q, uint64_t sketch) {
        return !sketch || !q->cool.n || !carry_spares(q->space, sketch) ||
               carry_spares(q->space, sketch + space_block_bytes(q->space));
}

/* Which does not change during a request. */
static uint64_t find_sketch(struct sequence *q, const struct entry *e, struct cool_room *room) {
        if (!room->looked)
                room->sketch = sketch_wanted(q, e->n_tokens);
        room->looked = true;
        return room->sketch;
}

/*
 * Reserves the place of the copy, if there is to be one, so that a request that was accepted does
 * not fail later. Memory is searched for only until some is missing.
 */
static bool take_room(struct sequence *q, struct entry *e, enum kvd_cool how,
                      struct cool_room *room) {
        bool spills = is_on(q->space, KVD_kvreviver_spill), vague = how == KVD_COOL_VAGUE;
        uint64_t sketch = vague ? find_sketch(q, e, room) : 0;

        if (!is_on(q->space, KVD_kvreviver_on) || (!spills && !vague))
                return false;
        if (spills && !room->missing && leaves_sketch(q, sketch))
                entry_place(q, e, copy_take(q->space));
        if (e->place != KVD_NOWHERE)
                return true;
        if (vague && (!spills || is_on(q->space, KVD_kvreviver_drop)) &&
            (!sketch || sketch_fits(q, sketch)))
                return true;
        room->missing = MAX(sketch, space_block_bytes(q->space));
        return false;
}

bool cool_entry(struct sequence *q, uint32_t at, enum kvd_cool how, struct cool_room *room) {
        struct entry *e = &q->entries[at];

        if (e->busy != IDLE || !entry_is_own(e) || block_of(q->space, kvd_ref_id(e->ref))->refs > 1)
                return false;
        if (how == KVD_COOL_DROP) {
                offer_leave(q, at, KVD_ENTRY_DROPPED);
                return true;
        }
        if (e->flags & KVD_ENTRY_APPROX)
                return leave_again(q, at);
        if (e->place != KVD_NOWHERE && is_on(q->space, KVD_kvreviver_on))
                return leave_again(q, at);
        if (e->flags & KVD_ENTRY_COMPACT) /* a packed block must not be approximated again */
                how = KVD_COOL_SPILL;
        if (!take_room(q, e, how, room))
                return false;
        e->busy = COOL_WANTED;
        e->want = (uint8_t)how;
        entry_set_leaving(q, e, true);
        list_push(q, &q->cool, at);
        job_ask(&q->cooling);
        return true;
}

int sequence_cool(struct attachment *a, uint32_t number, uint32_t how, const uint32_t *entries,
                  uint32_t n) {
        struct sequence *q = sequence_find(a, number);
        int r = q ? sequence_check_entries(a, q, how, entries, n) : -ENOENT;
        struct cool_room room = {0};
        uint32_t offered;
        int cooling = 0;

        if (r == 0)
                r = space_summary_fd(q->space, true); /* workers need it to copy blocks */
        if (r < 0)
                return r;
        offered = q->changes.n;
        for (uint32_t i = 0; i < n; i++)
                cooling += cool_entry(q, entries[i], how, &room);
        if (q->changes.n > offered)
                sync_news(q->space);
        return cooling || !room.missing ? cooling :
                                          account_refuse(q->space, KVD_COST_spill, room.missing);
}

/* ---- the copy -------------------------------------------------------------------------------- */

static void stay(struct sequence *q, struct entry *e) {
        e->busy = IDLE;
        entry_set_leaving(q, e, false);
        room_again(q);
}

/* The place is the job's until the worker has answered. */
static void add_spill(struct sequence *q, uint32_t at, struct sketch *s, struct job *job) {
        struct entry *e = &q->entries[at];
        struct kvd_job_item *item = job_add(job, e->ref, at);
        uint32_t place = e->place;

        if (s)
                sketch_enter(q, e, s);
        item->place = job->items[job->n_items - 1].place = place;
        e->summarised = block_of(q->space, kvd_ref_id(e->ref))->summarised;
        item->to_row = place == KVD_NOWHERE ? NONE : kvd_copy_row(space_index(q->space), place);
        item->ordinal = e->ordinal;
        item->position = (int32_t)e->position;
        item->n_tokens = e->slots;
        e->busy = COOLING;
        entry_place(q, e, KVD_NOWHERE);
}

/*
 * Writes one entry into the job. Returns false if it must wait for another job. *in_vain: no sketch
 * was found before; it is searched for only once per job.
 */
static bool write_one_spill(struct sequence *q, uint32_t at, bool *in_vain, struct job *job) {
        struct entry *e = &q->entries[at];
        struct sketch *s = NULL;

        if (e->want == KVD_COOL_VAGUE && q->sketches && q->sketches->broken)
                return false;
        if (e->want == KVD_COOL_VAGUE && !*in_vain) {
                s = sketch_for(q, e->n_tokens);
                *in_vain = !s;
        }
        if (s && job->sketch && job->sketch != s->number) {
                sketch_drop_unused(q, s);
                return false;
        }
        if (!s && e->place == KVD_NOWHERE) {
                stay(q, e);
                q->spent = q->n_own; /* or relief would ask again and again */
                return true;
        }
        if (s)
                job->sketch = s->number;
        add_spill(q, at, s, job);
        return true;
}

static bool write_spill(struct ticket *t, struct job *job) {
        struct sequence *q = t->owner;
        uint32_t room = sketch_blocks(q, job), at;
        bool in_vain = false;

        while (job->n_items < room && (at = list_pop(q, &q->cool)) != NONE)
                if (!write_one_spill(q, at, &in_vain, job)) {
                        list_push_first(q, &q->cool, at);
                        break;
                }
        /* if the sketch is broken, its REBUILD asks again (kvreviver_sketch.c) */
        if (q->cool.n && (job->n_items || !q->sketches || !q->sketches->broken))
                job_ask(t);
        return job->n_items > 0;
}

static void copied(struct sequence *q, const struct job_item *item,
                   const struct kvd_spilled *copy) {
        struct entry *e = &q->entries[item->at];
        uint32_t flags = (item->place != KVD_NOWHERE ? KVD_ENTRY_SPILLED : 0) |
                         (e->ordinal != KVD_NO_ORDINAL ? KVD_ENTRY_VAGUE : 0);

        entry_place(q, e, item->place);
        e->checksum = copy->checksum;
        e->row_generation = kvd_ref_generation(e->ref);
        offer_leave(q, item->at, flags);
}

/* The copy, if there is one, is useless. Tokens that got into the sketch stay there as noise. */
static void not_copied(struct job *job, struct sequence *q, const struct job_item *item) {
        if (item->place != KVD_NOWHERE)
                place_erase(job->space, item->place);
        if (!q)
                return;
        sketch_leave(q, &q->entries[item->at], false);
        stay(q, &q->entries[item->at]);
        q->spent = q->n_own;
}

/* The entries wait again, with the places that they had. */
static void again(struct sequence *q, const struct job *job) {
        for (uint32_t i = job->n_items; i-- > 0;) {
                struct entry *e = &q->entries[job->items[i].at];

                sketch_leave(q, e, false);
                entry_place(q, e, job->items[i].place);
                e->busy = COOL_WANTED;
                list_push_first(q, &q->cool, job->items[i].at);
        }
}

static void settle_spill(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct sequence *q = job->ticket ? job->ticket->owner : NULL;
        const struct kvd_spilled *copies = results;

        if (q && end != JOB_DONE && job->sketch)
                sketch_broken(q, sketch_find(q, job->sketch));
        if (q && end == JOB_AGAIN) {
                again(q, job);
                return;
        }
        for (uint32_t i = 0; i < job->n_items; i++)
                if (q && end == JOB_DONE && copies[i].error == 0)
                        copied(q, &job->items[i], &copies[i]);
                else
                        not_copied(job, q, &job->items[i]);
        if (q && end == JOB_DONE)
                sync_news(q->space);
}

static const struct job_kind job_spill = {.number = KVD_JOB_SPILL,
                                          .result_bytes = sizeof(struct kvd_spilled),
                                          .write = write_spill,
                                          .settle = settle_spill};

/* ---- the client's decision ------------------------------------------------------------------- */

static void taken(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];
        struct space *space = q->space;

        if (e->ref) {
                space_count(space, KVD_SPACE_SPILLED, !!(e->new_flags & KVD_ENTRY_SPILLED));
                space_count(space, KVD_SPACE_VAGUE, !!(e->new_flags & KVD_ENTRY_VAGUE));
                space_count(space, KVD_SPACE_DROPPED, !!(e->new_flags & KVD_ENTRY_DROPPED));
                entry_drop_block(q, e);
                entry_set_leaving(q, e, false);
                room_again(q);
        }
        entry_set_flags(q, e, e->new_flags);
        if (e->new_flags & KVD_ENTRY_SPILLED)
                copy_made(space);
        if (!(e->new_flags & KVD_ENTRY_VAGUE))
                sketch_leave(q, e, false);
        if (!(e->new_flags & KVD_ENTRY_SPILLED))
                entry_erase_copy(q, e);
}

/* The entry stays resident, and its tokens leave the sketch. */
static void not_taken(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];

        if (!e->ref) /* the block has left already, so the offered state applies */
                entry_set_flags(q, e, e->new_flags);
        else if (!(e->flags & KVD_ENTRY_APPROX))
                entry_forget_sketch(q, at);
        entry_set_leaving(q, e, false);
        room_again(q);
        q->spent = q->n_own; /* relief asks again after a change */
}

static void begin(struct sequence *q) {
        ticket_init(&q->cooling, &job_spill, q->space, q);
}

static bool pending(struct sequence *q) {
        return q->cool.n || job_pending(&q->cooling);
}

static void end(struct sequence *q) {
        job_withdraw(&q->cooling);
}

const struct hooks kvreviver_cool_hooks = {.sequence_begins = begin,
                                           .sequence_pending = pending,
                                           .sequence_ends = end,
                                           .change = KVD_CHANGE_LEAVE,
                                           .taken = taken,
                                           .not_taken = not_taken};
