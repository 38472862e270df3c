/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Changes the flags, lists and blocks of a sequence's entries. All changes are made here, so that
 * the counts are right.
 */

#include <errno.h>

#include "store/sequence/sequence.h"

/* ---- finding --------------------------------------------------------------------------------- */

struct sequence *sequence_find(struct attachment *a, uint32_t number) {
        struct sequence *q = sequences_of(a->space)->at[SEQUENCE_SEAT(number)];

        if (q && q->number == number && q->attachment == a)
                return q;
        store_refuse(space_store(a->space), -ENOENT,
                     "sequence in space '%s': this client has no sequence of that number",
                     space_name(a->space));
        return NULL;
}

int sequence_check_entries(struct attachment *a, const struct sequence *q, uint32_t how,
                           const uint32_t *entries, uint32_t n) {
        if (how < 1 || how > 3)
                return store_refuse(space_store(a->space), -EINVAL,
                                    "there is no such way to cool or revive a block");
        for (uint32_t i = 0; i < n; i++)
                if (entries[i] >= q->n_entries)
                        return store_refuse(
                                space_store(a->space), -EINVAL,
                                "sequence in space '%s': it has %u entries, so there is no entry %u",
                                space_name(a->space), q->n_entries, entries[i]);
        return 0;
}

/* ---- lists ----------------------------------------------------------------------------------- */

void list_push(struct sequence *q, struct list *list, uint32_t at) {
        space_changes(q->space);
        q->entries[at].next = NONE;
        q->entries[at].prev = list->last;
        *(list->n ? &q->entries[list->last].next : &list->first) = at;
        list->last = at;
        list->n++;
}

void list_push_first(struct sequence *q, struct list *list, uint32_t at) {
        space_changes(q->space);
        q->entries[at].next = list->n ? list->first : NONE;
        if (list->n)
                q->entries[list->first].prev = at;
        else
                list->last = at;
        list->first = at;
        list->n++;
}

void list_remove(struct sequence *q, struct list *list, uint32_t at) {
        const struct entry *e = &q->entries[at];

        space_changes(q->space);
        *(at == list->first ? &list->first : &q->entries[e->prev].next) = e->next;
        *(at == list->last ? &list->last : &q->entries[e->next].prev) = e->prev;
        list->n--;
}

uint32_t list_pop(struct sequence *q, struct list *list) {
        uint32_t at = list->first;

        if (!list->n)
                return NONE;
        list_remove(q, list, at);
        return at;
}

/* ---- entries --------------------------------------------------------------------------------- */

void entry_set_flags(struct sequence *q, struct entry *e, uint32_t flags) {
        struct space *space = q->space;
        bool own = entry_is_own(e);

        space_changes(space);
        sequences_of(space)->n_shared += !!(flags & KVD_ENTRY_SHARED) -
                                         !!(e->flags & KVD_ENTRY_SHARED);
        sequences_of(space)->n_spilled += !!(flags & KVD_ENTRY_SPILLED) -
                                          !!(e->flags & KVD_ENTRY_SPILLED);
        sequences_of(space)->n_vague += !!(flags & KVD_ENTRY_VAGUE) -
                                        !!(e->flags & KVD_ENTRY_VAGUE);
        e->flags = (uint16_t)flags;
        q->n_own += entry_is_own(e) - own;
}

void entry_set_leaving(struct sequence *q, struct entry *e, bool leaving) {
        space_changes(q->space);
        sequences_of(q->space)->n_leaving += leaving - e->leaving;
        q->n_leaving += leaving - e->leaving;
        e->leaving = leaving;
}

bool entry_is_own(const struct entry *e) {
        return (e->flags & KVD_ENTRY_OWN) && !(e->flags & (KVD_ENTRY_SHARED | KVD_ENTRY_SPILLED |
                                                           KVD_ENTRY_VAGUE | KVD_ENTRY_DROPPED));
}

uint32_t sequence_entry_at(const struct sequence *q, uint32_t token) {
        uint32_t low = 0, high = q->n_entries;

        while (low < high) {
                uint32_t mid = (low + high) / 2;

                if (q->entries[mid].position + q->entries[mid].n_tokens <= token)
                        low = mid + 1;
                else
                        high = mid;
        }
        return low;
}

/* ---- their blocks ---------------------------------------------------------------------------- */

/* Only references to private blocks are counted. */
void entry_drop_block(struct sequence *q, struct entry *e) {
        if (e->ref && block_of(q->space, kvd_ref_id(e->ref))->private &&
            block_current(q->space, e->ref))
                block_ref_down(q->space, kvd_ref_id(e->ref));
        e->ref = 0;
}

void entry_take_block(struct sequence *q, struct entry *e) {
        uint32_t id = kvd_ref_id(e->other);

        if (block_of(q->space, id)->private)
                block_ref_up(q->space, id);
        entry_drop_block(q, e);
        e->ref = e->other;
        block_let_go(q->space, id);
        e->other = 0;
}

void entry_drop_room(struct sequence *q, struct entry *e) {
        if (e->other)
                block_discard(q->space, kvd_ref_id(e->other));
        e->other = 0;
}

void entry_seal(struct sequence *q, kvd_ref block, uint32_t at, uint32_t n_tokens, uint32_t flags) {
        /* for a packed block, of which each head has tokens of its own */
        static const uint32_t no_tokens[KVD_MAX_PLANE_TOKENS];
        struct kvd_desc fields = {.depth = q->entries[at].position,
                                  .n_tokens = (uint16_t)n_tokens,
                                  .group = (uint16_t)q->group,
                                  .flags = KVD_DESC_PRIVATE | flags};

        block_seal_private(q->space, kvd_ref_id(block), &fields,
                           flags & KVD_DESC_COMPACT ? no_tokens :
                                                      q->tokens + q->entries[at].position);
}
