/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The order of eviction. Each arena keeps its leaves in a heap, coldest first, by stamps that the
 * space's policy makes (policies[] below). Clients do not tell the daemon what they use; they write
 * the index clock into their own pin page when they unpin a leaf. So a leaf's stamp in the heap may
 * be too cold, but never too warm: when a leaf reaches the top, its stamp is updated, and it sinks
 * if it was used since. Leaves that evict.c found in use are on their arena's shelf, at the end of
 * the heap's array.
 */

#include "store/cache/leaves.h"

#include "ipc/base/enums.h"

/* Parts of a stamp. Policy priority has its level above the clock, and the rank is above both. */
#define PRECIOUS (UINT64_C(1) << 56)

/* Among the clients that the last look found. */
static uint64_t last_use(const struct space *space, uint32_t id) {
        return users_last_touch(space, id, space->blocks[id].stamp & CLOCK);
}

/* The space's clock at the last use. A lying client can only change the order of eviction. */
uint64_t block_last_use(const struct space *space, uint32_t id) {
        users_look(space, id);
        return last_use(space, id);
}

/* ---- policies: the order of leaves ----------------------------------------------------------- */

static uint64_t lru_first(struct space *space) {
        return space->clock;
}

static uint64_t lru_refresh(const struct space *space, uint32_t id) {
        return last_use(space, id);
}

static uint64_t fifo_first(struct space *space) {
        return ++space->leaves.seal_clock;
}

static uint64_t fifo_refresh(const struct space *space, uint32_t id) {
        return space->blocks[id].stamp;
}

static uint64_t clock_alone(const struct space *space, uint32_t id, uint64_t clock) {
        return clock;
}

#define LEVELS 32u /* of priority; blocks of one level are evicted in the order of their last use */

static uint64_t priority_stamp(const struct space *space, uint32_t id, uint64_t clock) {
        uint64_t level = 1 + (uint64_t)(block_worth(space, id) * (LEVELS - 1));

        return level << 48 | MIN(clock, CLOCK);
}

/* Its worth is not known yet, so it gets the middle level. */
static uint64_t priority_first(struct space *space) {
        return (uint64_t)(1 + (LEVELS - 1) / 2) << 48 | space->clock;
}

static uint64_t priority_refresh(const struct space *space, uint32_t id) {
        return priority_stamp(space, id, last_use(space, id));
}

/* One row for each word of ipc/base/enums.h. */
static const struct policy {
        uint64_t (*first)(struct space *);                   /* stamp of a block just sealed */
        uint64_t (*refresh)(const struct space *, uint32_t); /* its current stamp */
        /* its stamp if it was last used at that clock: when the policy changes, or a client ends */
        uint64_t (*stamp)(const struct space *, uint32_t, uint64_t clock);
        bool by_use; /* the order depends on the last use */
        /* asks the methods what a block is worth; not possible for opaque blocks */
        bool by_worth;
} policies[KVD_policy_end] = {
        [KVD_policy_lru] = {lru_first, lru_refresh, clock_alone, true, false},
        [KVD_policy_fifo] = {fifo_first, fifo_refresh, clock_alone, false, false},
        [KVD_policy_priority] = {priority_first, priority_refresh, priority_stamp, true, true},
};

static const struct policy *policy_of(const struct space *space) {
        return &policies[space->ix->policy];
}

/* ---- ranks: what sessions say ---------------------------------------------------------------- */

/* The same block with another stamp of the policy. It is precious while a session ends there. */
static uint64_t ranked(const struct block *b, uint64_t stamp) {
        return (b->session ? PRECIOUS : 0) | (stamp & (PRECIOUS - 1));
}

uint64_t leaf_stamp(const struct space *space, uint32_t id) {
        return ranked(&space->blocks[id], policy_of(space)->refresh(space, id));
}

static uint64_t stamp_at(const struct space *space, uint32_t id, uint64_t clock) {
        return ranked(&space->blocks[id], policy_of(space)->stamp(space, id, clock));
}

/*
 * The parent's stamp when its last child, whose stamp is `child`, is evicted. Using the child uses the
 * parent, too. A prefix without its end is evicted first.
 */
static uint64_t stamp_without(const struct space *space, const struct block *parent,
                              uint64_t child) {
        if (space_finds_whole(space) || parent->poisoned)
                return 0;
        return ranked(parent, MAX(parent->stamp & (PRECIOUS - 1), child & (PRECIOUS - 1)));
}

uint32_t worth_reads(const struct space *space, uint32_t id) {
        uint32_t n = 0;

        for (struct attachment *a = NULL;
             policy_of(space)->by_worth && (a = users_next(space, id, a));)
                n++;
        return n;
}

bool policy_goes_by_worth(uint32_t policy) {
        return policies[policy].by_worth;
}

/* If the policy ignores uses, all blocks are as warm as the space. */
uint64_t block_used(const struct space *space, uint32_t id) {
        return policy_of(space)->by_use ? block_last_use(space, id) : space->clock;
}

