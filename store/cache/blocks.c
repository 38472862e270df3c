/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This file changes the states of blocks, and keeps the lists that they are in:
 *
 *      ABSENT ──fill──► FREE ──allocate──► FILLING ──seal──► SEALED ──evict──► RETIRING ──nobody uses it──► FREE
 *                        ▲                  │  │                ▲                │
 *                        └─────release──────┘  │                └─somebody does──┘
 *                        └◄──process gone── LIMBO (its connection was lost)
 *
 * A block's generation moves whenever it becomes FREE again.
 */

#include "store/cache/inside.h"

/* ---- states ---------------------------------------------------------------------------------- */

void block_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation) {
        struct block *b = &space->blocks[id];

        space->count[b->state]--;
        space->count[state]++;
        b->state = (uint8_t)state;
        index_set_state(space, id, state, generation);
}

/* ---- lists ----------------------------------------------------------------------------------- */

void block_list_append(struct space *space, struct block_list *list, uint32_t id) {
        struct block *b = &space->blocks[id];

        b->next = NONE;
        b->prev = list->n++ ? list->last : NONE;
        *(b->prev == NONE ? &list->first : &space->blocks[b->prev].next) = id;
        list->last = id;
}

void block_list_push(struct space *space, struct block_list *list, uint32_t id) {
        struct block *b = &space->blocks[id];

        b->prev = NONE;
        b->next = list->n++ ? list->first : NONE;
        *(b->next == NONE ? &list->last : &space->blocks[b->next].prev) = id;
        list->first = id;
}

void block_list_remove(struct space *space, struct block_list *list, uint32_t id) {
        struct block *b = &space->blocks[id];

        *(b->prev == NONE ? &list->first : &space->blocks[b->prev].next) = b->next;
        *(b->next == NONE ? &list->last : &space->blocks[b->next].prev) = b->prev;
        list->n--;
}

/* ---- free lists ------------------------------------------------------------------------------ */

/* The block may come from any state that nobody can see any more; it begins a new incarnation. */
static void make_free(struct space *space, struct segment *segment, uint32_t id) {
        space->blocks[id].owner = NONE;
        block_set_state(space, id, KVD_FREE, block_generation(space, id) + 1);
        if (!segment->avail.in)
                kvd_list_insert(&segment->arena->avail, segment->arena->avail.first,
                                &segment->avail);
}

/* The block goes to the head of its segment's list: its memory may still be in a cache. */
void block_to_free(struct space *space, uint32_t id) {
        struct segment *segment = block_segment(space, id);

        block_list_push(space, &segment->free, id);
        make_free(space, segment, id);
}

/*
 * The block goes to the end: blocks whose memory is new are handed out in the order of their ids.
 */
void block_append_free(struct space *space, uint32_t id) {
        struct segment *segment = block_segment(space, id);

        block_list_append(space, &segment->free, id);
        make_free(space, segment, id);
}

uint32_t block_pop_free(struct space *space, struct arena *arena) {
        struct segment *segment = kvd_list_first(&arena->avail, struct segment, avail);
        uint32_t id;

        if (!segment)
                return NONE;
        id = segment->free.first;
        block_list_remove(space, &segment->free, id);
        if (segment->free.n == 0)
                kvd_list_remove(&segment->avail);
        return id;
}

/* ---- filling lists --------------------------------------------------------------------------- */

void block_fill_begin(struct space *space, uint32_t id, struct attachment *a) {
        space->blocks[id].owner = a->seat;
        block_list_push(space, &a->filling, id);
        block_set_state(space, id, KVD_FILLING, block_generation(space, id));
}

void block_fill_end(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];

        block_list_remove(space, &space->attachments[b->owner]->filling, id);
        b->owner = NONE;
}

/*
 * Is it a block that this attachment is filling, in this incarnation? Everything in ref comes from
 * a client.
 */
bool block_filled_by(const struct attachment *a, kvd_ref ref) {
        const struct space *space = a->space;
        uint32_t id = kvd_ref_id(ref);

        return id < space->ix->capacity && space->blocks[id].state == KVD_FILLING &&
               space->blocks[id].owner == a->seat &&
               block_generation(space, id) == kvd_ref_generation(ref);
}
