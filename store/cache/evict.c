/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Eviction chooses the block to evict, and makes sure that it is not in use.
 *
 * Candidates are leaves: sealed blocks without resident children. So a parent stays as long as its
 * children do, and a client that pins the deepest block of a chain holds the whole chain. Each
 * arena keeps its leaves in a heap, coldest first, in the order of the space's policy (policies[]
 * below). Clients do not tell the daemon what they use; they write the index clock into their own
 * pin page when they unpin a leaf. So a leaf's stamp in the heap may be too cold, but never too
 * warm: when a leaf reaches the top, its stamp is updated, and it sinks if it was used since.
 *
 * The protocol with pinning clients (steps as named in tests/client/spin/pins.pml and leaf.pml; the
 * client's half is in client/cache/lookup.c):
 *
 *      D1  choose a leaf that no client seems to pin
 *      D2  slot word := RETIRING, same generation     D3  full fence (one exchange does both)
 *      D4  scan the pin counters of every client not yet reaped that uses the block's group
 *      D5  any pin: slot word := SEALED again, same generation; try another block
 *      D6  no pin: take it out of the index, generation + 1, FREE
 *
 * The last blocks of a chain go through these steps together, deepest first, if they are evicted one
 * after the other anyway: they share D4's look at who uses their groups, which costs a load for
 * each client. A pin stops there what is above it, too.
 *
 * Either the client's second look at the slot word (C5) comes after D2 and sees it, or its pin (C3)
 * comes before the scan and the daemon sees it.
 *
 * Reading pins is what costs time: one word of every client for every leaf. So a call has a budget
 * of reads (KVD_PIN_READS), stops when they are spent, and remembers what it found. A leaf in use
 * moves to its arena's shelf, at the end of the heap's array. Leaves of the shelf are looked at
 * again one at a time, beginning with the client that had the leaf pinned. Eviction finds nothing
 * only when the heap is empty and the whole shelf was looked at in vain.
 */

#include "ipc/base/enums.h"
#include "store/cache/inside.h"

/* ---- pins ------------------------------------------------------------------------------------ */

bool block_pinned(const struct space *space, uint32_t id, uint32_t *n_clients) {
        uint32_t reads = UINT32_MAX;
        uint16_t seat = 0;

        users_look(space, id);
        if (!n_clients)
                return users_pin(space, id, &seat, &reads);
        *n_clients = users_pins(space, id);
        return *n_clients > 0;
}

static void spend(uint32_t *reads, uint32_t n) {
        *reads -= MIN(*reads, n);
}

/*
 * The cost of a look at all clients' groups, in reads. Their words are mostly in the caches, but a
 * client that keeps writing to its word can prevent that.
 */
static uint32_t look_reads(const struct space *space) {
        return 1 + space->n_attachments / 2;
}

/* The same, but only among the clients that the last look found. */
static bool seems_in_use(struct space *space, uint32_t id, uint32_t *reads) {
        struct block *b = &space->blocks[id];

        return b->refs || b->holds || b->pending ||
               (space->unready.poisoning.under_way && space->unready.poisoning.at == id) ||
               users_pin(space, id, &b->pinned_by, reads);
}

bool block_in_use(struct space *space, uint32_t id, uint32_t *reads) {
        if (seems_in_use(space, id, reads))
                return true;
        spend(reads, look_reads(space));
        return users_look(space, id) && seems_in_use(space, id, reads);
}

/* Parts of a stamp. Policy priority has its level above the clock, and the rank is above both. */
#define CLOCK ((UINT64_C(1) << 48) - 1)
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

static uint64_t current_stamp(const struct space *space, uint32_t id) {
        return ranked(&space->blocks[id], policy_of(space)->refresh(space, id));
}

static uint64_t stamp_at(const struct space *space, uint32_t id, uint64_t clock) {
        return ranked(&space->blocks[id], policy_of(space)->stamp(space, id, clock));
}

/*
 * The parent's stamp when its last child, with that stamp, is evicted. Using the child uses the
 * parent, too. A prefix without its end is evicted first.
 */
static uint64_t stamp_without(const struct space *space, const struct block *parent,
                              uint64_t child) {
        if (space_finds_whole(space) || parent->poisoned)
                return 0;
        return ranked(parent, MAX(parent->stamp & (PRECIOUS - 1), child & (PRECIOUS - 1)));
}

/* Policies that go by worth read another word of each client that uses the block's group. */
static uint32_t worth_reads(const struct space *space, uint32_t id) {
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

/* Moves a block up or down after its stamp has changed. */
static void sift(struct space *space, uint32_t id) {
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
        b->stamp = current_stamp(space, id);
        sift(space, id);
}

void block_rank(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];

        if (!b->stamp)
                return;
        b->stamp = ranked(b, b->stamp);
        sift(space, id);
}

void block_condemn(struct space *space, uint32_t id) {
        space->blocks[id].stamp = 0;
        sift(space, id);
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
                sift(space, id);
                n--;
        }
        return before > 0;
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

static void block_unlink(struct space *space, uint32_t id) {
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

/* ---- eviction -------------------------------------------------------------------------------- */

static void leave_lists(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];

        if (b->private) {
                block_list_remove(space, &space->private.garbage, id);
                b->private = false;
                space->private.n--;
        } else {
                space_count(space, KVD_SPACE_EVICTED, 1);
        }
        if (b->poisoned)
                block_list_remove(space, &space->unready.poisoned, id);
        b->poisoned = false;
}

static bool same_group(uint32_t a, uint32_t b) {
        return a / KVD_GROUP_IDS == b / KVD_GROUP_IDS;
}

/* D4, first half. True: it found new users of a group, whose pins and times of use are not known. */
static bool look_at_all(const struct space *space, const uint32_t *ids, uint32_t n) {
        bool news = false;

        for (uint32_t i = 0; i < n; i++)
                if (!i || !same_group(ids[i], ids[i - 1]))
                        news |= users_look(space, ids[i]);
        return news;
}

/* D4, second half, among the clients that the look found. */
static bool is_pinned(struct space *space, uint32_t id) {
        uint32_t reads = space->n_attachments;

        return users_pin(space, id, &space->blocks[id].pinned_by, &reads);
}

/* D6 */
static void take_out(struct space *space, uint32_t id, uint32_t *reads) {
        index_leave(space, id);
        spend(reads, sessions_move(space, id, space->blocks[id].parent, NULL));
        block_unlink(space, id);
        leave_lists(space, id);
        block_to_free(space, id);
}

/*
 * D2 to D6 of the protocol above, for n blocks that seemed unused: a leaf, and those above it, each
 * of which is a leaf when the one before it has gone. They share one look at the clients' groups.
 * Their pins were just read, so reading them again costs next to nothing. Returns how many have
 * gone; the others are sealed again.
 */
static uint32_t retire(struct space *space, const uint32_t *ids, uint32_t n, uint32_t *reads) {
        uint32_t gone = 0;
        bool news;

        for (uint32_t i = 0; i < n; i++)
                block_set_state(space, ids[i], KVD_RETIRING, block_generation(space, ids[i]));
        news = look_at_all(space, ids, n);
        for (; !news && gone < n && !is_pinned(space, ids[gone]); gone++)
                take_out(space, ids[gone], reads);
        for (uint32_t i = gone; i < n; i++)
                block_set_state(space, ids[i], KVD_SEALED, block_generation(space, ids[i]));
        return gone;
}

/*
 * Evicts a leaf unless it is in use. Pins are looked at before its word changes, too: clients that
 * pin it should not see it RETIRING again and again.
 */
bool evict_leaf(struct space *space, uint32_t id, uint32_t *reads) {
        if (!block_in_use(space, id, reads) && retire(space, &id, 1, reads))
                return true;
        space_count(space, KVD_SPACE_EVICTIONS_PINNED, 1);
        return false;
}

/* If the block was used since it got its stamp, updates the stamp and lets it sink. */
static bool warmed_up(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];
        uint64_t stamp = b->stamp ? current_stamp(space, id) : 0;

        if (stamp <= b->stamp)
                return false;
        b->stamp = stamp;
        sift(space, id);
        return true;
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
        sift(space, id);
}