static uint64_t coldest_in(const struct space *space, const struct arena *arena) {
        return policy_of(space)->by_use && arena->n_heap ?
                       space->blocks[arena->heap[0]].stamp & CLOCK :
                       space->clock;
}

uint64_t leaves_coldest(const struct space *space) {
        uint64_t coldest = space->clock;

        for (const struct arena *arena = space->memory.arenas; arena; arena = arena->next)
                coldest = MIN(coldest, coldest_in(space, arena));
        return coldest;
}

uint64_t leaf_age(const struct space *space, const struct arena *arena) {
        return arena->n_heap ? clock_when(space, coldest_in(space, arena)) :
                               space_store(space)->spaces.clock;
}

/* ---- heap of leaves -------------------------------------------------------------------------- */

static bool colder(const struct space *space, uint32_t a, uint32_t b) {
        return space->blocks[a].stamp < space->blocks[b].stamp;
}

static void heap_put(struct arena *arena, uint32_t at, uint32_t id) {
        arena->heap[at] = id;
        arena->space->blocks[id].heap = at + 1;
}

static void sift_up(struct arena *arena, uint32_t at) {
        uint32_t id = arena->heap[at], above;

        for (; at > 0; at = above) {
                above = (at - 1) / HEAP_CHILDREN;
                if (!colder(arena->space, id, arena->heap[above]))
                        break;
                heap_put(arena, at, arena->heap[above]);
        }
        heap_put(arena, at, id);
}

/* The coldest child. They are read side by side, so there is one cache miss for each level. */
static uint32_t coldest_of(const struct arena *arena, uint32_t first) {
        uint32_t end = MIN(first + HEAP_CHILDREN, arena->n_heap), coldest = first;

        for (uint32_t at = first + 1; at < end; at++)
                if (colder(arena->space, arena->heap[at], arena->heap[coldest]))
                        coldest = at;
        return coldest;
}

static void sift_down(struct arena *arena, uint32_t at) {
        uint32_t id = arena->heap[at], child;

        for (; (child = HEAP_CHILDREN * at + 1) < arena->n_heap; at = child) {
                child = coldest_of(arena, child);
                if (!colder(arena->space, arena->heap[child], id))
                        break;
                heap_put(arena, at, arena->heap[child]);
        }
        heap_put(arena, at, id);
}

static void heap_add(struct arena *arena, uint32_t id) {
        arena->heap[arena->n_heap++] = id;
        sift_up(arena, arena->n_heap - 1);
}

/* Replaces id by `by` in the heap, and moves that up or down to its place. */
static void heap_replace(struct arena *arena, uint32_t id, uint32_t by) {
        const struct block *blocks = arena->space->blocks;
        uint32_t at = blocks[id].heap - 1;

        heap_put(arena, at, by);
        if (blocks[by].stamp < blocks[id].stamp)
                sift_up(arena, at);
        else if (blocks[by].stamp > blocks[id].stamp)
                sift_down(arena, at);
}

static void heap_remove(struct arena *arena, uint32_t id) {
        uint32_t last = arena->heap[--arena->n_heap];

        if (last != id)
                heap_replace(arena, id, last);
}

/* The shelf is at the end of the same array, which has room for all blocks. It grows downwards. */
static uint32_t shelf_place(const struct arena *arena, uint32_t i) {
        return arena->space->ix->capacity - 1 - i;
}

static void shelf_add(struct arena *arena, uint32_t id) {
        heap_put(arena, shelf_place(arena, arena->shelf.n++), id);
}

static void shelf_remove(struct arena *arena, uint32_t at) {
        uint32_t last = shelf_place(arena, --arena->shelf.n);

        if (at != last)
                heap_put(arena, at, arena->heap[last]);
}

static bool on_shelf(const struct arena *arena, const struct block *b) {
        return b->heap > arena->n_heap;
}

void leaf_add(struct space *space, uint32_t id) {
        heap_add(block_arena(space, id), id);
        space->leaves.n++;
}

static void leaf_remove(struct space *space, uint32_t id) {
        struct arena *arena = block_arena(space, id);
        struct block *b = &space->blocks[id];

        if (on_shelf(arena, b))
                shelf_remove(arena, b->heap - 1);
        else
                heap_remove(arena, id);
        b->heap = 0;
        space->leaves.n--;
}

/*
 * Replaces a leaf by another block, in the leaf's place in the heap. Stamps along a chain are
 * nearly the same, so it seldom has to move. That matters because the heap is not in the
 * processor's cache.
 */
static void leaf_replace(struct space *space, uint32_t id, uint32_t by) {
        struct arena *arena = block_arena(space, id);
        struct block *b = &space->blocks[id];

        if (on_shelf(arena, b) || block_arena(space, by) != arena) {
                leaf_remove(space, id);
                leaf_add(space, by);
                return;
        }
        heap_replace(arena, id, by);
        b->heap = 0;
}

void leaf_sift(struct space *space, uint32_t id) {
        struct arena *arena = block_arena(space, id);

        if (!space->blocks[id].heap || on_shelf(arena, &space->blocks[id]))
                return;
        sift_up(arena, space->blocks[id].heap - 1);
        sift_down(arena, space->blocks[id].heap - 1);
}

