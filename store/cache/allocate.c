/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Clients get blocks to fill here. Room for them comes from where it costs least: a free block;
 * more memory, while pool, quota and max_blocks allow it; memory of a larger space; the coldest
 * blocks of this one. If all of that fails, the request is refused.
 */

#include <errno.h>
#include <string.h>

#include "store/cache/inside.h"

#define SWEEP 256u /* private blocks without an owner, freed before anything else is looked for */

static void tick(struct space *space) {
        space->clock++;
        atomic_store_explicit(&space->ix->clock, (uint32_t)space->clock, memory_order_relaxed);
}

/*
 * Makes at least one block free for the arena, by the means that costs least. 0 or an error: there
 * is none.
 */
static int find_room(struct space *space, struct arena *arena, uint32_t want) {
        uint64_t bytes = want * space->ix->block_bytes;
        int r = space_grow(space, arena, bytes);
        uint32_t evicted;

        while (r == 0 && store_bury(space_store(space)))
                r = space_grow(space, arena, bytes);
        if (r == 0 && (space_reclaim(space) || arena_reclaim(space, arena)))
                r = space_grow(space, arena, bytes);
        if (r > 0)
                return r;
        evicted = evict_coldest(space, arena, want);
        return evicted ? (int)evicted : r;
}

/* Takes a free block. Garbage goes for it if need be, but nothing else. */
static uint32_t pop_or_sweep(struct space *space, struct arena *arena) {
        uint32_t id = block_pop_free(space, arena);

        return id == NONE && garbage_sweep(space, SWEEP) ? block_pop_free(space, arena) : id;
}

kvd_ref room_take(struct space *space, struct arena *arena) {
        uint32_t id = pop_or_sweep(space, arena);

        if (id == NONE && find_room(space, arena, 1) > 0)
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
                            "this client is filling %u blocks of space '%s', all that "
                            "client_quota allows; seal or free some",
                            limit, space->name);
}

static int refuse_full(struct space *space, int error) {
        space_count(space, KVD_SPACE_REFUSED_FULL, 1);
        space->pressure.starved = true;
        if (error < 0)
                return store_refuse(space_store(space), -ENOBUFS,
                                    "the system gives no memory for the pool (%s); set "
                                    "pool below what is free",
                                    strerror(-error));
        return store_refuse(space_store(space), -ENOBUFS,
                            "space '%s' has no block left: %llu are being filled, %llu "
                            "are sealed and in use; let some go, or raise pool or quota",
                            space->name,
                            (unsigned long long)(space->count[KVD_FILLING] +
                                                 space->count[KVD_LIMBO]),
                            (unsigned long long)space->count[KVD_SEALED]);
}

static int allocate(struct attachment *a, uint32_t n, kvd_ref *ret) {
        struct space *space = a->space;
        uint32_t limit = fill_limit(space), got = 0, id;
        int tries = 2, r = 0;

        tick(space);
        if (a->filling.n >= limit)
                return refuse_quota(space, limit);
        n = MIN(n, limit - a->filling.n);
        while (got < n) {
                id = pop_or_sweep(space, a->arena);
                if (id == NONE) {
                        r = tries-- ? find_room(space, a->arena, n - got) : 0;
                        if (r <= 0)
                                break;
                        continue;
                }
                block_fill_begin(space, id, a);
                ret[got++] = block_ref(space, id);
        }
        if (!got)
                return refuse_full(space, r);
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
                block_fill_end(space, id);
                block_discard(space, id);
                released++;
        }
        space_count(space, KVD_SPACE_RELEASED, released);
        available_tell(a);
        return released;
}
