/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Gives clients blocks to fill. Room for them comes from the cheapest source: a free block; more
 * memory, while pool, quota and max_blocks allow it; memory of a colder or larger space; the
 * coldest blocks of this one; memory of any other space. If all of that fails, the request is
 * refused.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "store/cache/inside.h"

#define SWEEP 256u /* private blocks without references, freed before anything else is tried */

/* Returns the number of blocks freed; 0: all are in use; -EAGAIN: not all were looked at. */
static int evict(struct space *space, struct arena *arena, uint32_t want, uint32_t *reads) {
        uint32_t evicted;

        if (space->unready.n_pending)
                semaphores_look(space);
        evicted = evict_coldest(space, arena, want, reads);
        return evicted ? (int)evicted : !*reads && arena_worth_looking(arena) ? -EAGAIN : 0;
}

/* Takes unused memory. -EAGAIN: memory of deleted spaces is still being freed. */
static int grow(struct space *space, struct arena *arena, uint64_t bytes) {
        int r = space_grow(space, arena, bytes);
        bool more;

        if (r || !space_may_inherit(space))
                return r;
        more = store_bury(space_store(space));
        r = space_grow(space, arena, bytes);
        return r == 0 && more ? -EAGAIN : r;
}

/* Grows if a segment came free (taken is 1). -EAGAIN: it was too small; the next call continues. */
static int grow_into(struct space *space, struct arena *arena, uint64_t bytes, int taken) {
        int r = taken > 0 ? space_grow(space, arena, bytes) : taken;

        return taken > 0 && r == 0 ? -EAGAIN : r;
}

static int take_cold(struct space *space, struct arena *arena, uint32_t *reads) {
        int r = space_take_cold(space, arena, reads);

        return r ? r : arena_reclaim(space, arena, reads);
}

/*
 * Makes at least one block free for the arena, by the cheapest means. 0 or an error: none is free;
 * -EAGAIN: not known yet. While memory of another space is being freed, only one of its own blocks
 * is evicted.
 */
static int find_room(struct space *space, struct arena *arena, uint32_t want, uint32_t *reads) {
        uint64_t bytes = want * space->ix->block_bytes;
        uint32_t half = *reads / 2, rest = *reads - half;
        int r = grow(space, arena, bytes), evicted = 0, cold = 0;

        if (r == 0)
                r = cold = grow_into(space, arena, bytes, take_cold(space, arena, &half));
        if (r <= 0 && (r != -EAGAIN || cold))
                evicted = evict(space, arena, cold ? 1 : want, &rest);
        if (evicted)
                r = evicted;
        else if (r == 0)
                r = grow_into(space, arena, bytes, space_take_any(space, &rest));
        *reads = r == -EAGAIN ? 0 : half + rest;
        return r;
}

/* Takes a free block. If there is none, frees garbage or blocks of ended clients, but no others. */
static uint32_t pop_or_sweep(struct space *space, struct arena *arena) {
        uint32_t id = block_pop_free(space, arena);

        if (id == NONE && (garbage_sweep(space, SWEEP) || attachments_give(space)))
                id = block_pop_free(space, arena);
        return id;
}

/*
 * Takes a block of the client's NUMA node, and lets the space grow there before it takes one of
 * another node. *grows: how often it may still grow in this request; -1: it cannot.
 */
static uint32_t pop_for(struct attachment *a, uint32_t want, int *grows) {
        struct space *space = a->space;
        uint32_t id = block_pop_near(space, a->arena, a->home);

        if (id == NONE && *grows > 0) {
                *grows = space_grow_near(space, a->arena, want * space->ix->block_bytes) ?
                                 *grows - 1 :
                                 -1;
                id = block_pop_near(space, a->arena, a->home);
                if (id == NONE)
                        *grows = -1;
        }
        return id == NONE && *grows < 0 ? pop_or_sweep(space, a->arena) : id;
}

kvd_ref room_take(struct space *space, struct arena *arena, uint32_t *reads) {
        uint32_t id = pop_or_sweep(space, arena);

        if (id == NONE && *reads && find_room(space, arena, 1, reads) > 0)
                id = block_pop_free(space, arena);
        if (id == NONE)
                return 0;
        space->blocks[id].owner = NONE;
        space->blocks[id].reviving = true;
        space->private.n_reviving++;
        block_set_state(space, id, KVD_FILLING, block_generation(space, id));
        return block_ref(space, id);
}

static int refuse_quota(struct space *space, uint32_t limit) {
        space_count(space, KVD_SPACE_REFUSED_QUOTA, 1);
        return store_refuse(space_store(space), -EDQUOT,
                            "this process is filling %u blocks of space '%s', all that "
                            "client_quota allows; seal or free some",
                            limit, space->name);
}

