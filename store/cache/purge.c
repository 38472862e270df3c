/* SPDX-License-Identifier: Apache-2.0 */

/* Evicts blocks on request (kvctl evict): the coldest ones of a space, or a chain. */

#include <errno.h>

#include "store/cache/inside.h"

/* The block where the last call for this chain stopped, if it is still there. */
static uint32_t stopped_at(const struct space *space, kvd_ref chain) {
        const struct leaves *leaves = &space->leaves;

        return leaves->chain == chain && leaves->at && block_current(space, leaves->at) ?
                       kvd_ref_id(leaves->at) :
                       NONE;
}

static int64_t evict_chain(struct space *space, kvd_ref chain, uint32_t *reads, bool *more) {
        uint32_t id = kvd_ref_id(chain), at, evicted = 0;

        if (id >= space->ix->capacity || space->blocks[id].state != KVD_SEALED ||
            block_ref(space, id) != chain)
                return store_refuse(space_store(space), -ENOENT,
                                    "block %u of generation %u is not cached (any more)", id,
                                    kvd_ref_generation(chain));
        at = stopped_at(space, chain);
        evict_subtree(space, id, &at, reads, &evicted);
        *more = at != NONE;
        space->leaves.chain = chain;
        space->leaves.at = *more ? block_ref(space, at) : 0;
        return evicted;
}

#define EVICT_PIECE 4096u

/* Arenas whose leaves are known to be in use come last. */
static uint32_t evict_anywhere(struct space *space, uint32_t n, uint32_t *reads) {
        uint32_t evicted = 0;

        if (space->unready.n_pending)
                semaphores_look(space);
        for (int known = 0; known < 2; known++)
                for (struct arena *arena = space->memory.arenas; arena; arena = arena->next)
                        if (arena_worth_looking(arena) == !known)
                                evicted += evict_coldest(space, arena, n - evicted, reads);
        return evicted;
}

static bool any_worth_looking(const struct space *space) {
        for (struct arena *arena = space->memory.arenas; arena; arena = arena->next)
                if (arena_worth_looking(arena))
                        return true;
        return false;
}

int64_t space_evict(struct space *space, uint64_t n, kvd_ref chain, bool *more) {
        uint32_t want = (uint32_t)(n ? MIN(n, EVICT_PIECE) : EVICT_PIECE), evicted;
        uint32_t reads = KVD_PIN_READS;

        *more = false;
        if (chain != KVD_ROOT)
                return evict_chain(space, chain, &reads, more);
        evicted = evict_anywhere(space, want, &reads);
        *more = (evicted == want ? want != n : !reads) && any_worth_looking(space);
        return evicted;
}
