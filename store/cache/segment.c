/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A space grows by segments. A segment's address range is fixed; its memory comes and goes
 * (memory.h). Its blocks get memory a few MiB at a time, so that no request waits long, and
 * when all of them are free its memory can go to another space (take.c). A segment belongs to one
 * space, and so to one domain, for ever: no data of one domain reaches another.
 *
 * The daemon cannot read the pool, and does not look at what clients write into a block.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/numa.h"
#include "store/account.h"
#include "store/cache/inside.h"
#include "store/cache/memory.h"

/* prepared at once: takes up to 2 ms */
#define STEP_BYTES (UINT64_C(2) << 20)
#define STEP_BLOCKS 2048u                /* prepared at once: each has a descriptor to be written */
#define AHEAD_BYTES (UINT64_C(16) << 20) /* of free blocks, kept ready for allocations */

static const struct memory_ops *memory_of(const struct space *space) {
        return space_store(space)->memory;
}

static void charge(struct space *space, int64_t sign) {
        account_add(space, KVD_COST_pool, (uint64_t)sign * space->ix->segment_bytes);
        space->memory.n_with_memory += (uint32_t)sign;
        space_count_unused(space);
}

/* ---- giving memory back ---------------------------------------------------------------------- */

/* Releases a segment's memory and its charge. False: not yet. */
static bool let_go(struct space *space, struct segment *segment) {
        if (!memory_of(space)->let_go(space, segment))
                return false;
        segment->arena->n_ready -= segment->n_ready;
        segment->n_ready = segment->n_worn_out = 0;
        segment->n_found = 0; /* or the end of the current round would call it held */
        segment_keeps(space, segment, 0, 0);
        charge(space, -1);
        return true;
}

/* Frees a segment of a deleted space, a piece a call; false: done. Clients keep their mappings. */
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

uint64_t blocks_with_memory(const struct space *space) {
        return space->count[KVD_FREE] + space->count[KVD_FILLING] + space->count[KVD_SEALED] +
               space->count[KVD_RETIRING] + space->count[KVD_LIMBO];
}

static uint32_t first_block(const struct space *space, const struct segment *segment) {
        return kvd_segment_first(space->ix, segment->number);
}

static uint32_t room_for(const struct space *space, const struct segment *segment) {
        return kvd_segment_end(space->ix, segment->number) - first_block(space, segment);
}

/* Gives memory to the next blocks of a charged segment. Returns how many, or an error. */
static int segment_fill(struct space *space, struct segment *segment, uint64_t bytes) {
        uint64_t room = space->memory.max_blocks -
                        MIN(space->memory.max_blocks, blocks_with_memory(space));
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

/* Takes the last block with memory, which is free or worn out, out of use. */
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

int segment_go_on_returning(struct space *space) {
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

int segment_return(struct space *space, struct segment *segment) {
        kvd_list_remove(&segment->avail);
        space->memory.returning = segment;
        return segment_go_on_returning(space);
}

/* ---- growing --------------------------------------------------------------------------------- */

/* May this arena use a segment without memory? Its own, or one whose writer has ended. */
static bool may_adopt(const struct segment *segment, const struct arena *arena) {
        return segment->n_ready == 0 && segment != arena->space->memory.returning &&
               (segment->arena == arena || (arena->space->ix->arena && !segment->arena->writer));
}

/* Finds a segment without memory, or a new one. NULL: the space has no more segments. */
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

/*
 * Its new pages are of its client's NUMA node, or of the nodes in turn. Old ones that were not freed
 * yet stay where they are.
 */
static void find_home(struct space *space, struct segment *segment) {
        const struct store *store = space_store(space);
        uint32_t home = segment->arena->home;

        segment->home = 0;
        if (segment->file.fd < 0 || !store->pages.n_nodes)
                return;
        home = home ? home : 1 + segment->number % store->pages.n_nodes;
        if (pages_place(store, segment->file.fd, space->ix->segment_bytes, home) == 0)
                segment->home = home;
}

/* -EAGAIN: there is no memory at present. */
static int begin_segment(struct space *space, struct segment *segment, struct arena *arena) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);
        int r = memory_of(space)->begin(space, segment);

        if (r < 0)
                return r;
        segment->arena = arena;
        find_home(space, segment);
        charge(space, 1);
        /* clients fetch its descriptor when they meet one of its blocks */
        if (segment->number == n)
                atomic_store_explicit(&space->ix->n_segments, n + 1, memory_order_release);
        pages_want_index(space, kvd_segments_ids(space->ix, n));
        space_count(space, KVD_SPACE_SEGMENTS_ADDED, 1);
        return 0;
}

