/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemon offers changes of a sequence's table. The client takes or refuses each of them, at a
 * point where nothing reads the table. Until a change is settled, its entry is busy and otherwise
 * unchanged, and the block that it would bring is held. A refused change leaves no trace.
 */

#include <errno.h>

#include "store/hooks.h"
#include "store/sequence/sequence.h"

void change_offer(struct sequence *q, uint32_t at, const struct offer *offer) {
        struct entry *e = &q->entries[at];

        if (offer->block)
                block_hold(q->space, kvd_ref_id(offer->block));
        e->busy = OFFERED;
        e->sent = false;
        e->change = (uint8_t)offer->kind;
        e->other = offer->block;
        e->new_delta = offer->delta;
        e->new_flags = (uint16_t)offer->flags;
        e->new_slots = (uint16_t)offer->slots;
        e->distance = offer->distance;
        list_push(q, &q->changes, at);
        space_count(q->space, KVD_SPACE_PROPOSED, 1);
}

void change_tell(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];
        struct offer leave = {.kind = KVD_CHANGE_LEAVE, .flags = e->flags};

        if (!e->untold || e->busy != IDLE)
                return;
        e->untold = false;
        if (!e->ref)
                change_offer(q, at, &leave);
}

void change_drop_offer(struct sequence *q, struct entry *e) {
        if (e->other)
                block_let_go(q->space, kvd_ref_id(e->other));
        e->other = 0;
        e->busy = IDLE;
}

bool change_withdraw(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];

        if (e->busy != OFFERED || e->sent)
                return false;
        list_remove(q, &q->changes, at);
        change_drop_offer(q, e);
        entry_set_leaving(q, e, false);
        return true;
}

/* ---- settling -------------------------------------------------------------------------------- */

static void settle(struct sequence *q, uint32_t at, bool taken) {
        struct entry *e = &q->entries[at];
        const struct hooks *method = hooks_of_change(q->space, e->change);

        e->busy = IDLE;
        space_count(q->space, KVD_SPACE_TAKEN, taken);
        if (taken)
                method->taken(q, at);
        else if (method->not_taken)
                method->not_taken(q, at);
        if (e->other)
                block_let_go(q->space, kvd_ref_id(e->other));
        e->other = 0;
        change_tell(q, at);
}

static struct kvd_change describe(const struct sequence *q, uint32_t at) {
        const struct entry *e = &q->entries[at];
        struct kvd_change c = {.slot = at,
                               .kind = e->change,
                               .ref = e->other,
                               .delta = e->new_delta,
                               .flags = e->new_flags,
                               .row = NONE};

        if (e->change == KVD_CHANGE_COMPACT)
                c.n_tokens = e->new_slots;
        else
                c.distance = e->distance;

        /* An entry that leaves, or an approximation, has the labels of the exact copy. */
        if (e->place != KVD_NOWHERE &&
            (e->change == KVD_CHANGE_LEAVE || (e->new_flags & KVD_ENTRY_APPROX))) {
                c.row = kvd_copy_row(space_index(q->space), e->place);
                c.row_generation = e->row_generation;
        } else if (e->other) {
                c.row = kvd_ref_id(e->other);
                if (e->change == KVD_CHANGE_ARRIVE)
                        c.row_generation = kvd_ref_generation(e->other);
        }
        return c;
}

/* The client takes a compaction as a whole, so all of its changes are in one answer. */
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
                return store_refuse(
                        space_store(a->space), -EINVAL,
                        "sync in space '%s': the client answers %u changes, but only %u were proposed",
                        space_name(a->space), n_taken, q->n_sent);
        for (uint32_t i = 0; i < n_taken; i++)
                settle(q, list_pop(q, &q->changes), taken[i] == 1);
        for (uint32_t at = q->changes.first; n < MIN(q->changes.n, KVD_SYNC_CHANGES); n++) {
                if (!fits(&q->entries[at], n))
                        break;
                ret[n] = describe(q, at);
                q->entries[at].sent = true;
                at = q->entries[at].next;
        }
        q->n_sent = n;
        return (int)n;
}
