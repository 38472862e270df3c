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

#include "store/account.h"
#include "store/cache/inside.h"
#include "store/cache/memory.h"

/* of memory prepared at once: well under a millisecond to two */
#define STEP_BYTES (UINT64_C(2) << 20)
#define STEP_BLOCKS 2048u /* ... if they are so small: each has a descriptor to be written */
#define AHEAD_BYTES (UINT64_C(16) << 20) /* kept ready before it is asked for */

static const struct memory_ops *memory_of(const struct space *space) {
        return space_store(space)->memory;
}

static void charge(struct space *space, int64_t sign) {
        account_add(space, KVD_COST_pool, (uint64_t)sign * space->ix->segment_bytes);
        space->memory.n_with_memory += (uint32_t)sign;
}

/* ---- giving memory back ---------------------------------------------------------------------- */

/* Takes a segment's memory off the budget. False: not yet. */
static bool let_go(struct space *space, struct segment *segment) {
        if (!memory_of(space)->let_go(space, segment))
                return false;
        segment->arena->n_ready -= segment->n_ready;
        segment->n_ready = segment->n_worn_out = 0;
        charge(space, -1);
        return true;
}

/*
 * Gives it up for good, a piece a call; false: it is done. Clients that have it mapped keep what
 * they have mapped.
 */
bool segment_bury(struct space *space, struct segment *segment) {
        if (space->memory.left)
                return memory_of(space)->bury(space, segment);
        if (memory_of(space)->idle(space_store(space)))
                return true;
        if (segment->n_ready || segment == space->memory.returning) {
                space->memory.returning = NULL;
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

        n = (uint32_t)MIN(MIN(n, STEP_BLOCKS), room);
        r = n ? memory_of(space)->fill(space, segment, segment->n_ready, n) : 0;
        if (r < 0)
                return r;
        for (uint32_t i = 0; i < n; i++)
                block_append_free(space, first_block(space, segment) + segment->n_ready + i);
        segment->n_ready += n;
        segment->arena->n_ready += n;
        return (int)n;
}

/* The last of a segment's blocks has no memory any more; it was free, or worn out. */
static void end_block(struct space *space, struct segment *segment) {
        uint32_t id = first_block(space, segment) + --segment->n_ready;

        segment->arena->n_ready--;
        if (space->blocks[id].state == KVD_FREE) {
                block_list_remove(space, &segment->free, id);
                block_set_state(space, id, KVD_ABSENT, block_generation(space, id));
        } else {
                segment->n_worn_out--;
        }
}

#define RETURN_BLOCKS 4096u /* in one call: each has a descriptor to be written */

/*
 * A piece of giving back the segment that was chosen for it; its ids and its address space stay. 1:
 * that is done, -EAGAIN: not yet. What is begun goes on in any case, when there is time.
 */
static int go_on_returning(struct space *space) {
        struct segment *segment = space->memory.returning;

        space_is_busy(space);
        for (uint32_t i = 0; segment->n_ready && i < RETURN_BLOCKS; i++)
                end_block(space, segment);
        if (segment->n_ready || !let_go(space, segment))
                return -EAGAIN;
        space->memory.returning = NULL;
        space_count(space, KVD_SPACE_SEGMENTS_RETURNED, 1);
        return 1;
}

/* Nobody gets blocks of a segment that is given back. */
static int begin_returning(struct space *space, struct segment *segment) {
        kvd_list_remove(&segment->avail);
        space->memory.returning = segment;
        return go_on_returning(space);
}

/* ---- growing --------------------------------------------------------------------------------- */

/*
 * May this arena use the address space of a segment without memory? Its own, or one whose writer is
 * gone.
 */
static bool may_adopt(const struct segment *segment, const struct arena *arena) {
        return segment->n_ready == 0 && segment != arena->space->memory.returning &&
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

                if (s != space->memory.returning && s->arena == arena && s->n_ready > 0 &&
                    s->n_ready < room_for(space, s))
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
                segment = !space->memory.returning && segments_to_come(space) ?
                                  empty_segment(space, arena) :
                                  NULL;
                if (!segment)
                        return 0;
                r = begin_segment(space, segment, arena);
                if (r < 0)
                        return r == -EAGAIN ? 0 : r;
        }
        r = segment_fill(space, segment, MIN(bytes, STEP_BYTES));
        if (r <= 0 && segment->n_ready == 0)
                begin_returning(space, segment);
        return r;
}

/* ---- what was there before ------------------------------------------------------------------- */

