/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KVReviver brings blocks of sequences back: a worker fills a new block, which no client has seen
 * yet, from the exact copy or from the sketch; then the change is proposed to the client. If both
 * were requested, the approximation comes first and the exact block replaces it. An approximation
 * is marked as one as long as it exists. A copy with a wrong checksum is never used. A copy that is
 * in a file (file/cold_copies.c) is read into memory first.
 *
 * If there is no room, blocks are swapped: resident entries of the same sequence with the lowest
 * priority leave (at once, if they have a copy), and the revival waits until the client has
 * released them.
 */

#include <errno.h>

#include "store/file/cold_copies.h"
#include "store/hooks.h"
#include "store/methods/methods.h"
#include "store/summaries.h"

/* ---- requests -------------------------------------------------------------------------------- */

/* Returns the bits of `how` (enum kvd_revive) that are possible. */
static uint32_t can_revive(struct sequence *q, const struct entry *e, uint32_t how) {
        uint32_t can = 0;

        if (e->busy != IDLE || (e->ref && !(e->flags & KVD_ENTRY_APPROX)))
                return 0;
        if (e->place != KVD_NOWHERE)
                can |= how & KVD_REVIVE_EXACT;
        if (!e->ref && e->ordinal != KVD_NO_ORDINAL && sketch_answers(q, sketch_find(q, e->sketch)))
                can |= how & KVD_REVIVE_APPROX;
        return can;
}

int sequence_revive(struct attachment *a, uint32_t number, uint32_t how, const uint32_t *entries,
                    uint32_t n, uint32_t *exact, uint32_t *approx) {
        struct sequence *q = sequence_find(a, number);
        int r = q ? sequence_check_entries(a, q, how, entries, n) : -ENOENT;

        *exact = *approx = 0;
        if (r < 0)
                return r;
        for (uint32_t i = 0; i < n; i++) {
                struct entry *e = &q->entries[entries[i]];
                uint32_t want = can_revive(q, e, how);

                *exact += !!(want & KVD_REVIVE_EXACT);
                *approx += !!(want & KVD_REVIVE_APPROX);
                if (!want) {
                        space_count(a->space, KVD_SPACE_REVIVE_REFUSED, !e->ref && e->busy == IDLE);
                        continue;
                }
                e->busy = REVIVE_WANTED;
                e->want = (uint8_t)want;
                list_push(q, &q->revive, entries[i]);
                job_ask(&q->reviving);
        }
        if (n && how == KVD_REVIVE_APPROX && !*approx)
                return store_refuse(space_store(a->space), -ENODATA,
                                    "the sketch does not have these blocks, or its load is "
                                    "above kvreviver.max_load; revive exactly");
        return 0;
}

/* ---- the filling ----------------------------------------------------------------------------- */

static void add_revive(struct sequence *q, uint32_t at, kvd_ref to, bool approx, struct job *job) {
        struct entry *e = &q->entries[at];
        struct kvd_job_item *item = job_add(job, to, at);

        job->items[job->n_items - 1].flags = item->flags = approx ? KVD_ENTRY_APPROX : 0;
        item->row = e->place == KVD_NOWHERE || approx ?
                            NONE :
                            kvd_copy_row(space_index(q->space), e->place);
        item->to_row = kvd_ref_id(to);
        item->place = approx ? NONE : e->place;
        item->checksum = approx ? 0 : e->checksum;
        item->ordinal = approx ? e->ordinal : KVD_NO_ORDINAL;
        item->position = (int32_t)e->position;
        item->n_tokens = e->slots;
        e->busy = REVIVING;
        e->want &= (uint8_t) ~(approx ? KVD_REVIVE_APPROX : KVD_REVIVE_EXACT);
}

/*
 * Makes entries leave for those that wait to be revived, once. Positive: entries are leaving; 0:
 * none can leave; -EAGAIN: call again.
 */
static int make_way(struct sequence *q) {
        int r;

        if (q->n_leaving || q->swapped)
                return q->n_leaving > 0;
        r = relief_swap(q, q->revive.n + 1);
        q->swapped = r != -EAGAIN;
        return r;
}

