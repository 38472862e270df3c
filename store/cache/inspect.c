/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Gathers what kvctl shows of a space: its usage, a map of its blocks, and its chains. Changes
 * nothing.
 */

#include <errno.h>
#include <string.h>

#include "store/cache/inside.h"
#include "store/hooks.h"

static void sum_clients(struct space *space, struct space_usage *ret) {
        memcpy(ret->client_counters, space->account.past_counters, sizeof ret->client_counters);
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));) {
                if (a->state == FOLDING)
                        continue;
                ret->attachments++;
                counters_add(a, ret->client_counters);
        }
}

void space_get_usage(struct space *space, struct space_usage *ret) {
        *ret = (struct space_usage){
                .free = space->count[KVD_FREE],
                .filling = space->count[KVD_FILLING],
                .sealed = space->count[KVD_SEALED],
                .limbo = space->count[KVD_LIMBO],
                .leaves = space->leaves.n,
                .runs = space->ix->run_capacity - space->runs.n_free,
                .leases = space->leases.n,
                .max_blocks = space->memory.max_blocks,
                .segments = space->memory.n_with_memory,
                .private = space->private.n,
                .pending = space->unready.n_pending,
                .poisoned = space->unready.poisoned.n,
        };
        hooks_usage(space, ret);
        ret->total = ret->free + ret->filling + ret->sealed + ret->limbo;
        sum_clients(space, ret);
}

static uint8_t map_flags(const struct space *space, uint32_t id) {
        const struct block *b = &space->blocks[id];
        uint32_t flags = block_pinned(space, id, NULL) ? STORE_MAP_PINNED : 0;

        flags |= b->child == NONE && !b->private ? STORE_MAP_LEAF : 0;
        flags |= b->refs || b->holds || b->pending ? STORE_MAP_KEPT : 0;
        return (uint8_t)flags;
}

static bool is_leaf(const struct block *b) {
        return b->state == KVD_SEALED && b->child == NONE && !b->private;
}

/* Of a leaf: the number of bits of the ticks since its last use. */
static uint8_t age_of(const struct space *space, uint32_t id) {
        uint64_t ticks;

        if (!is_leaf(&space->blocks[id]))
                return MAP_AGE_UNKNOWN;
        ticks = space->clock - MIN(block_last_use(space, id), space->clock);
        return ticks ? (uint8_t)(64 - __builtin_clzll(ticks)) : 0;
}

/* A block's pins, and its age, are read from the page of every client. */
static uint32_t most_at_once(const struct space *space, bool ages) {
        uint32_t reads = MAX(space->n_attachments, 1) * (1 + ages);

        return MAX(KVD_PIN_READS / reads, 1);
}

uint32_t space_map(struct space *space, uint32_t first, uint32_t n, const struct map_room *to) {
        uint32_t end = space_ids(space);

        if (first >= end)
                return 0;
        n = MIN(MIN(n, end - first), most_at_once(space, to->ages));
        for (uint32_t i = 0; i < n; i++) {
                const struct block *b = &space->blocks[first + i];

                to->states[i] = b->state;
                if (b->state == KVD_SEALED)
                        to->states[i] |= map_flags(space, first + i);
                if (to->parents)
                        to->parents[i] = b->state == KVD_SEALED ? b->parent : UINT32_MAX;
                if (to->ages)
                        to->ages[i] = age_of(space, first + i);
        }
        return n;
}

static bool has_sibling(const struct space *space, uint32_t id) {
        return space->blocks[id].sib_next != NONE || space->blocks[id].sib_prev != NONE;
}

#define LOOKS 8192u /* blocks that a call looks at */

/*
 * The block where the last call stopped looking for a branch of the chain, or the leaf. `above`
 * comes from the caller, and may be outdated or wrong: then another branch is found.
 */
static uint32_t resume(const struct space *space, uint32_t leaf, uint32_t above) {
        uint32_t id = above - 1;

        return above && id < space->ix->capacity && space->blocks[id].state == KVD_SEALED &&
                               !space->blocks[id].private ?
                       id :
                       leaf;
}

/* Finds the deepest block with siblings, or NONE. False: not found yet, continue at *at. */
static bool find_branch(const struct space *space, uint32_t *at) {
        for (uint32_t i = 0; i < LOOKS && *at != NONE; i++, *at = space->blocks[*at].parent)
                if (has_sibling(space, *at))
                        return true;
        return *at == NONE;
}

static void first_tokens(const struct space *space, uint32_t leaf, struct chain_info *ret) {
        const struct kvd_desc *desc = kvd_index_desc(space->ix, space->blocks[leaf].root);

        ret->n_head = MIN(ARRAY_SIZE(ret->head), desc->n_tokens);
        memcpy(ret->head, desc->tokens, ret->n_head * sizeof *ret->head);
}

static void describe_chain(struct space *space, uint32_t leaf, uint32_t branch,
                           struct chain_info *ret) {
        const struct kvd_desc *desc = kvd_index_desc(space->ix, leaf);

        *ret = (struct chain_info){
                .leaf = block_ref(space, leaf),
                .group = desc->group,
                .blocks = desc->depth + 1,
                .shared_blocks = branch == NONE ? 0 : kvd_index_desc(space->ix, branch)->depth,
                .tokens = (uint64_t)desc->depth * space_full_tokens(space, desc->group) +
                          desc->n_tokens,
                .idle_ticks = (uint32_t)(space->clock - block_last_use(space, leaf)),
        };
        block_pinned(space, leaf, &ret->pins);
        first_tokens(space, leaf, ret);
}

int space_next_chain(struct space *space, uint32_t *cursor, uint32_t *above,
                     struct chain_info *ret) {
        uint32_t end = space_ids(space), id = *cursor, stop = id + MIN(LOOKS, UINT32_MAX - id), at;

        while (id < MIN(stop, end) && !is_leaf(&space->blocks[id]))
                id++;
        if (id >= end)
                return store_refuse(space_store(space), -ENOENT, "no more chains");
        *ret = (struct chain_info){0};
        *cursor = id;
        if (id == stop)
                return 0;
        at = resume(space, id, *above);
        *above = 0;
        if (!find_branch(space, &at)) {
                *above = at + 1;
                return 0;
        }
        describe_chain(space, id, at, ret);
        *cursor = id + 1;
        return 0;
}
