/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This file decides which space has how much of the pool. A segment's address space is fixed and
 * its memory comes and goes (memory.h says from where): blocks appear in it a few MiB at a time, so
 * that no request waits long, and when all of them are free it can go to another space. Segments
 * belong to one space and therefore to one domain for ever: bytes never change tenants.
 *
 * The daemon does not map the pool. What clients write into a block is none of its business.
 */

#include <errno.h>
#include <string.h>

#include "store/cache/inside.h"
#include "store/cache/memory.h"

/* of memory prepared at once: well under a millisecond to two */
#define STEP_BYTES (UINT64_C(2) << 20)
#define AHEAD_BYTES (UINT64_C(16) << 20) /* kept ready before it is asked for */

static const struct memory_ops *memory_of(const struct space *space) {
        return space_store(space)->memory;
}

static void charge(struct space *space, int64_t sign) {
        uint64_t bytes = space->ix->segment_bytes;

        space_store(space)->used += (uint64_t)sign * bytes;
        space->domain->used += (uint64_t)sign * bytes;
        space->memory.n_with_memory += (uint32_t)sign;
}

/* ---- giving memory back ---------------------------------------------------------------------- */

/* Takes a segment's memory off the budget; it has no blocks any more. */
static void let_go(struct space *space, struct segment *segment) {
        memory_of(space)->let_go(space, segment);
        segment->arena->n_ready -= segment->n_ready;
        segment->n_ready = 0;
        charge(space, -1);
}

/*
 * Gives it up for good, a piece a call; false: it is done. Clients that have it mapped keep what
 * they have mapped.
 */
bool segment_bury(struct space *space, struct segment *segment) {
        if (segment->n_ready) {
                let_go(space, segment);
                return true;
        }
        return memory_of(space)->bury(space, segment);
}

/* Counts the blocks that have memory, in the whole space. */
static uint64_t total_blocks(const struct space *space) {
        return space->count[KVD_FREE] + space->count[KVD_FILLING] + space->count[KVD_SEALED] +
               space->count[KVD_RETIRING] + space->count[KVD_LIMBO];
}

static uint32_t first_block(const struct space *space, const struct segment *segment) {
        return kvd_segment_first(space->ix, segment->number);
}

static uint32_t room_for(const struct space *space, const struct segment *segment) {
        return kvd_segment_end(space->ix, segment->number) - first_block(space, segment);
}

/*
 * Puts memory behind the next blocks of a segment that is charged already. Returns how many, or an
 * error.
 */
static int segment_fill(struct space *space, struct segment *segment, uint64_t bytes) {
        uint64_t room = space->memory.max_blocks -
                        MIN(space->memory.max_blocks, total_blocks(space));
        uint32_t n = (uint32_t)MIN(MAX(bytes / space->ix->block_bytes, 1),
                                   room_for(space, segment) - segment->n_ready);
        int r;

        n = (uint32_t)MIN(n, room);
        r = n ? memory_of(space)->fill(space, segment, segment->n_ready, n) : 0;
        if (r < 0)
                return r;
        for (uint32_t i = 0; i < n; i++)
                block_append_free(space, first_block(space, segment) + segment->n_ready + i);
        segment->n_ready += n;
        segment->arena->n_ready += n;
        return (int)n;
}

/*
 * A segment all of whose blocks are free gives its memory back; its ids and its address space stay.
 */
static void segment_return(struct space *space, struct segment *segment) {
        uint32_t first = first_block(space, segment);

        for (uint32_t i = 0; i < segment->n_ready; i++)
                block_set_state(space, first + i, KVD_ABSENT, block_generation(space, first + i));
        kvd_list_remove(&segment->avail);
        segment->free = (struct block_list){0};
        let_go(space, segment);
        space_count(space, KVD_SPACE_SEGMENTS_RETURNED, 1);
}

/* ---- growing --------------------------------------------------------------------------------- */

