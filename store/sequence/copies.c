/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This file keeps the exact copies of entries. An entry that is resident again keeps its copy, so
 * that it may leave again at once; such copies are clean, and are given up when the room is wanted
 * for others.
 */

#include "store/sequence/sequence.h"

void entry_erase_copy(struct sequence *q, struct entry *e) {
        if (e->place == KVD_NOWHERE)
                return;
        place_erase(q->space, e->place);
        q->n_copies--;
        e->place = KVD_NOWHERE;
}

static bool is_clean(const struct entry *e) {
        return e->ref && e->place != KVD_NOWHERE && e->busy == IDLE &&
               !(e->flags & KVD_ENTRY_APPROX);
}

#define RECLAIM_LOOKS 8192u /* entries of one call: about half a millisecond */
#define RECLAIM_COPIES 64u
#define RECLAIM_SPACES 1024u /* that may have such entries */

/*
 * Gives up clean copies, a bounded number a call, and goes on where the last call stopped. A whole
 * round that finds none clears has_clean, until copies_clean says that there may be some.
 */
static uint32_t reclaim(struct space *space) {
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
 * The space's own copies go first; but what all spaces may use is all spaces' to give. That is a
 * piece of a round through them: who finds no room may find some when he asks again.
 */
bool copies_have_room(struct space *space) {
        struct space_lists *lists = &space_store(space)->spaces;
        uint32_t looks = 0, most = MIN(RECLAIM_SPACES, lists->all.n + 1);

        if (place_available(space))
                return true;
        if (sequences_of(space)->has_clean)
                looks = reclaim(space);
        for (uint32_t i = 0; i < most && looks < RECLAIM_LOOKS && places_left(space); i++) {
                struct space *s = roll_from(&lists->all, lists->copies);

                if (place_available(space))
                        return true;
                lists->copies = s ? s->number + 1 : 0;
                if (s && s != space && sequences_of(s)->has_clean)
                        looks += reclaim(s);
        }
        return place_available(space);
}

uint32_t copy_take(struct space *space) {
        return copies_have_room(space) ? place_take(space) : KVD_NOWHERE;
}