#define REVIVE_BLOCKS 64u /* blocks of one job: the client waits for the first ones */
#define ROOM_LOOKS 4096u  /* cost of a failed search for room, in items of jobs */

/* OTHER_JOB: needs a later job, because the search for room was cut short, or for another sketch */
enum written { WRITTEN, OTHER_JOB, NO_ROOM };

/* later: the search for room was cut short */
static enum written no_room(struct sequence *q, uint32_t at, bool later, struct job *job) {
        int way = later ? -EAGAIN : make_way(q);

        if (way < 0) {
                job->looks += ROOM_LOOKS;
                return OTHER_JOB;
        }
        if (way > 0)
                return NO_ROOM;
        revival_refused(q, at);
        return WRITTEN;
}

/* Reads the entry's copy from a file; as many at a time as one job can revive. */
static enum written fetch_copy(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];
        struct copy_owner owner = {.place = e->place, .sequence = q->number, .entry = at};
        int r;

        if (q->n_fetching == REVIVE_BLOCKS)
                return NO_ROOM;
        r = copy_wanted(q->space, &owner);
        if (r == -EIO)
                copy_broken(q, at);
        else if (r < 0)
                revival_refused(q, at);
        if (r < 0)
                return WRITTEN;
        e->busy = FETCHING;
        q->n_fetching++;
        return WRITTEN;
}

/* Writes one entry into the job: its approximation first, if that is wanted and still possible. */
static enum written write_one_revive(struct sequence *q, uint32_t at, uint32_t *reads,
                                     struct job *job) {
        struct entry *e = &q->entries[at];
        struct sketch *s = e->ordinal == KVD_NO_ORDINAL ? NULL : sketch_find(q, e->sketch);
        bool approx = (e->want & KVD_REVIVE_APPROX) && s && sketch_answers(q, s);
        kvd_ref to;

        if (!approx && (!(e->want & KVD_REVIVE_EXACT) || e->place == KVD_NOWHERE)) {
                revival_refused(q, at);
                return WRITTEN;
        }
        if (approx && job->sketch && job->sketch != s->number)
                return OTHER_JOB;
        if (!approx && !place_is_here(q->space, e->place))
                return fetch_copy(q, at);
        to = room_take(q->space, q->attachment->arena, reads);
        if (!to)
                return no_room(q, at, !*reads, job);
        if (approx)
                job->sketch = s->number;
        else
                e->want &= (uint8_t)~KVD_REVIVE_APPROX;
        add_revive(q, at, to, approx, job);
        return WRITTEN;
}

static bool write_revive(struct ticket *t, struct job *job) {
        struct sequence *q = t->owner;
        uint32_t room = MIN(sketch_blocks(q, job), REVIVE_BLOCKS), reads = KVD_PIN_READS, at;
        enum written how = WRITTEN;

        while (how == WRITTEN && job->n_items < room && (at = list_pop(q, &q->revive)) != NONE) {
                how = write_one_revive(q, at, &reads, job);
                if (how != WRITTEN)
                        list_push_first(q, &q->revive, at);
        }
        q->swapped &= q->revive.n > 0;
        /* entries that wait for room are tried again when an entry has left */
        if (q->revive.n && how != NO_ROOM)
                job_ask(t);
        return job->n_items > 0;
}

static void arrived(struct sequence *q, const struct job_item *item) {
        struct entry *e = &q->entries[item->at];
        bool approx = item->flags & KVD_ENTRY_APPROX;
        struct offer offer = {.kind = KVD_CHANGE_ARRIVE,
                              .block = item->held,
                              .flags = KVD_ENTRY_OWN | (e->flags & KVD_ENTRY_COMPACT)};

        offer.flags |= approx ? KVD_ENTRY_APPROX : 0;
        if (e->flags & KVD_ENTRY_COMPACT)
                entry_seal(q, item->held, item->at, e->slots, KVD_DESC_COMPACT);
        else
                entry_seal(q, item->held, item->at, e->n_tokens, approx ? KVD_DESC_APPROX : 0);
        change_offer(q, item->at, &offer);
        q->space->blocks[kvd_ref_id(item->held)].summarised = !approx && e->summarised;
        if (approx ? e->place == KVD_NOWHERE : !e->summarised)
                summary_want(q->space, kvd_ref_id(item->held));
}