/* The other space of its domain that uses most memory; NULL if no other uses any. */
static const struct space *uses_most(const struct space *space) {
        const struct domain *d = space->domain;
        const struct space *most = NULL;
        uint64_t bytes = 0, n;

        for (uint32_t i = 0; i < d->spaces.n; i++) {
                const struct space *s = d->spaces.at[i].space;

                n = s->memory.n_with_memory * s->ix->segment_bytes;
                if (s != space && n > bytes) {
                        most = s;
                        bytes = n;
                }
        }
        return most;
}

/* Says why the system gave no memory, and what to do about it. */
static int refuse_memory(struct space *space, int error) {
        if (error == -EMFILE || error == -ENFILE)
                return store_refuse(space_store(space), -ENOBUFS,
                                    "kvd has no file descriptor left for more memory of space "
                                    "'%s' (%s); raise its LimitNOFILE, or delete spaces",
                                    space->name, strerror(-error));
        return store_refuse(
                space_store(space), -ENOBUFS,
                "the system gives no memory for the pool (%s); set pool below what is free",
                strerror(-error));
}

/* Blocks that two sessions pin count twice, so it may be less. */
static void tell_pinned(const struct space *space, char *text, size_t size) {
        uint64_t n = space->account.used[KVD_COST_session_pins] / space->ix->block_bytes;

        if (n)
                snprintf(text, size, "sessions pin up to %llu (see kvctl sessions); ",
                         (unsigned long long)n);
}

static int refuse_full(struct space *space, int error) {
        const struct space *other = uses_most(space);
        char others[2 * KVD_NAME_MAX + 64] = "", pinned[80] = "";

        space_count(space, KVD_SPACE_REFUSED_FULL, 1);
        space->pressure.starved = true;
        if (error < 0)
                return refuse_memory(space, error);
        if (other)
                snprintf(others, sizeof others, "space '%s' has %llu MiB and can spare none; ",
                         other->name,
                         (unsigned long long)(other->memory.n_with_memory *
                                              other->ix->segment_bytes) >>
                                 20);
        tell_pinned(space, pinned, sizeof pinned);
        return store_refuse(space_store(space), -ENOBUFS,
                            "space '%s' has no block left: %llu are being filled, %llu are sealed "
                            "and in use; %s%sfree or unpin some, or raise pool or quota",
                            space->name,
                            (unsigned long long)(space->count[KVD_FILLING] +
                                                 space->count[KVD_LIMBO]),
                            (unsigned long long)space->count[KVD_SEALED], pinned, others);
}

static int allocate(struct attachment *a, uint32_t n, kvd_ref *ret) {
        struct space *space = a->space;
        uint32_t limit = fill_limit(space), reads = 0, got = 0, id;
        int grows = a->home ? 2 : -1, tries = 2, r = 0;

        space_tick(space);
        a->arena->home = a->home;
        if (a->tenant->n_filling >= limit)
                return refuse_quota(space, limit);
        n = MIN(n, limit - a->tenant->n_filling);
        while (got < n) {
                id = pop_for(a, n - got, &grows);
                if (id == NONE && grows == 0)
                        break;
                if (id == NONE) {
                        reads = KVD_PIN_READS;
                        r = tries-- ? find_room(space, a->arena, n - got, &reads) : 0;
                        if (r <= 0)
                                break;
                        continue;
                }
                block_fill_begin(space, id, a);
                ret[got++] = block_ref(space, id);
        }
        if (!got)
                return r == -EAGAIN || posts_take_left(space) ? 0 : refuse_full(space, r);
        space_count(space, KVD_SPACE_ALLOCATED, got);
        return (int)got;
}

int space_allocate(struct attachment *a, uint32_t n, kvd_ref *ret) {
        int r = allocate(a, n, ret);

        available_tell(a);
        return r;
}

uint32_t space_release(struct attachment *a, const kvd_ref *blocks, uint32_t n) {
        struct space *space = a->space;
        uint32_t released = 0;

        for (uint32_t i = 0; i < n; i++) {
                uint32_t id = kvd_ref_id(blocks[i]);

                if (!block_filled_by(a, blocks[i]))
                        continue;
                if (a->withholds) {
                        block_to_limbo(a, id);
                } else {
                        block_fill_end(space, id);
                        block_discard(space, id);
                }
                released++;
        }
        space_count(space, KVD_SPACE_RELEASED, released);
        available_tell(a);
        return released;
}