static bool within_budget(const struct space *space) {
        const struct store *store = space_store(space);
        const struct domain *domain = space->domain;
        uint64_t bytes = space->ix->segment_bytes;
        uint64_t quota = domain->config.quota ? domain->config.quota : store->config.pool_bytes;

        /*
         * The first segment of a small quota may be larger than it: max_blocks keeps its use below.
         */
        return store->used + bytes <= store->config.pool_bytes &&
               (domain->used == 0 || domain->used + bytes <= quota);
}

/*
 * May this arena use the address space of a segment without memory? Its own, or one whose writer is
 * gone.
 */
static bool may_adopt(const struct segment *segment, const struct arena *arena) {
        return segment->n_ready == 0 &&
               (segment->arena == arena || (arena->space->ix->arena && !segment->arena->writer));
}

/*
 * Finds a segment that has address space but no memory, or a new one. NULL: the space is at its
 * end.
 */
static struct segment *empty_segment(struct space *space, struct arena *arena) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed), best = 0;
        struct segment *found = NULL;

        for (uint32_t i = 0; i < MIN(n + 1, space->ix->max_segments); i++) {
                struct segment *s = &space->memory.segments[i];
                uint32_t how = i == n || may_adopt(s, arena) ? memory_of(space)->vacant(space, s) :
                                                               0;

                if (how > best) {
                        best = how;
                        found = s;
                }
        }
        return found;
}

/* -EAGAIN: there is no memory at present. */
static int begin_segment(struct space *space, struct segment *segment, struct arena *arena) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);
        int r = memory_of(space)->begin(space, segment);

        if (r < 0)
                return r;
        segment->arena = arena;
        charge(space, 1);
        /* clients fetch its descriptor when they meet one of its blocks */
        if (segment->number == n)
                atomic_store_explicit(&space->ix->n_segments, n + 1, memory_order_release);
        space_count(space, KVD_SPACE_SEGMENTS_ADDED, 1);
        return 0;
}

static struct segment *unfinished_segment(struct space *space, struct arena *arena) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);

        for (uint32_t i = n; i-- > 0;) {
                struct segment *s = &space->memory.segments[i];

                if (s->arena == arena && s->n_ready > 0 && s->n_ready < room_for(space, s))
                        return s;
        }
        return NULL;
}

/*
 * Makes blocks ready. Returns how many, 0 if quota, pool or max_blocks are at their end, or an
 * error of the system.
 */
int space_grow(struct space *space, struct arena *arena, uint64_t bytes) {
        struct segment *segment = unfinished_segment(space, arena);
        int r;

        if (total_blocks(space) >= space->memory.max_blocks)
                return 0;
        if (!segment) {
                segment = within_budget(space) ? empty_segment(space, arena) : NULL;
                if (!segment)
                        return 0;
                r = begin_segment(space, segment, arena);
                if (r < 0)
                        return r == -EAGAIN ? 0 : r;
        }
        r = segment_fill(space, segment, MIN(bytes, STEP_BYTES));
        if (r <= 0 && segment->n_ready == 0)
                segment_return(space, segment);
        return r;
}

/* ---- ahead of need --------------------------------------------------------------------------- */

bool space_fill_ahead(struct space *space) {
        struct segment *segment;

        for (struct arena *arena = space->memory.arenas; arena; arena = arena->next) {
                segment = unfinished_segment(space, arena);
                if (segment && space->count[KVD_FREE] * space->ix->block_bytes < AHEAD_BYTES)
                        return segment_fill(space, segment, STEP_BYTES) > 0;
        }
        return false;
}

/* ---- taking memory back ---------------------------------------------------------------------- */

#define RECLAIM_LOOKS 32768u /* blocks looked at in one call */
#define RECLAIM_BUDGET 8192u /* blocks looked at for one segment */

/*
 * Evicts everything in a segment and whatever hangs on it elsewhere. Stops at the first pinned
 * block.
 */