static void not_arrived(struct sequence *q, const struct job_item *item, uint32_t error) {
        struct entry *e = &q->entries[item->at];
        bool approx = item->flags & KVD_ENTRY_APPROX;

        if (!approx && (error == EBADMSG || error == EILSEQ)) {
                copy_broken(q, item->at);
        } else if (approx && (e->want & KVD_REVIVE_EXACT)) {
                e->busy = REVIVE_WANTED;
                list_push(q, &q->revive, item->at);
                job_ask(&q->reviving);
        } else {
                revival_refused(q, item->at);
        }
}

static void want_again(struct sequence *q, const struct job *job) {
        for (uint32_t i = job->n_items; i-- > 0;) {
                const struct job_item *item = &job->items[i];
                struct entry *e = &q->entries[item->at];

                e->busy = REVIVE_WANTED;
                e->want |= item->flags & KVD_ENTRY_APPROX ? KVD_REVIVE_APPROX : KVD_REVIVE_EXACT;
                list_push_first(q, &q->revive, item->at);
        }
}

static void settle_revive(struct job *job, enum job_end end, const void *results, uint32_t n) {
        struct sequence *q = job->ticket ? job->ticket->owner : NULL;
        const uint32_t *error = results;

        for (uint32_t i = 0; i < job->n_items; i++) {
                const struct job_item *item = &job->items[i];

                if (q && end == JOB_DONE && error[i] == 0) {
                        arrived(q, item);
                        continue;
                }
                block_discard(job->space, kvd_ref_id(item->held));
                if (q && end != JOB_AGAIN)
                        not_arrived(q, item, end == JOB_DONE ? error[i] : EIO);
        }
        if (q && end == JOB_AGAIN)
                want_again(q, job);
        if (q && q->changes.n)
                sync_news(q->space);
}

static const struct job_kind job_revive = {.number = KVD_JOB_REVIVE,
                                           .result_bytes = sizeof(uint32_t),
                                           .urgent = true,
                                           .write = write_revive,
                                           .settle = settle_revive};

/* ---- the client's decision ------------------------------------------------------------------- */

/* Whether the client took the approximation or not, the exact block may still be wanted. */
static void want_the_rest(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];

        if (e->busy != IDLE || !(e->want & KVD_REVIVE_EXACT) || e->place == KVD_NOWHERE)
                return;
        e->busy = REVIVE_WANTED;
        e->want = KVD_REVIVE_EXACT;
        list_push(q, &q->revive, at);
        job_ask(&q->reviving);
}

static void taken(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];
        bool approx = e->new_flags & KVD_ENTRY_APPROX;

        entry_take_block(q, e);
        entry_set_flags(q, e, e->new_flags);
        space_count(q->space, approx ? KVD_SPACE_REVIVED_APPROX : KVD_SPACE_REVIVED_EXACT, 1);
        if (!approx)
                entry_forget_sketch(q, at);
        if (!approx)
                copy_made(q->space);
        want_the_rest(q, at);
}

static void begin(struct sequence *q) {
        ticket_init(&q->reviving, &job_revive, q->space, q);
}

static bool pending(struct sequence *q) {
        return q->revive.n || q->n_fetching || job_pending(&q->reviving);
}

static void end(struct sequence *q) {
        job_withdraw(&q->reviving);
}

const struct hooks kvreviver_revive_hooks = {.sequence_begins = begin,
                                             .sequence_pending = pending,
                                             .sequence_ends = end,
                                             .change = KVD_CHANGE_ARRIVE,
                                             .taken = taken,
                                             .not_taken = want_the_rest};
