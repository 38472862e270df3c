/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The tiers below the pool, in the order in which fetches ask them: whose turn it is, and what
 * they are told of spaces and clients.
 */

#include "store/below/below.h"

#include "store/below/bring.h"
#include "store/below/carry.h"
#include "store/below/prefix.h"
#include "store/hooks.h"

#define IN_A_ROW 8u /* consecutive requests for fetches before writes get a turn */

void below_begin(struct below *b, struct store *store, const struct below_ops *ops) {
        struct below **link = &store->below;

        while (*link)
                link = &(*link)->next;
        *link = b;
        b->store = store;
        b->ops = ops;
}

void below_want(const struct below *b, bool soon) {
        if (b->wanted)
                b->wanted(b->data, soon);
}

void below_hold(struct below *b, struct space *space, kvd_ref block) {
        block_hold(space, kvd_ref_id(block));
        b->space = space;
        b->blocks[b->n_blocks++] = block;
}

void below_let_go(struct below *b) {
        for (uint32_t i = 0; b->space && i < b->n_blocks; i++)
                block_let_go(b->space, kvd_ref_id(b->blocks[i]));
        b->n_blocks = 0;
}

bool below_next(struct below *b, bool *later) {
        bool writes = b->reads_in_a_row >= IN_A_ROW;

        if (writes)
                b->reads_in_a_row = 0;
        if (writes && sweep_next(b, later))
                return true;
        if (bring_next(b, later)) {
                b->reads_in_a_row++;
                return true;
        }
        return !b->fetches.first && !writes && sweep_next(b, later);
}

struct below_space *below_space_of(const struct below *b, const struct space *space) {
        return b->ops->serves(b, space) ? b->ops->state(space) : NULL;
}

void below_changes(struct below *b) {
        for (struct space *space = NULL; (space = store_space_after(b->store, space));) {
                b->ops->state(space)->changes = UINT64_MAX;
                b->ops->state(space)->path = 0; /* it may be longer now */
                space_is_busy(space);
        }
}

/* If blocks have changed, the space is swept when no request is outstanding. */
static void note_changes(struct below *b, struct space *space) {
        struct below_space *bs = below_space_of(b, space);
        uint64_t changes = bs ? carry_changes(b->carry, space) : 0;

        if (!bs || bs->changes == changes)
                return;
        bs->changes = changes;
        if (!bs->all) /* a round that writes all blocks ends despite changes */
                bs->looked = 0;
        if (!bs->unswept)
                below_want(b, false);
        bs->unswept = true;
}

static bool idle(struct space *space) {
        for (struct below *b = space_store(space)->below; b; b = b->next)
                note_changes(b, space);
        return false;
}

/* A request that is outstanding goes on without the space. */
static void space_leaves(struct space *space) {
        for (struct below *b = space_store(space)->below; b; b = b->next) {
                fetches_end(b, space, NULL);
                if (b->space == space)
                        b->space = NULL;
        }
}

static void attachment_ends(struct attachment *a) {
        prefix_free(a);
        for (struct below *b = space_store(a->space)->below; b; b = b->next)
                fetches_end(b, a->space, a);
}

static void store_ends(struct store *store) {
        for (struct below *b = store->below; b; b = b->next)
                fetches_close(b);
        store->below = NULL;
}

const struct hooks below_hooks = {.idle = idle,
                                  .space_leaves = space_leaves,
                                  .store_ends = store_ends,
                                  .attachment_ends = attachment_ends};
