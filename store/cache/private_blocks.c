/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Private blocks are those that sequences filled for themselves. They are sealed, so no client
 * writes them, but they are in no table and no chain. The daemon counts the entries that name a
 * block (refs) and its own unfinished work with it (holds). While there is either, the block is no
 * candidate for eviction. With neither it is garbage: first in its arena's heap, and in a list that
 * idle work sweeps. It is evicted by the same protocol as any other block (evict.c), because a
 * client may still read it: references are bookkeeping, pins are safety.
 *
 *      FILLING ──append──► SEALED, refs 1 ──the last entry leaves it──► garbage ──not pinned──► FREE
 *         └─held when its owner let go of it──► SEALED, refs 0, held ──job done──┘
 *
 * Holds also protect other blocks: indexed ones that a worker reads or that were offered to a
 * sequence, and blocks that a worker fills (reviving).
 */

#include <assert.h>

#include "store/cache/inside.h"

bool block_is_garbage(const struct block *b) {
        return b->private && b->state == KVD_SEALED && !b->refs && !b->holds;
}

/* ---- garbage --------------------------------------------------------------------------------- */

static void becomes_garbage(struct space *space, uint32_t id) {
        leaf_add(space, id);
        block_list_append(space, &space->private.garbage, id);
}

bool block_list_sweep(struct space *space, struct block_list *list, uint32_t most) {
        uint32_t reads = KVD_PIN_READS;
        bool freed = false;

        for (uint32_t n = MIN(list->n, most); n && reads; n--) {
                uint32_t id = list->first;

                if (space->blocks[id].child == NONE && evict_leaf(space, id, &reads)) {
                        freed = true;
                        continue;
                }
                block_list_remove(space, list, id);
                block_list_append(space, list, id);
        }
        return freed;
}

bool garbage_sweep(struct space *space, uint32_t budget) {
        return block_list_sweep(space, &space->private.garbage, budget);
}

uint64_t blocks_committed(const struct space *space) {
        return space->count[KVD_FILLING] + space->count[KVD_LIMBO] + space->private.n -
               space->private.garbage.n;
}

/* ---- references and holds -------------------------------------------------------------------- */

static void drop(struct space *space, uint32_t id) {
        if (block_is_garbage(&space->blocks[id]))
                becomes_garbage(space, id);
}

void block_ref_up(struct space *space, uint32_t id) {
        space_changes(space);
        space->blocks[id].refs++;
}

void block_ref_down(struct space *space, uint32_t id) {
        assert(space->blocks[id].refs > 0);
        space_changes(space);
        space->blocks[id].refs--;
        drop(space, id);
}

void block_hold(struct space *space, uint32_t id) {
        space_changes(space);
        space->blocks[id].holds++;
}

void block_let_go(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];

        assert(b->holds > 0);
        space_changes(space);
        b->holds--;
        drop(space, id);
}

uint32_t block_position(const struct space *space, uint32_t id) {
        const struct kvd_desc *desc = kvd_index_desc(space->ix, id);

        return desc->flags & KVD_DESC_PRIVATE ? desc->depth :
                                                desc->depth * space->ix->geometry.block_tokens;
}

bool block_current(const struct space *space, kvd_ref ref) {
        uint32_t id = kvd_ref_id(ref);

        return id < space->ix->capacity && space->blocks[id].state == KVD_SEALED &&
               block_ref(space, id) == ref;
}

/* ---- sealing --------------------------------------------------------------------------------- */

/*
 * The block must be FILLING and in no list. It has no references yet: the caller holds it, or adds
 * one.
 */
void block_seal_private(struct space *space, uint32_t id, const struct kvd_desc *fields,
                        const uint32_t *tokens) {
        struct block *b = &space->blocks[id];

        index_write(space, id, fields, tokens);
        b->parent = b->child = b->sib_prev = b->sib_next = NONE;
        b->stamp = 0;
        b->session = 0;
        b->score = 0;
        b->summarised = false;
        b->private = true;
        space->private.n++;
        if (b->reviving)
                space->private.n_reviving--;
        b->reviving = false;
        block_set_state(space, id, KVD_SEALED, block_generation(space, id));
}

/*
 * A client or a worker was filling the block. If a worker still reads or writes it, it is freed
 * when that has ended.
 */
void block_discard(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];
        struct kvd_desc fields = {.n_tokens = 1, .flags = KVD_DESC_PRIVATE};
        uint32_t no_token = 0;

        if (b->holds) {
                block_seal_private(space, id, &fields, &no_token);
                return;
        }
        if (b->reviving)
                space->private.n_reviving--;
        b->reviving = false;
        block_to_free(space, id);
}