static void shelve(struct arena *arena, uint32_t id) {
        heap_remove(arena, id);
        shelf_add(arena, id);
}

/* The stamp of the leaf that is evicted after the coldest one and those above it. */
static uint64_t second_coldest(const struct space *space, const struct arena *arena) {
        return arena->n_heap > 1 ? space->blocks[arena->heap[coldest_of(arena, 1)]].stamp :
                                   UINT64_MAX;
}

/* The parent's stamp when it is a leaf and has come to the top, after a leaf with that stamp. */
static uint64_t stamp_at_the_top(struct space *space, uint32_t parent, uint64_t leaf) {
        struct block *p = &space->blocks[parent];
        uint64_t own = p->stamp, stamp = stamp_without(space, p, leaf);

        p->stamp = stamp;
        if (stamp)
                stamp = MAX(stamp, current_stamp(space, parent));
        p->stamp = own;
        return stamp;
}

/* Does a leaf leave its parent as an unused leaf, which no session ranks, in the same arena? */
static bool is_next(struct space *space, uint32_t leaf, uint32_t *reads) {
        const struct block *b = &space->blocks[leaf];

        return b->parent != NONE && b->sib_prev == NONE && b->sib_next == NONE && !b->session &&
               !space->blocks[b->parent].session &&
               block_arena(space, b->parent) == block_arena(space, leaf) &&
               !seems_in_use(space, b->parent, reads);
}

#define CHAIN 16u

/*
 * Evicts the coldest leaf and those above it, at most `most`, that come before the second coldest.
 * Returns how many.
 */
