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

/* A segment's memory from elsewhere: 1, 0: there is none, -EAGAIN: there may be one. */
static int reclaim(struct space *space, struct arena *arena, uint32_t *reads) {
        int r = space_reclaim(space, reads);

        return r ? r : arena_reclaim(space, arena, reads);
}

/* Blocks freed, 0: all are in use, -EAGAIN: not all were looked at. */
static int evict(struct space *space, struct arena *arena, uint32_t want, uint32_t *reads) {
        uint32_t evicted = evict_coldest(space, arena, want, reads);

        return evicted ? (int)evicted : evict_goes_on(arena, *reads) ? -EAGAIN : 0;
}

/* Memory that nobody has. -EAGAIN: some is on its way from spaces that were deleted. */
static int grow(struct space *space, struct arena *arena, uint64_t bytes) {
        int r = space_grow(space, arena, bytes);
        bool more;

        if (r || !space_may_inherit(space))
                return r;
        more = store_bury(space_store(space));
        r = space_grow(space, arena, bytes);
        return r == 0 && more ? -EAGAIN : r;
}

/*
 * Makes at least one block free for the arena, by the means that costs least. 0 or an error: there
 * is none; -EAGAIN: that is not known yet. *reads: what it may cost, and what is left of that.
 */
static int find_room(struct space *space, struct arena *arena, uint32_t want, uint32_t *reads) {
        uint64_t bytes = want * space->ix->block_bytes;
        uint32_t half = *reads / 2, rest = *reads - half;
        int r = grow(space, arena, bytes), reclaimed, evicted;

        reclaimed = r == 0 ? reclaim(space, arena, &half) : 0;
        if (reclaimed > 0)
                r = space_grow(space, arena, bytes);
        if (r <= 0 && r != -EAGAIN) {
                evicted = evict(space, arena, want, &rest);
                r = evicted ? evicted : reclaimed < 0 ? reclaimed : r;
        }
        *reads = r == -EAGAIN ? 0 : half + rest;
        return r;
}

/* Takes a free block. What is nobody's any more goes for it if need be, but nothing else. */
static uint32_t pop_or_sweep(struct space *space, struct arena *arena) {
        uint32_t id = block_pop_free(space, arena);

        if (id == NONE && (garbage_sweep(space, SWEEP) || attachments_give(space)))
                id = block_pop_free(space, arena);
        return id;
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
        uint32_t limit = fill_limit(space), reads = 0, got = 0, id;
        int tries = 2, r = 0;

        space_tick(space);
        if (a->tenant->n_filling >= limit)
                return refuse_quota(space, limit);
        n = MIN(n, limit - a->tenant->n_filling);
        while (got < n) {
                id = pop_or_sweep(space, a->arena);
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
                return r == -EAGAIN ? 0 : refuse_full(space, r);
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
