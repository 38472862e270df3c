/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Changes the states of blocks, and maintains their lists:
 *
 *      ABSENT ──fill──► FREE ──allocate──► FILLING ──seal──► SEALED ──evict──► RETIRING ──not in use──► FREE
 *                        ▲                  │  │                ▲                │
 *                        └─────release──────┘  │                └─still in use───┘
 *                        └◄──process gone── LIMBO (its connection was lost)
 *
 * A block's generation increases whenever it becomes FREE again.
 */

#include "store/cache/inside.h"

/* ---- states ---------------------------------------------------------------------------------- */

void block_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation) {
        struct block *b = &space->blocks[id];

        space->count[b->state]--;
        space->count[state]++;
        b->state = (uint8_t)state;
        block_count_kept(space, id);
        space_changes(space);
        index_set_state(space, id, state, generation);
}

void block_count_kept(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];
        bool kept = b->state == KVD_FILLING || b->state == KVD_LIMBO || b->private || b->pending;

        if (kept == b->kept)
                return;
        b->kept = kept;
        segment_keeps(space, block_segment(space, id), kept ? 1 : -1,
                      block_segment(space, id)->n_held);
}

/* ---- lists ----------------------------------------------------------------------------------- */

void block_list_append(struct space *space, struct block_list *list, uint32_t id) {
        struct block *b = &space->blocks[id];

        space_changes(space);
        b->next = NONE;
        b->prev = list->n++ ? list->last : NONE;
        *(b->prev == NONE ? &list->first : &space->blocks[b->prev].next) = id;
        list->last = id;
}

void block_list_push(struct space *space, struct block_list *list, uint32_t id) {
        struct block *b = &space->blocks[id];

        space_changes(space);
        b->prev = NONE;
        b->next = list->n++ ? list->first : NONE;
        *(b->next == NONE ? &list->last : &space->blocks[b->next].prev) = id;
        list->first = id;
}

void block_list_remove(struct space *space, struct block_list *list, uint32_t id) {
        struct block *b = &space->blocks[id];

        space_changes(space);
        *(b->prev == NONE ? &list->first : &space->blocks[b->prev].next) = b->next;
        *(b->next == NONE ? &list->last : &space->blocks[b->next].prev) = b->prev;
        list->n--;
}

/* ---- free lists ------------------------------------------------------------------------------ */

/*
 * May the block get another generation? (id, generation) names one block for as long as the index
 * lives: clients that stopped for days, links of chains and entries of sequences all rely on it. So
 * generations do not wrap: a block that has had its last one is worn out, and is not used again.
 * Its memory comes back with its segment's.
 */
static bool begins_anew(struct space *space, struct segment *segment, uint32_t id) {
        if (block_generation(space, id) < KVD_GENERATION_LAST)
                return true;
        if (space->blocks[id].state != KVD_ABSENT)
                space_count(space, KVD_SPACE_WORN_OUT, 1);
        block_set_state(space, id, KVD_ABSENT, KVD_GENERATION_LAST);
        segment->n_worn_out++;
        return false;
}

/* Clients must not be able to find or use the block any more. */
static void make_free(struct space *space, struct segment *segment, uint32_t id) {
        struct kvd_list *avail = &segment->arena->avail[segment->home];

        block_set_state(space, id, KVD_FREE, block_generation(space, id) + 1);
        if (!segment->avail.in)
                kvd_list_insert(avail, avail->first, &segment->avail);
}

/* Puts the block at the head of its segment's list: its memory may still be in a CPU cache. */
void block_to_free(struct space *space, uint32_t id) {
        struct segment *segment = block_segment(space, id);

        if (!begins_anew(space, segment, id))
                return;
        block_list_push(space, &segment->free, id);
        make_free(space, segment, id);
}

/* Puts the block at the end: new blocks are handed out in the order of their ids. */
void block_append_free(struct space *space, uint32_t id) {
        struct segment *segment = block_segment(space, id);

        if (!begins_anew(space, segment, id))
                return;
        block_list_append(space, &segment->free, id);
        make_free(space, segment, id);
}

uint32_t block_pop_near(struct space *space, struct arena *arena, uint32_t home) {
        struct segment *segment = kvd_list_first(&arena->avail[home], struct segment, avail);
        uint32_t id;

        if (!segment)
                return NONE;
        id = segment->free.first;
        block_list_remove(space, &segment->free, id);
        if (segment->free.n == 0)
                kvd_list_remove(&segment->avail);
        return id;
}

uint32_t block_pop_free(struct space *space, struct arena *arena) {
        uint32_t n = 1 + space_store(space)->pages.n_nodes, id = NONE;

        for (uint32_t i = 0; id == NONE && i < n; i++)
                id = block_pop_near(space, arena, (arena->home + i) % n);
        return id;
}

/* ---- filling lists --------------------------------------------------------------------------- */

void block_fill_begin(struct space *space, uint32_t id, struct attachment *a) {
        space->blocks[id].owner = a->seat;
        space->blocks[id].twin = 0;
        block_list_push(space, &a->filling, id);
        a->tenant->n_filling++;
        block_set_state(space, id, KVD_FILLING, block_generation(space, id));
}

void block_fill_end(struct space *space, uint32_t id) {
        struct attachment *owner = space->attachments[space->blocks[id].owner];

        block_list_remove(space, &owner->filling, id);
        owner->tenant->n_filling--;
}

/* Is the attachment filling this block, in this generation? ref comes from a client. */
bool block_filled_by(const struct attachment *a, kvd_ref ref) {
        const struct space *space = a->space;
        uint32_t id = kvd_ref_id(ref);

        return id < space->ix->capacity && space->blocks[id].state == KVD_FILLING &&
               space->blocks[id].owner == a->seat &&
               block_generation(space, id) == kvd_ref_generation(ref);
}