int segment_adopt(struct space *space, struct segment *segment, uint32_t n_ready, uint32_t version,
                  int *fd) {
        int r = memory_of(space)->adopt(space, segment, version, fd);

        if (r < 0)
                return r;
        segment->n_ready = n_ready;
        segment->arena->n_ready += n_ready;
        charge(space, 1);
        return 0;
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

static bool wholly_free(const struct segment *segment) {
        return segment->n_ready && segment->free.n + segment->n_worn_out == segment->n_ready;
}

/* Are all of its blocks free, or sealed and in nobody's use? Goes on where it stopped. */
static bool found_unused(struct space *space, struct segment *segment, uint32_t *reads) {
        uint32_t first = first_block(space, segment), *i = &space->memory.unused;

        for (; *i < segment->n_ready && *reads; ++*i) {
                enum kvd_state state = space->blocks[first + *i].state;

                *reads -= 1;
                if (state != KVD_FREE && state != KVD_ABSENT &&
                    (state != KVD_SEALED || block_in_use(space, first + *i, reads)))
                        return false;
        }
        return true;
}

/*
 * Evicts a block and whatever hangs on it. False: something of it is in use, or the reads are at
 * their end, and the next call goes on where this one stopped.
 */
static bool empty_block(struct space *space, uint32_t id, uint32_t *reads) {
        kvd_ref *stopped = &space->memory.stopped;
        uint32_t at = *stopped && block_current(space, *stopped) ? kvd_ref_id(*stopped) : NONE,
                 evicted = 0;
        bool gone = evict_subtree(space, id, &at, reads, &evicted);

        *stopped = at == NONE ? 0 : block_ref(space, at);
        return gone;
}

/* Evicts all of it, and whatever hangs on it elsewhere. False: one of them is in use. */
static bool empty_out(struct space *space, struct segment *segment, uint32_t *reads) {
        uint32_t first = first_block(space, segment), *i = &space->memory.emptied;

        for (; *i < space->memory.unused && *reads; ++*i) {
                *reads -= 1;
                if (space->blocks[first + *i].state == KVD_SEALED &&
                    !empty_block(space, first + *i, reads))
                        return space->memory.stopped != 0;
        }
        return true;
}

/* 1: all of it is free, 0: it cannot be had, -EAGAIN: that takes another call. */
static int try_segment(struct space *space, struct segment *segment, uint32_t *reads) {
        if (!wholly_free(segment) && (!found_unused(space, segment, reads) ||
                                      !empty_out(space, segment, reads)))
                return 0;
        return wholly_free(segment) ? 1 : *reads ? 0 : -EAGAIN;
}

static void next_segment(struct space *space) {
        space->memory.hand++;
        space->memory.unused = space->memory.emptied = 0;
        space->memory.stopped = 0;
}

/*
 * Gives one segment's memory back to the pool; among which, the caller says. A hand goes round the
 * segments, and stays where the reads of a call end. 0: it went round in vain. As *_reclaim.
 */
static int return_one_segment(struct space *space,
                              bool (*among)(const struct segment *, const void *), const void *arg,
                              uint32_t *reads) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);

        if (space->memory.returning)
                return go_on_returning(space);
        for (; space->memory.given_up < n; space->memory.given_up++, next_segment(space)) {
                struct segment *segment = &space->memory.segments[space->memory.hand % n];
                int r = among(segment, arg) ? try_segment(space, segment, reads) : 0;

                if (r < 0)
                        return r;
                if (r == 0)
                        continue;
                next_segment(space);
                space->memory.given_up = 0;
                return begin_returning(space, segment);
        }
        space->memory.given_up = 0;
        return 0;
}

static bool any_segment(const struct segment *segment, const void *arg) {
        return true;
}

/*
 * May `space` take a segment from `donor`? Only if that keeps what its domain is guaranteed, and has
 * clearly more, or has what others are guaranteed.
 */
static bool may_take(const struct space *space, const struct space *donor) {
        const struct domain *d = donor->domain;

        if (donor == space || donor->memory.n_with_memory == 0)
                return false;
        if (d != space->domain && d->used[KVD_COST_pool] - donor->ix->segment_bytes <
                                          domain_guaranteed(d, KVD_COST_pool))
                return false;
        if (d != space->domain && account_below_guarantee(space->domain, KVD_COST_pool))
                return true;
        return donor->memory.n_with_memory * donor->ix->segment_bytes >
               space->memory.n_with_memory * space->ix->segment_bytes + space->ix->segment_bytes;
}

static bool quota_used_up(const struct domain *domain, uint64_t bytes) {
        uint64_t used = domain->used[KVD_COST_pool];

        return used && used + bytes > domain_most(domain, KVD_COST_pool);
}

/*
 * Others' only while its domain may have more: else it would work, and wait, for what it does not
 * get.
 */
bool space_may_inherit(const struct space *space) {
        bool own_domain_only = quota_used_up(space->domain, space->ix->segment_bytes);

        if (total_blocks(space) >= space->memory.max_blocks)
                return false;
        for (const struct space *s = space_store(space)->deleted; s; s = s->next)
                if (s->domain == space->domain || !own_domain_only)
                        return true;
        return false;
}

int space_reclaim(struct space *space, uint32_t *reads) {
        bool own_domain_only = quota_used_up(space->domain, space->ix->segment_bytes);
        struct space *best = NULL;

        if (total_blocks(space) >= space->memory.max_blocks ||
            memory_of(space)->scarce(space_store(space)))
                return 0;
        for (struct domain *d = space_store(space)->domains; d; d = d->next)
                for (uint32_t i = 0; i < d->spaces.n; i++) {
                        struct space *s = d->spaces.at[i].space;

                        if ((d == space->domain || !own_domain_only) && may_take(space, s) &&
                            (!best || s->memory.n_with_memory * s->ix->segment_bytes >
                                      best->memory.n_with_memory * best->ix->segment_bytes))
                                best = s;
                }
        return best ? return_one_segment(best, any_segment, NULL, reads) : 0;
}

/*
 * Under isolation = arena, a segment can be spared if its writer is gone, or if it is another's and
 * empty.
 */
static bool spare_segment(const struct segment *segment, const void *arg) {
        const struct arena *arena = arg;

        return segment->arena != arena && (!segment->arena->writer || wholly_free(segment));
}

int arena_reclaim(struct space *space, struct arena *arena, uint32_t *reads) {
        return space->ix->arena ? return_one_segment(space, spare_segment, arena, reads) : 0;
}

bool space_tidy(struct space *space) {
        return memory_of(space)->tidy(space);
}

bool space_trim(struct space *space) {
        uint32_t reads = KVD_PIN_READS;

        if (space->memory.returning)
                return go_on_returning(space) != 0;
        return space_has_too_much(space) &&
               return_one_segment(space, any_segment, NULL, &reads) != 0;
}