static bool is_unfinished(const struct space *space, const struct segment *s,
                          const struct arena *arena) {
        return s != space->memory.returning && s->arena == arena && s->n_ready > 0 &&
               s->n_ready < room_for(space, s);
}

static struct segment *unfinished_segment(struct space *space, struct arena *arena) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);

        for (uint32_t i = n; i-- > 0;)
                if (is_unfinished(space, &space->memory.segments[i], arena))
                        return &space->memory.segments[i];
        return NULL;
}

/* Begins a segment, if the space may have one more; 0: it may not, or there is no memory. */
static int next_segment(struct space *space, struct arena *arena, struct segment **ret) {
        int r;

        *ret = !space->memory.returning && segments_to_come(space) ? empty_segment(space, arena) :
                                                                     NULL;
        if (!*ret)
                return 0;
        r = begin_segment(space, *ret, arena);
        return r < 0 ? (r == -EAGAIN ? 0 : r) : 1;
}

static int fill_some(struct space *space, struct segment *segment, uint64_t bytes) {
        int r = segment_fill(space, segment, MIN(bytes, STEP_BYTES));

        if (r <= 0 && segment->n_ready == 0)
                segment_return(space, segment);
        return r;
}

/*
 * Gives memory to blocks. Returns how many, 0 if quota, pool or max_blocks are used up, or an error
 * of the system.
 */
int space_grow(struct space *space, struct arena *arena, uint64_t bytes) {
        struct segment *segment = unfinished_segment(space, arena);
        int r = 1;

        if (blocks_with_memory(space) >= space->memory.max_blocks)
                return 0;
        if (!segment)
                r = next_segment(space, arena, &segment);
        return r <= 0 ? r : fill_some(space, segment, bytes);
}

bool space_grow_near(struct space *space, struct arena *arena, uint64_t bytes) {
        struct segment *segment = arena->growing[arena->home];

        if (blocks_with_memory(space) >= space->memory.max_blocks)
                return false;
        if (!segment || segment->home != arena->home || !is_unfinished(space, segment, arena)) {
                arena->growing[arena->home] = NULL;
                if (next_segment(space, arena, &segment) <= 0)
                        return false;
                arena->growing[arena->home] = segment;
        }
        return fill_some(space, segment, bytes) > 0;
}

/* ---- after a restart ------------------------------------------------------------------------- */

int segment_adopt(struct space *space, struct segment *segment, uint32_t n_ready, uint32_t version,
                  int *fds) {
        int r = memory_of(space)->adopt(space, segment, version, fds);

        if (r < 0)
                return r;
        if (segment->file.fd >= 0 && space_store(space)->pages.n_nodes)
                segment->home = pages_home(space_store(space),
                                           (uint32_t)(numa_node_of(segment->file.fd) + 1));
        segment->n_ready = n_ready;
        segment->arena->n_ready += n_ready;
        charge(space, 1);
        return 0;
}

/* ---- ahead of need --------------------------------------------------------------------------- */

bool space_fill_ahead(struct space *space) {
        const struct store_large *maker = &space_store(space)->pages.maker;
        struct segment *segment;

        space->memory.awaits_pages = maker->busy && maker->busy(maker->data);
        if (space->memory.awaits_pages)
                return false; /* or the memory would get small pages first */
        for (struct arena *arena = space->memory.arenas; arena; arena = arena->next) {
                segment = unfinished_segment(space, arena);
                if (segment && space->count[KVD_FREE] * space->ix->block_bytes < AHEAD_BYTES)
                        return segment_fill(space, segment, STEP_BYTES) > 0;
        }
        return false;
}

/* ---- idle work ------------------------------------------------------------------------------- */

bool space_tidy(struct space *space) {
        return memory_of(space)->tidy(space);
}
