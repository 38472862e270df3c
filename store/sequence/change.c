/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Changes of tables: offered by the daemon, taken or not by the client, at a point where nobody reads the table. Until
 * one is settled, the entry is as before, the block that it would bring is held, and the entry is busy. One that was
 * not taken leaves nothing behind.
 */

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "store/sequence/sequence.h"

static void move(shm_u32 *epoch) {
        atomic_fetch_add_explicit(epoch, 1, memory_order_release);
        syscall(SYS_futex, epoch, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void sync_news(struct space *space) {
        move(&space->ix->sync_epoch);
}

void job_news(struct space *space) {
        move(&space->ix->job_epoch);
}

void change_offer(struct sequence *q, uint32_t slot, const struct offer *offer) {
        struct entry *e = &q->entries[slot];

        if (offer->block)
                block_hold(q->space, kvd_ref_id(offer->block));
        e->busy = OFFERED;
        e->change = (uint8_t)offer->kind;
        e->other = offer->block;
        e->new_delta = offer->delta;
        e->new_flags = (uint16_t)offer->flags;
        e->new_slots = (uint16_t)offer->slots;
        e->distance = offer->distance;
        list_push(q, &q->changes, slot);
        space_count(q->space, KVD_SPACE_PROPOSED, 1);
}

void change_tell(struct sequence *q, uint32_t slot) {
        struct entry *e = &q->entries[slot];
        struct offer leave = {.kind = KVD_CHANGE_LEAVE, .flags = e->flags};

        if (!e->untold || e->busy != IDLE)
                return;
        e->untold = false;
        if (!e->ref)
                change_offer(q, slot, &leave);
}

/* ---- leaving the old state -------------------------------------------------------------------------------------- */

/* The entry's block is its own no longer. One of the prefix cache was never counted. */
static void drop_block(struct sequence *q, struct entry *e) {
        if (e->ref && q->space->blocks[kvd_ref_id(e->ref)].private && block_current(q->space, e->ref))
                block_ref_down(q->space, kvd_ref_id(e->ref));
        e->ref = 0;
}

/* The offered block becomes the entry's. */
static void take_block(struct sequence *q, struct entry *e) {
        uint32_t id = kvd_ref_id(e->other);

        if (q->space->blocks[id].private)
                block_ref_up(q->space, id);
        drop_block(q, e);
        e->ref = e->other;
        block_let_go(q->space, id);
        e->other = 0;
}

void change_drop_offer(struct sequence *q, struct entry *e) {
        if (e->other)
                block_let_go(q->space, kvd_ref_id(e->other));
        e->other = 0;
        e->busy = IDLE;
}

bool change_withdraw(struct sequence *q, uint32_t slot) {
        uint32_t before = NONE, at = q->changes.first;

        for (uint32_t i = 0; i < q->changes.n; i++) {
                if (at == slot)
                        break;
                if (i + 1 == q->changes.n)
                        return false;
                before = at;
                at = q->entries[at].next;
        }
        for (uint32_t i = 0, sent = q->changes.first; i < q->n_sent; i++, sent = q->entries[sent].next)
                if (sent == slot)
                        return false;
        *(before == NONE ? &q->changes.first : &q->entries[before].next) = q->entries[slot].next;
        if (q->changes.last == slot)
                q->changes.last = before;
        q->changes.n--;
        change_drop_offer(q, &q->entries[slot]);
        entry_set_leaving(q, &q->entries[slot], false);
        return true;
}

/* ---- taken ------------------------------------------------------------------------------------------------------ */

static void remap_taken(struct sequence *q, struct entry *e) {
        take_block(q, e);
        e->delta = e->new_delta;
        entry_set_flags(q, e, e->new_flags);
        entry_erase_copy(q, e); /* of what it was */
        space_count(q->space, KVD_SPACE_SHARED, 1);
}

static void leave_taken(struct sequence *q, struct entry *e) {
        struct space *space = q->space;

        if (e->ref) {
                space_count(space, KVD_SPACE_SPILLED, !!(e->new_flags & KVD_ENTRY_SPILLED));
                space_count(space, KVD_SPACE_VAGUE, !!(e->new_flags & KVD_ENTRY_VAGUE));
                space_count(space, KVD_SPACE_DROPPED, !!(e->new_flags & KVD_ENTRY_DROPPED));
                drop_block(q, e);
                entry_set_leaving(q, e, false);
                revive_again(q);
        }
        entry_set_flags(q, e, e->new_flags);
        if (!(e->new_flags & KVD_ENTRY_VAGUE))
                sketch_leave(q, e, false);
        if (!(e->new_flags & KVD_ENTRY_SPILLED))
                entry_erase_copy(q, e);
}

static void arrive_taken(struct sequence *q, uint32_t slot) {
        struct entry *e = &q->entries[slot];
        bool approx = e->new_flags & KVD_ENTRY_APPROX;

        take_block(q, e);
        e->delta = 0;
        entry_set_flags(q, e, e->new_flags);
        space_count(q->space, approx ? KVD_SPACE_REVIVED_APPROX : KVD_SPACE_REVIVED_EXACT, 1);
        if (!approx)
                entry_forget_sketch(q, slot);
}

/* What was known of the old contents is of no use; those that go are gone for good. */
static void compact_taken(struct sequence *q, struct entry *e) {
        if (e->other) {
                take_block(q, e);
                e->slots = e->new_slots;
                q->n_unscored++;
        } else {
                drop_block(q, e);
                space_count(q->space, KVD_SPACE_COMPACTED, 1);
        }
        e->delta = 0;
        entry_set_flags(q, e, e->new_flags);
        sketch_leave(q, e, false);
        entry_erase_copy(q, e);
}

/* ---- not taken -------------------------------------------------------------------------------------------------- */

/* The entry stays resident, and out of the sketch. */
static void leave_not_taken(struct sequence *q, uint32_t slot) {
        struct entry *e = &q->entries[slot];

        if (!e->ref) /* it has left already, and its state is what was offered */
                entry_set_flags(q, e, e->new_flags);
        else if (!(e->flags & KVD_ENTRY_APPROX))
                entry_forget_sketch(q, slot);
        entry_set_leaving(q, e, false);
        revive_again(q);
        q->spent = q->n_own; /* relief asks again when something has changed */
}

/* ---- settling --------------------------------------------------------------------------------------------------- */

/* An entry that arrived approximately, or did not take that, may still want its exact copy. */
static void want_the_rest(struct sequence *q, uint32_t slot) {
        struct entry *e = &q->entries[slot];

        if (e->busy != IDLE || !(e->want & KVD_REVIVE_EXACT) || e->place == KVD_NOWHERE)
                return;
        e->busy = REVIVE_WANTED;
        e->want = KVD_REVIVE_EXACT;
        list_push(q, &q->revive, slot);
        job_ask(&q->reviving);
}

static void settle(struct sequence *q, uint32_t slot, bool taken) {
        struct entry *e = &q->entries[slot];
        enum kvd_change_kind kind = e->change;

        e->busy = IDLE;
        space_count(q->space, KVD_SPACE_TAKEN, taken);
        if (kind == KVD_CHANGE_REMAP && taken)
                remap_taken(q, e);
        if (kind == KVD_CHANGE_LEAVE && taken)
                leave_taken(q, e);
        if (kind == KVD_CHANGE_COMPACT && taken)
                compact_taken(q, e);
        if (kind == KVD_CHANGE_LEAVE && !taken)
                leave_not_taken(q, slot);
        if (kind == KVD_CHANGE_ARRIVE && taken)
                arrive_taken(q, slot);
        if (e->other)
                block_let_go(q->space, kvd_ref_id(e->other));
        e->other = 0;
        if (kind == KVD_CHANGE_ARRIVE)
                want_the_rest(q, slot);
        change_tell(q, slot);
}

static struct kvd_change describe(const struct sequence *q, uint32_t slot) {
        const struct entry *e = &q->entries[slot];
        struct kvd_change c = {.slot = slot, .kind = e->change, .ref = e->other, .delta = e->new_delta,
                               .flags = e->new_flags, .row = NONE};

        if (e->change == KVD_CHANGE_COMPACT)
                c.n_tokens = e->new_slots;
        else
                c.distance = e->distance;

        /* Labels of what left, and of an approximation, are those of the exact copy. */
        if (e->place != KVD_NOWHERE && (e->change == KVD_CHANGE_LEAVE || (e->new_flags & KVD_ENTRY_APPROX))) {
                c.row = kvd_copy_row(q->space->ix, e->place);
                c.row_generation = e->row_generation;
        } else if (e->other) {
                c.row = kvd_ref_id(e->other);
                if (e->change == KVD_CHANGE_ARRIVE)
                        c.row_generation = kvd_ref_generation(e->other);
        }
        return c;
}

/* What is to be taken as a whole comes in one answer, which has room for one of any size. */
static bool fits(const struct entry *e, uint32_t n) {
        return e->change != KVD_CHANGE_COMPACT || n + (uint32_t)e->new_delta < KVD_SYNC_CHANGES;
}

int sequence_sync(struct attachment *a, uint32_t number, const uint32_t *taken, uint32_t n_taken,
                  struct kvd_change *ret) {
        struct sequence *q = sequence_find(a, number);
        uint32_t n = 0;

        if (!q)
                return -ENOENT;
        if (n_taken > q->n_sent)
                return store_refuse(space_store(a->space), -EINVAL, "sync in space '%s': %u changes are answered, %u "
                                    "were proposed", a->space->name, n_taken, q->n_sent);
        for (uint32_t i = 0; i < n_taken; i++)
                settle(q, list_pop(q, &q->changes), taken[i] == 1);
        for (uint32_t slot = q->changes.first; n < MIN(q->changes.n, KVD_SYNC_CHANGES); n++) {
                if (!fits(&q->entries[slot], n))
                        break;
                ret[n] = describe(q, slot);
                slot = q->entries[slot].next;
        }
        q->n_sent = n;
        return (int)n;
}
