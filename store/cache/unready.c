/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks whose data is still to come (pending), and blocks that will never get it, or are behind
 * such a block (poisoned). device/semaphore.c finds out which, and names the steps.
 */

#include "store/account.h"
#include "store/cache/inside.h"

/* Partner: nothing_pending in client/gpu/stream.c. */
static void set_pending(struct space *space, uint64_t n) {
        space->unready.n_pending = n;
        atomic_store_explicit(&space->ix->n_pending, (uint32_t)MIN(n, UINT32_MAX),
                              memory_order_release);
}

void block_awaits(struct space *space, struct block_list *list, uint32_t id) {
        space->blocks[id].pending = true;
        block_list_append(space, list, id);
        set_pending(space, space->unready.n_pending + 1);
}

void block_awaits_no_more(struct space *space, struct block_list *list, uint32_t id) {
        block_list_remove(space, list, id);
        space->blocks[id].pending = false;
        block_count_kept(space, id);
        set_pending(space, space->unready.n_pending - 1);
        if (space->blocks[id].poisoned)
                block_list_push(space, &space->unready.poisoned, id);
}

static void spend(uint32_t *budget, uint32_t n) {
        *budget -= MIN(*budget, n);
}

/* A pinned chain of the session ends at `to` (NONE: nowhere) from now on, and not at id. */
static void let_go(struct space *space, struct session *s, uint32_t id, uint32_t to) {
        uint64_t bytes = (blocks_up_to(space, id) - blocks_up_to(space, to)) *
                         space->ix->block_bytes;

        if (s->keep != KVD_keep_pinned)
                return;
        if (to != NONE)
                block_hold(space, to);
        block_let_go(space, id);
        s->pinned -= bytes;
        account_discharge(space, KVD_COST_session_pins, bytes);
        space->leaves.sessions.moved++;
}

/* Sessions go on with the block before all that are poisoned. */
static void move_sessions(struct space *space, uint32_t id, uint32_t *budget) {
        uint32_t to = space->blocks[space->unready.poisoning.top].parent;

        spend(budget, sessions_move(space, id, to, let_go));
        if (to != NONE)
                block_rank(space, to);
}

/* Steps O5 and O6. Children follow in any order: they cannot be found once their parent is gone. */
static void poison_one(struct space *space, uint32_t id, uint32_t *budget) {
        struct kvd_desc *desc = kvd_index_desc(space->ix, id);
        struct block *b = &space->blocks[id];

        if (b->poisoned)
                return;
        __atomic_store_n(&desc->flags, desc->flags | KVD_DESC_POISONED, __ATOMIC_RELEASE);
        index_leave(space, id);
        b->poisoned = true;
        move_sessions(space, id, budget);
        block_condemn(space, id);
        if (!b->pending)
                block_list_push(space, &space->unready.poisoned, id);
        space_count(space, KVD_SPACE_POISONED, 1);
}

static void go_to(struct space *space, uint32_t id, uint32_t *budget) {
        space->unready.poisoning.at = id;
        space->unready.poisoning.up = false;
        poison_one(space, id, budget);
}

static void poison_next(struct space *space, uint32_t *budget) {
        struct poisoning *p = &space->unready.poisoning;
        const struct block *b = &space->blocks[p->at];

        if (!p->up && b->child != NONE) {
                go_to(space, b->child, budget);
        } else if (p->at == p->top) {
                p->under_way = false;
        } else if (b->sib_next != NONE) {
                go_to(space, b->sib_next, budget);
        } else {
                p->at = b->parent;
                p->up = true;
        }
}

bool poison_goes_on(struct space *space, uint32_t *budget) {
        for (; *budget && space->unready.poisoning.under_way; spend(budget, 1))
                poison_next(space, budget);
        return !space->unready.poisoning.under_way;
}

bool block_poison(struct space *space, uint32_t top, uint32_t *budget) {
        space->unready.poisoning = (struct poisoning){.under_way = true, .top = top};
        go_to(space, top, budget);
        return poison_goes_on(space, budget);
}

#define RETRIES 1024u /* poisoned blocks in one call */

bool poisoned_sweep(struct space *space) {
        block_list_sweep(space, &space->unready.poisoned, RETRIES);
        return space->unready.poisoned.n;
}