static bool empty_out(struct space *space, struct segment *segment) {
        uint32_t first = first_block(space, segment), budget = RECLAIM_BUDGET, evicted = 0;

        for (uint32_t i = 0; i < segment->n_ready; i++) {
                if (space->blocks[first + i].state == KVD_SEALED &&
                    !evict_subtree(space, first + i, &budget, &evicted))
                        return false;
                if (space->blocks[first + i].state != KVD_FREE)
                        return false;
        }
        return true;
}

static bool worth_emptying(const struct space *space, const struct segment *segment) {
        uint32_t first = first_block(space, segment);

        for (uint32_t i = 0; i < segment->n_ready; i++) {
                const struct block *b = &space->blocks[first + i];

                if ((b->state != KVD_FREE && b->state != KVD_SEALED) ||
                    block_pinned(space, first + i, NULL))
                        return false;
        }
        return segment->n_ready > 0;
}

static bool wholly_free(const struct segment *segment) {
        return segment->n_ready && segment->free.n == segment->n_ready;
}

/*
 * Gives one segment's memory back to the pool; among which, the caller says. A hand goes round the
 * segments, and a call looks at a bounded number of blocks, so that one in a large space full of
 * pins does not take long.
 */
static bool return_one_segment(struct space *space,
                               bool (*among)(const struct segment *, const void *),
                               const void *arg) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed),
                 looks = RECLAIM_LOOKS;

        for (uint32_t i = 0; i < n && looks; i++) {
                struct segment *segment = &space->memory.segments[space->memory.hand++ % n];

                looks -= MIN(looks, segment->n_ready);
                if (!among(segment, arg) || !worth_emptying(space, segment))
                        continue;
                if (wholly_free(segment) || empty_out(space, segment)) {
                        segment_return(space, segment);
                        return true;
                }
        }
        return false;
}

static bool any_segment(const struct segment *segment, const void *arg) {
        return true;
}

/*
 * May `space` take a segment from `donor`? Only if that has clearly more, and keeps what its domain
 * is guaranteed.
 */
static bool may_take(const struct space *space, const struct space *donor) {
        const struct domain *d = donor->domain;

        if (donor == space || donor->memory.n_with_memory == 0)
                return false;
        if (d != space->domain && d->used - donor->ix->segment_bytes < d->config.guarantee)
                return false;
        return donor->memory.n_with_memory * donor->ix->segment_bytes >
               space->memory.n_with_memory * space->ix->segment_bytes + space->ix->segment_bytes;
}

static bool quota_used_up(const struct domain *domain, uint64_t bytes) {
        return domain->config.quota && domain->used && domain->used + bytes > domain->config.quota;
}

bool space_reclaim(struct space *space) {
        bool own_domain_only = quota_used_up(space->domain, space->ix->segment_bytes);
        struct space *best = NULL;

        if (total_blocks(space) >= space->memory.max_blocks ||
            memory_of(space)->scarce(space_store(space)))
                return false;
        for (struct domain *d = space_store(space)->domains; d; d = d->next)
                for (struct space *s = d->spaces; s; s = s->next)
                        if ((d == space->domain || !own_domain_only) && may_take(space, s) &&
                            (!best || s->memory.n_with_memory * s->ix->segment_bytes >
                                      best->memory.n_with_memory * best->ix->segment_bytes))
                                best = s;
        return best && return_one_segment(best, any_segment, NULL);
}

/*
 * Under isolation = arena, a segment can be spared if its writer is gone, or if it is another's and
 * empty.
 */
static bool spare_segment(const struct segment *segment, const void *arg) {
        const struct arena *arena = arg;

        return segment->arena != arena && (!segment->arena->writer || wholly_free(segment));
}

bool arena_reclaim(struct space *space, struct arena *arena) {
        return space->ix->arena && return_one_segment(space, spare_segment, arena);
}

bool space_trim(struct space *space) {
        return total_blocks(space) >=
                       (uint64_t)space->memory.max_blocks + space->ix->segment_blocks &&
               return_one_segment(space, any_segment, NULL);
}
