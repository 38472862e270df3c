/* SPDX-License-Identifier: Apache-2.0 */

/*
 * States of blocks and the lists they are in:
 *
 *      ABSENT ──fill──► FREE ──allocate──► FILLING ──seal──► SEALED ──evict──► RETIRING ──nobody uses it──► FREE
 *                        ▲                  │  │                ▲                │
 *                        └─────release──────┘  │                └─somebody does──┘
 *                        └◄──process gone── LIMBO (its connection was lost)
 *
 * A block's generation moves whenever it becomes FREE again.
 */

#include "store/internal.h"

/* ---- states ------------------------------------------------------------------------------------------------- */

void block_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation) {
        struct block *b = &space->blocks[id];

        space->count[b->state]--;
        space->count[state]++;
        b->state = (uint8_t)state;
        index_set_state(space, id, state, generation);
}

/* ---- free lists --------------------------------------------------------------------------------------------- */

static void arena_list(struct segment *segment) {
        struct arena *arena = segment->arena;

        segment->prev = NULL;
        segment->next = arena->avail;
        if (segment->next)
                segment->next->prev = segment;
        arena->avail = segment;
        segment->listed = true;
}

void arena_unlist(struct segment *segment) {
        if (segment->prev)
                segment->prev->next = segment->next;
        else
                segment->arena->avail = segment->next;
        if (segment->next)
                segment->next->prev = segment->prev;
        segment->listed = false;
}

/* From any state that nobody can see any more: a new incarnation. */
static void make_free(struct space *space, struct segment *segment, uint32_t id) {
        space->blocks[id].owner = NONE;
        segment->n_free++;
        block_set_state(space, id, KVD_FREE, block_generation(space, id) + 1);
        if (!segment->listed)
                arena_list(segment);
}

/* At the head of its segment's list: its memory may still be in a cache. */
void block_to_free(struct space *space, uint32_t id) {
        struct segment *segment = block_segment(space, id);
        struct block *b = &space->blocks[id];

        b->prev = NONE;
        b->next = segment->free;
        if (b->next != NONE)
                space->blocks[b->next].prev = id;
        else
                segment->free_last = id;
        segment->free = id;
        make_free(space, segment, id);
}

/* At the end: blocks whose memory is new are handed out in the order of their ids. */
void block_append_free(struct space *space, uint32_t id) {
        struct segment *segment = block_segment(space, id);
        struct block *b = &space->blocks[id];

        b->next = NONE;
        b->prev = segment->free == NONE ? NONE : segment->free_last;
        *(b->prev == NONE ? &segment->free : &space->blocks[b->prev].next) = id;
        segment->free_last = id;
        make_free(space, segment, id);
}

uint32_t block_pop_free(struct space *space, struct arena *arena) {
        struct segment *segment = arena->avail;
        uint32_t id;

        if (!segment)
                return NONE;
        id = segment->free;
        segment->free = space->blocks[id].next;
        if (segment->free != NONE)
                space->blocks[segment->free].prev = NONE;
        if (--segment->n_free == 0)
                arena_unlist(segment);
        return id;
}

/* ---- filling lists ------------------------------------------------------------------------------------------ */

void block_fill_begin(struct space *space, uint32_t id, struct attachment *a) {
        struct block *b = &space->blocks[id];

        b->owner = a->slot;
        b->prev = NONE;
        b->next = a->filling;
        if (b->next != NONE)
                space->blocks[b->next].prev = id;
        a->filling = id;
        a->n_filling++;
        block_set_state(space, id, KVD_FILLING, block_generation(space, id));
}

void block_fill_end(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];
        struct attachment *a = space->attachments[b->owner];

        if (b->prev != NONE)
                space->blocks[b->prev].next = b->next;
        else
                a->filling = b->next;
        if (b->next != NONE)
                space->blocks[b->next].prev = b->prev;
        b->owner = NONE;
        a->n_filling--;
}

/* Is it a block that this attachment is filling, in this incarnation? Everything in ref comes from a client. */
bool block_filled_by(const struct attachment *a, kvd_ref ref) {
        const struct space *space = a->space;
        uint32_t id = kvd_ref_id(ref);

        return id < space->ix->capacity && space->blocks[id].state == KVD_FILLING &&
               space->blocks[id].owner == a->slot && block_generation(space, id) == kvd_ref_generation(ref);
}
