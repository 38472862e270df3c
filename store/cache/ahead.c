/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefetches for eviction. Candidates were not used for long, so their data is in no cache of the
 * processor. This file guesses which blocks are evicted next, and prefetches all that this will
 * touch, for several at once. A wrong guess costs only time.
 */

#include "store/cache/inside.h"

#define GUESSES 16u
#define LINES 256u /* cache lines prefetched at once: half of a first-level cache */

#define STEPS 3u /* further blocks, if a chain's ids are evenly spaced as in new memory */

static void fetch_block(const struct space *space, uint32_t id) {
        if (id < space->ix->capacity)
                __builtin_prefetch(&space->blocks[id], 1);
}

/* Most chains are evicted from their end: an only child's parent is next. Else the heap's next. */
static uint32_t guess_next(const struct space *space, const struct arena *arena, uint32_t id,
                           uint32_t *at) {
        const struct block *b = &space->blocks[id];

        if (b->parent != NONE && b->sib_prev == NONE && b->sib_next == NONE) {
                fetch_block(space, b->parent + STEPS * (b->parent - id));
                return b->parent;
        }
        return ++*at < arena->n_heap ? arena->heap[*at] : NONE;
}

/*
 * Prefetches a block's descriptor, and its words in the clients' pin pages. Returns how many cache
 * lines the block takes.
 */
static uint32_t fetch_words(const struct space *space, uint32_t id) {
        __builtin_prefetch(kvd_index_desc(space->ix, id), 1);
        return 3 + users_fetch(space, id);
}

uint32_t evict_ahead(const struct space *space, const struct arena *arena, uint32_t n_wanted) {
        uint32_t most = MIN(n_wanted, GUESSES), n = 0, at = 0, lines = 0;
        uint32_t ids[GUESSES];

        for (uint32_t id = arena->heap[0]; id != NONE && n < most && lines < LINES;
             id = guess_next(space, arena, id, &at)) {
                lines += fetch_words(space, id);
                ids[n++] = id;
        }
        for (uint32_t i = 0; i < n; i++)
                index_fetch_entry(space, ids[i]);
        for (uint32_t i = 0; i < n; i++)
                index_fetch_run(space, ids[i]);
        return n;
}
