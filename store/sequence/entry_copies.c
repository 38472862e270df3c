/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Manages the exact copies of entries. An entry that is resident again keeps its copy, so that it
 * may leave again at once. Such copies are clean, and are freed when other copies need the room.
 * When memory for copies is short, copies of entries that have left go to a file, if there is one.
 * This file chooses them, and sees them come back when they are to be revived.
 */

#include <errno.h>

#include "store/below/carry.h"
#include "store/sequence/sequence.h"

void entry_place(struct sequence *q, struct entry *e, uint32_t place) {
        q->n_copies += (place != KVD_NOWHERE) - (e->place != KVD_NOWHERE);
        e->place = place;
}

void entry_erase_copy(struct sequence *q, struct entry *e) {
        if (e->place == KVD_NOWHERE)
                return;
        place_erase(q->space, e->place);
        entry_place(q, e, KVD_NOWHERE);
}

static bool is_clean(const struct entry *e) {
        return e->ref && e->place != KVD_NOWHERE && e->busy == IDLE &&
               !(e->flags & KVD_ENTRY_APPROX);
}

#define RECLAIM_LOOKS 8192u /* entries looked at in one call: about half a millisecond */
#define RECLAIM_COPIES 64u
#define RECLAIM_BYTES 256u   /* freeing so many bytes takes as long as looking at one entry */
#define RECLAIM_SPACES 1024u /* spaces looked at in one call */

/*
 * Frees clean copies, a bounded number per call, and continues where the last call stopped. A whole
 * round that finds none clears has_clean, until copies_clean sets it again.
 */
static uint32_t reclaim(struct space *space) {
        uint32_t each = (uint32_t)MIN(space_block_bytes(space) / RECLAIM_BYTES, RECLAIM_LOOKS);
        uint32_t given = 0, looks;

        for (looks = 0; looks < RECLAIM_LOOKS && given < RECLAIM_COPIES; looks++) {
                struct sequence *q = sequences_of(space)->at[sequences_of(space)->clean_sequence %
                                                             KVD_MAX_SEQUENCES];

                if (!q || sequences_of(space)->clean_entry >= q->n_entries) {
                        sequences_of(space)->clean_sequence++;
                        sequences_of(space)->clean_entry = 0;
                        continue;
                }
                if (is_clean(&q->entries[sequences_of(space)->clean_entry])) {
                        entry_erase_copy(q, &q->entries[sequences_of(space)->clean_entry]);
                        given++;
                        looks += each;
                }
                sequences_of(space)->clean_entry++;
        }
        sequences_of(space)->clean_looks = given ? 0 : sequences_of(space)->clean_looks + looks;
        if (sequences_of(space)->clean_looks > sequences_of(space)->n_entries + KVD_MAX_SEQUENCES)
                sequences_of(space)->has_clean = false;
        return looks;
}

void copies_clean(struct space *space) {
        sequences_of(space)->has_clean = true;
        sequences_of(space)->clean_looks = 0;
}

/*
 * Frees clean copies of the space first, and then of the others, since all of them share the memory
 * for copies. A call does a piece of a round through the spaces: a caller that finds no room may
 * find some when it asks again.
 */
bool copies_have_room(struct space *space) {
        struct space_lists *lists = &space_store(space)->spaces;
        uint32_t looks = 0, most = MIN(RECLAIM_SPACES, lists->all.n + 1);

        if (carry_spares_place(space))
                return true;
        if (sequences_of(space)->has_clean)
                looks = reclaim(space);
        for (uint32_t i = 0; i < most && looks < RECLAIM_LOOKS && places_free(space); i++) {
                struct space *s = roll_from(&lists->all, lists->copies);

                if (carry_spares_place(space))
                        return true;
                lists->copies = s ? s->number + 1 : 0;
                if (s && s != space && sequences_of(s)->has_clean)
                        looks += reclaim(s);
        }
        return carry_spares_place(space);
}

uint32_t copy_take(struct space *space) {
        return copies_have_room(space) ? place_take(space) : KVD_NOWHERE;
}

/* ---- those that may go to a file ------------------------------------------------------------- */