/* A condemned block (stamp 0) stays first, whatever the policy. */
void block_restamp(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];

        if (!b->stamp || b->private)
                return;
        b->stamp = leaf_stamp(space, id);
        leaf_sift(space, id);
}

void block_rank(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];

        if (!b->stamp)
                return;
        b->stamp = ranked(b, b->stamp);
        leaf_sift(space, id);
}

void block_condemn(struct space *space, uint32_t id) {
        space->blocks[id].stamp = 0;
        leaf_sift(space, id);
}

/* Policies interpret stamps differently, so idle work computes all stamps again. */
void evict_set_policy(struct space *space, uint32_t policy) {
        if (policy == space->ix->policy)
                return;
        space->ix->policy = policy;
        space->leaves.n_old = space_ids(space);
        space_is_busy(space);
}

#define RESTAMPS 512u        /* blocks in one call */
#define RESTAMP_LOOKS 16384u /* ... including blocks that are skipped */

/* The methods look at all clients' pages to find a block's worth. */
uint32_t evict_effort(const struct space *space) {
        return policy_of(space)->by_worth ? space->n_attachments / 8 : 0;
}

/* Until all are done, old and new stamps are mixed. The heap is valid all the time. */
bool evict_restamp(struct space *space) {
        uint32_t n = RESTAMPS / (1 + evict_effort(space)), before = space->leaves.n_old;

        while (space->leaves.n_old && n && before - space->leaves.n_old < RESTAMP_LOOKS) {
                uint32_t id = --space->leaves.n_old;
                struct block *b = &space->blocks[id];

                if (b->state != KVD_SEALED || b->private || !b->stamp)
                        continue;
                b->stamp = stamp_at(space, id, b->stamp & CLOCK);
                leaf_sift(space, id);
                n--;
        }
        return before > 0;
}

/* Looks at this client only; the others are looked at when the block reaches the top. */
void block_warm(const struct attachment *a, uint32_t id) {
        struct space *space = a->space;
        struct block *b = &space->blocks[id];
        uint64_t when = time_of_touch(space, &a->words[id]), stamp;

        if (!policy_of(space)->by_use || !b->stamp || b->private || when <= (b->stamp & CLOCK))
                return;
        stamp = stamp_at(space, id, when);
        if (stamp <= b->stamp)
                return;
        b->stamp = stamp;
        leaf_sift(space, id);
}

void leaf_shelve(struct arena *arena, uint32_t id) {
        heap_remove(arena, id);
        shelf_add(arena, id);
}

uint32_t leaf_on_shelf(const struct arena *arena, uint32_t i) {
        return arena->heap[shelf_place(arena, i)];
}

void leaf_unshelve(struct arena *arena, uint32_t id) {
        shelf_remove(arena, arena->space->blocks[id].heap - 1);
        heap_add(arena, id);
}

uint64_t leaves_second_coldest(const struct space *space, const struct arena *arena) {
        return arena->n_heap > 1 ? space->blocks[arena->heap[coldest_of(arena, 1)]].stamp :
                                   UINT64_MAX;
}

uint64_t leaf_stamp_after(struct space *space, uint32_t parent, uint64_t leaf) {
        struct block *p = &space->blocks[parent];
        uint64_t own = p->stamp, stamp = stamp_without(space, p, leaf);

        p->stamp = stamp;
        if (stamp)
                stamp = MAX(stamp, leaf_stamp(space, parent));
        p->stamp = own;
        return stamp;
}

/* ---- chains ---------------------------------------------------------------------------------- */

void block_link(struct space *space, uint32_t id, uint32_t parent) {
        struct block *b = &space->blocks[id];

        b->parent = parent;
        b->root = parent == NONE ? id : space->blocks[parent].root;
        b->child = NONE;
        b->sib_prev = b->sib_next = NONE;
        b->stamp = policy_of(space)->first(space);
        b->session = 0;
        b->score = 0;
        b->summarised = false;
        block_set_record(space, id, 0, 0, 0);
        if (parent == NONE || space->blocks[parent].child != NONE)
                leaf_add(space, id);
        else
                leaf_replace(space, parent, id);
        if (parent == NONE)
                return;
        b->sib_next = space->blocks[parent].child;
        if (b->sib_next != NONE)
                space->blocks[b->sib_next].sib_prev = id;
        space->blocks[parent].child = id;
}

void block_unlink(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];

        if (b->sib_next != NONE)
                space->blocks[b->sib_next].sib_prev = b->sib_prev;
        if (b->sib_prev != NONE)
                space->blocks[b->sib_prev].sib_next = b->sib_next;
        else if (b->parent != NONE)
                space->blocks[b->parent].child = b->sib_next;
        if (b->parent == NONE || space->blocks[b->parent].child != NONE) {
                leaf_remove(space, id);
                return;
        }
        space->blocks[b->parent].stamp = stamp_without(space, &space->blocks[b->parent], b->stamp);
        leaf_replace(space, id, b->parent);
}