static uint32_t retire_coldest(struct space *space, struct arena *arena, uint32_t most,
                               uint32_t *reads) {
        uint64_t second = second_coldest(space, arena), stamp;
        uint32_t ids[CHAIN] = {arena->heap[0]}, n = 1;

        stamp = space->blocks[ids[0]].stamp;
        space->leaves.ages.coldest = stamp & CLOCK;
        spend(reads, look_reads(space));
        while (n < MIN(most, CHAIN) && *reads && is_next(space, ids[n - 1], reads)) {
                uint32_t above = space->blocks[ids[n - 1]].parent;

                spend(reads, worth_reads(space, above) +
                                     (same_group(above, ids[n - 1]) ? 0 : look_reads(space)));
                stamp = stamp_at_the_top(space, above, stamp);
                if (stamp > second)
                        break;
                ids[n++] = above;
        }
        return retire(space, ids, n, reads);
}

/* 0: the coldest leaf sank, or is in use. */
static uint32_t try_coldest(struct space *space, struct arena *arena, uint32_t most,
                            uint32_t *reads) {
        uint32_t id = arena->heap[0];

        if (seems_in_use(space, id, reads)) {
                space_count(space, KVD_SPACE_EVICTIONS_PINNED, 1);
                shelve(arena, id);
                return 0;
        }
        spend(reads, worth_reads(space, id));
        return warmed_up(space, id) ? 0 : retire_coldest(space, arena, most, reads);
}

/* Looks at one leaf of the shelf. If it is unused, it returns to the heap with a new stamp. */
static void look_again(struct space *space, struct arena *arena, uint32_t *reads) {
        struct shelf *shelf = &arena->shelf;
        uint32_t id;

        if (shelf->hand >= shelf->n)
                shelf->hand = 0;
        id = arena->heap[shelf_place(arena, shelf->hand)];
        if (block_in_use(space, id, reads)) {
                shelf->hand++;
                shelf->in_vain++;
                return;
        }
        shelf_remove(arena, space->blocks[id].heap - 1);
        heap_add(arena, id);
        spend(reads, look_reads(space) + worth_reads(space, id));
        block_restamp(space, id);
        shelf->in_vain = 0;
}

bool arena_worth_looking(const struct arena *arena) {
        return arena->n_heap || arena->shelf.in_vain < arena->shelf.n;
}

/* After a round through the shelf in vain, a new one begins only if pins have changed. */
static void begin_round(struct space *space, struct arena *arena, uint32_t *reads) {
        uint64_t state = pins_state(space);

        spend(reads, space->n_attachments);
        if (!arena_worth_looking(arena) && state != arena->shelf.state)
                arena->shelf.in_vain = 0;
        if (arena->shelf.in_vain == 0)
                arena->shelf.state = state;
}

uint32_t evict_coldest(struct space *space, struct arena *arena, uint32_t n, uint32_t *reads) {
        uint32_t evicted = 0, again = 0, ahead = 0, tried = 1;

        begin_round(space, arena, reads);
        while (evicted < n && *reads && (arena->n_heap || again < arena->shelf.n)) {
                for (uint32_t i = 0; i < tried && *reads && arena->shelf.n; i++, again++)
                        look_again(space, arena, reads);
                if (!arena->n_heap)
                        continue;
                if (!ahead)
                        ahead = evict_ahead(space, arena, n - evicted);
                tried = try_coldest(space, arena, ahead, reads);
                evicted += tried;
                tried = MAX(tried, 1);
                ahead -= tried;
        }
        return evicted;
}

#define STEPS_PER_READ 4u /* steps down a chain that cost as much as one read */

static uint32_t deepest_first_child(const struct space *space, uint32_t id, uint32_t *reads) {
        for (uint32_t n = 1; space->blocks[id].child != NONE && *reads; n++) {
                id = space->blocks[id].child;
                if (n % STEPS_PER_READ == 0)
                        spend(reads, 1);
        }
        return id;
}

/* The next block of a subtree in post-order (children before their parents). */
static uint32_t next_upwards(const struct space *space, uint32_t id, uint32_t *reads) {
        uint32_t sibling = space->blocks[id].sib_next;

        return sibling == NONE ? space->blocks[id].parent :
                                 deepest_first_child(space, sibling, reads);
}

/*
 * Evicts a block and its descendants, except those in use. False: the block itself is still there.
 * *at is the position, for further calls: NONE at the beginning, and again at the end.
 */
bool evict_subtree(struct space *space, uint32_t id, uint32_t *at, uint32_t *reads,
                   uint32_t *evicted) {
        *at = deepest_first_child(space, *at == NONE ? id : *at, reads);
        while (*reads) {
                uint32_t next = *at == id ? NONE : next_upwards(space, *at, reads);

                spend(reads, 1);
                if (space->blocks[*at].child == NONE)
                        *evicted += evict_leaf(space, *at, reads);
                *at = next;
                if (next == NONE)
                        return space->blocks[id].state != KVD_SEALED;
        }
        return false;
}