/* Is the copy needed only to revive the entry? Rebuilding a sketch reads copies in memory. */
static bool is_cold(const struct sequence *q, const struct entry *e) {
        return !e->ref && e->place != KVD_NOWHERE && e->busy == IDLE &&
               !job_pending(&q->rebuilding);
}

static bool is_cold_here(const struct sequence *q, const struct entry *e) {
        const struct place *p = is_cold(q, e) ? place_moved(q->space, e->place) : NULL;

        return is_cold(q, e) && (!p || p->state == PLACE_HERE);
}

/* Stays at the entry that it finds, so the caller may leave that copy in memory. */
static bool cold_next(struct space *space, struct copy_owner *ret) {
        struct sequences *all = sequences_of(space);
        uint32_t seat = all->cold_sequence % KVD_MAX_SEQUENCES;
        const struct sequence *q = all->at[seat];

        if (!q || all->cold_entry >= q->n_entries) {
                all->cold_sequence = seat + 1;
                all->cold_entry = 0;
                return false;
        }
        if (!is_cold_here(q, &q->entries[all->cold_entry])) {
                all->cold_entry++;
                return false;
        }
        *ret = (struct copy_owner){q->entries[all->cold_entry].place, q->number, all->cold_entry};
        return true;
}

int copies_cold(struct space *space, uint32_t *looks, struct copy_owner *ret) {
        struct sequences *all = sequences_of(space);

        for (; *looks; --*looks) {
                if (cold_next(space, ret)) {
                        all->cold_looks = 0;
                        return 1;
                }
                if (++all->cold_looks > all->n_entries + 2 * KVD_MAX_SEQUENCES) {
                        all->cold_looks = 0;
                        return 0;
                }
        }
        return -EAGAIN;
}

bool copies_are_cold(struct space *space, const struct copy_owner *owner) {
        const struct sequence *q = sequences_of(space)->at[SEQUENCE_SEAT(owner->sequence)];
        const struct entry *e = NULL;

        if (q && q->number == owner->sequence)
                e = &q->entries[owner->entry];
        return e && is_cold(q, e) && e->place == owner->place;
}

void copies_room_again(struct space *space) {
        for (uint32_t i = 0; i < KVD_MAX_SEQUENCES; i++)
                if (sequences_of(space)->at[i])
                        sequences_of(space)->at[i]->spent = 0;
        space_is_busy(space);
}

/* ---- those that come back -------------------------------------------------------------------- */

void revival_refused(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];

        space_count(q->space, KVD_SPACE_REVIVE_REFUSED, 1);
        e->busy = IDLE;
        e->want = 0;
        change_tell(q, at);
}

void copy_broken(struct sequence *q, uint32_t at) {
        struct entry *e = &q->entries[at];

        space_count(q->space, KVD_SPACE_REVIVE_BROKEN, 1);
        e->busy = IDLE;
        e->want = 0;
        entry_erase_copy(q, e);
        if (e->ref)
                return;
        entry_set_flags(q, e,
                        KVD_ENTRY_OWN | (e->ordinal != KVD_NO_ORDINAL ? KVD_ENTRY_VAGUE :
                                                                        KVD_ENTRY_DROPPED));
        e->untold = true;
        change_tell(q, at);
}

/* The entry goes to the front, so that it does not wait for other reads. */
static void fetched(struct sequence *q, uint32_t at, int error) {
        q->n_fetching--;
        if (error == 0) {
                q->entries[at].busy = REVIVE_WANTED;
                list_push_first(q, &q->revive, at);
        } else if (error == -EBADMSG || error == -EIO) {
                copy_broken(q, at);
        } else {
                revival_refused(q, at);
        }
        if (q->revive.n)
                job_ask(&q->reviving);
        if (q->changes.n || !q->n_fetching)
                sync_news(q->space);
}

void copy_came(struct space *space, const struct copy_owner *owner, int error) {
        struct sequence *q = sequences_of(space)->at[SEQUENCE_SEAT(owner->sequence)];

        if (q && q->number == owner->sequence)
                fetched(q, owner->entry, error);
}
