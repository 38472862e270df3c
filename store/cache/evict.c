/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Eviction decides which block goes, and makes sure that nobody uses it.
 *
 * Candidates are leaves: sealed blocks without resident children. So a parent stays as long as its
 * children do, and a client that pins the deepest block of a chain holds the whole chain. Each
 * arena keeps its leaves in a heap, coldest first, ordered by what the space's policy says
 * (policies[] below). Clients do not tell the daemon what they use; they write the index clock into
 * their own pin page when they let go of a leaf. The order in the heap may thus be too cold, never
 * too warm: a leaf that comes up is looked at again, and sinks if it was used since.
 *
 * The protocol with pinning clients (steps as named in tests/client/spin/pins.pml and leaf.pml; the
 * client's half is in client/lookup.c):
 *
 *      D1  choose a leaf
 *      D2  slot word := RETIRING, same generation     D3  full fence (one exchange does both)
 *      D4  scan the pin counters of every client not yet reaped
 *      D5  any pin: slot word := SEALED again, same generation; try another block
 *      D6  none:    take it out of the index, generation + 1, FREE
 *
 * Either the client's second look at the slot word (C5) comes after D2 and sees it, or its pin (C3)
 * comes before the scan and the daemon sees it.
 */

#include <errno.h>

#include "ipc/base/enums.h"
#include "store/cache/inside.h"
#include "store/hooks.h"

/* ---- pins ------------------------------------------------------------------------------------ */

bool block_pinned(const struct space *space, uint32_t id, uint32_t *n_clients) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < space->n_attachments; i++) {
                struct attachment *a = space->attachments[i];

                if (!a || a->state == FOLDING ||
                    atomic_load_explicit(&a->pins[id], memory_order_seq_cst) == 0)
                        continue;
                n++;
                if (!n_clients)
                        break;
        }
        if (n_clients)
                *n_clients = n;
        return n > 0;
}

#define CLOCK ((UINT64_C(1) << 48) - 1) /* of a stamp: above it is the level of policy priority */

/*
 * The clock of a client's last use. A client can only write nonsense about the order in which
 * blocks go.
 */
uint64_t block_last_use(const struct space *space, uint32_t id) {
        uint64_t last = space->blocks[id].stamp & CLOCK;

        for (uint32_t i = 0; i < space->n_attachments; i++) {
                struct attachment *a = space->attachments[i];
                uint32_t touch = a ? atomic_load_explicit(&a->touch[id], memory_order_relaxed) : 0;
                uint64_t when = space->clock - (uint32_t)((uint32_t)space->clock - touch);

                if (touch && when <= space->clock)
                        last = MAX(last, when);
        }
        return last;
}

/* ---- policies: the order of leaves ----------------------------------------------------------- */

static uint64_t lru_first(struct space *space) {
        return space->clock;
}

static uint64_t lru_refresh(const struct space *space, uint32_t id) {
        return block_last_use(space, id);
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

#define LEVELS 32u /* of priority: blocks of one level go in the order of their last use */

static uint64_t priority_stamp(const struct space *space, uint32_t id, uint64_t clock) {
        uint64_t level = 1 + (uint64_t)(hooks_worth(space, id) * (LEVELS - 1));

        return level << 48 | MIN(clock, CLOCK);
}

/* Nobody has said anything of it yet, so it goes to the middle. */
static uint64_t priority_first(struct space *space) {
        return (uint64_t)(1 + (LEVELS - 1) / 2) << 48 | space->clock;
}

static uint64_t priority_refresh(const struct space *space, uint32_t id) {
        return priority_stamp(space, id, block_last_use(space, id));
}

/* One row for each word of ipc/base/enums.h. */
static const struct policy {
        uint64_t (*first)(struct space *);                   /* stamp of a block just sealed */
        uint64_t (*refresh)(const struct space *, uint32_t); /* its stamp by now */
        /* when the policy changes to this one */
        uint64_t (*stamp)(const struct space *, uint32_t, uint64_t clock);
        bool pinned_is_used; /* a pinned leaf is as warm as one used now */
        /* asks the methods what a block is worth: not for blocks that they cannot look into */
        bool by_worth;
} policies[KVD_policy_end] = {
        [KVD_policy_lru] = {lru_first, lru_refresh, clock_alone, true, false},
        [KVD_policy_fifo] = {fifo_first, fifo_refresh, clock_alone, false, false},
        [KVD_policy_priority] = {priority_first, priority_refresh, priority_stamp, false, true},
};

static const struct policy *policy_of(const struct space *space) {
        return &policies[space->ix->policy];
}

bool policy_goes_by_worth(uint32_t policy) {
        return policies[policy].by_worth;
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
        uint32_t id = arena->heap[at];

        for (; at > 0 && colder(arena->space, id, arena->heap[(at - 1) / 2]); at = (at - 1) / 2)
                heap_put(arena, at, arena->heap[(at - 1) / 2]);
        heap_put(arena, at, id);
}

static void sift_down(struct arena *arena, uint32_t at) {
        uint32_t id = arena->heap[at], child;

        for (; (child = 2 * at + 1) < arena->n_heap; at = child) {
                if (child + 1 < arena->n_heap &&
                    colder(arena->space, arena->heap[child + 1], arena->heap[child]))
                        child++;
                if (!colder(arena->space, arena->heap[child], id))
                        break;
                heap_put(arena, at, arena->heap[child]);
        }
        heap_put(arena, at, id);
}

void leaf_add(struct space *space, uint32_t id) {
        struct arena *arena = block_arena(space, id);

        arena->heap[arena->n_heap++] = id;
        sift_up(arena, arena->n_heap - 1);
        space->leaves.n++;
}

static void leaf_remove(struct space *space, uint32_t id) {
        struct arena *arena = block_arena(space, id);
        uint32_t at = space->blocks[id].heap - 1, last = arena->heap[--arena->n_heap];

        space->blocks[id].heap = 0;
        space->leaves.n--;
        if (last == id)
                return;
        heap_put(arena, at, last);
        sift_up(arena, at);
        sift_down(arena, space->blocks[last].heap - 1);
}

/* Its place may be higher or lower. A block that goes first whatever the policy stays first. */
void block_restamp(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];

        if (!b->stamp || b->private)
                return;
        b->stamp = policy_of(space)->refresh(space, id);
        if (!b->heap)
                return;
        sift_up(block_arena(space, id), b->heap - 1);
        sift_down(block_arena(space, id), b->heap - 1);
}

void block_condemn(struct space *space, uint32_t id) {
        space->blocks[id].stamp = 0;
        if (space->blocks[id].heap)
                sift_up(block_arena(space, id), space->blocks[id].heap - 1);
}

static void heapify(struct arena *arena) {
        for (uint32_t i = arena->n_heap / 2; i-- > 0;)
                sift_down(arena, i);
}

/* Policies read stamps differently, so the stamps of all blocks are made anew at once. */
void evict_policy_changed(struct space *space) {
        uint32_t n = space_ids(space);

        for (uint32_t id = 0; id < n; id++) {
                struct block *b = &space->blocks[id];

                if (b->state == KVD_SEALED && !b->private && b->stamp)
                        b->stamp = policy_of(space)->stamp(space, id, b->stamp & CLOCK);
        }
        for (struct arena *arena = space->memory.arenas; arena; arena = arena->next)
                heapify(arena);
}

/* ---- chains ---------------------------------------------------------------------------------- */

void block_link(struct space *space, uint32_t id, uint32_t parent) {
        struct block *b = &space->blocks[id];

        b->parent = parent;
        b->child = NONE;
        b->sib_prev = b->sib_next = NONE;
        b->stamp = policy_of(space)->first(space);
        b->score = 0;
        b->summarised = false;
        leaf_add(space, id);
        if (parent == NONE)
                return;
        if (space->blocks[parent].child == NONE)
                leaf_remove(space, parent);
        b->sib_next = space->blocks[parent].child;
        if (b->sib_next != NONE)
                space->blocks[b->sib_next].sib_prev = id;
        space->blocks[parent].child = id;
}

/*
 * A bidirectional prefix is found whole or not at all: the rest of one that lost its end goes
 * first.
 */
static bool useless_alone(const struct space *space) {
        return space->ix->kind == KVD_kind_bidirectional;
}

static void block_unlink(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id], *parent;

        leaf_remove(space, id);
        if (b->sib_next != NONE)
                space->blocks[b->sib_next].sib_prev = b->sib_prev;
        if (b->sib_prev != NONE)
                space->blocks[b->sib_prev].sib_next = b->sib_next;
        else if (b->parent != NONE)
                space->blocks[b->parent].child = b->sib_next;
        if (b->parent == NONE)
                return;
        parent = &space->blocks[b->parent];
        if (parent->child != NONE)
                return;
        /* Whoever used the child used the parent. */
        parent->stamp = useless_alone(space) || parent->poisoned ? 0 : MAX(parent->stamp, b->stamp);
        leaf_add(space, b->parent);
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

/* Takes back a leaf unless somebody uses it: these are steps D2 to D6 of the protocol above. */
bool evict_leaf(struct space *space, uint32_t id) {
        uint32_t generation = block_generation(space, id);
        struct block *b = &space->blocks[id];

        if (b->refs || b->holds || b->pending)
                return false;
        block_set_state(space, id, KVD_RETIRING, generation);
        if (block_pinned(space, id, NULL)) {
                block_set_state(space, id, KVD_SEALED, generation);
                space_count(space, KVD_SPACE_EVICTIONS_PINNED, 1);
                return false;
        }
        index_leave(space, id);
        block_unlink(space, id);
        leave_lists(space, id);
        block_to_free(space, id);
        return true;
}

#define SET_ASIDE 256u /* pinned or filling leaves passed over in one call */
#define LOOKS_PER_VICTIM 32u
#define LOOKS_EXTRA 8192u /* leaves in use that are passed over: about a millisecond at worst */

struct aside {
        uint32_t n;
        uint32_t ids[SET_ASIDE];
};

/*
 * The coldest leaf is in use: it sinks to its place (LRU), or is out of the way until this call
 * ends (FIFO). Garbage that is still pinned sinks to the bottom, so that much of it is never in the
 * way; garbage_sweep finds it.
 */
static bool pass_over(struct space *space, struct arena *arena, uint32_t id, struct aside *aside) {
        if (space->blocks[id].private && space->blocks[id].stamp < UINT64_MAX) {
                space->blocks[id].stamp = UINT64_MAX;
                sift_down(arena, space->blocks[id].heap - 1);
                return true;
        }
        if (policy_of(space)->pinned_is_used && space->blocks[id].stamp < space->clock) {
                space->blocks[id].stamp = space->clock;
                sift_down(arena, space->blocks[id].heap - 1);
                return true;
        }
        if (aside->n == SET_ASIDE)
                return false;
        leaf_remove(space, id);
        aside->ids[aside->n++] = id;
        return true;
}

/* Was it used since it got its stamp? Then it sinks. */
static bool warmed_up(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];
        uint64_t stamp = b->stamp ? policy_of(space)->refresh(space, id) : 0;

        if (stamp <= b->stamp)
                return false;
        b->stamp = stamp;
        if (b->heap)
                sift_down(block_arena(space, id), b->heap - 1);
        return true;
}

void block_warm(struct space *space, uint32_t id) {
        warmed_up(space, id);
}

/* Evicts up to n blocks of an arena; looks at a bounded number of leaves. */
uint32_t evict_coldest(struct space *space, struct arena *arena, uint32_t n) {
        uint32_t looks = n * LOOKS_PER_VICTIM + LOOKS_EXTRA, evicted = 0;
        struct aside aside = {0};

        if (space->unready.n_pending)
                hooks_look(space);
        while (evicted < n && arena->n_heap && looks-- > 0) {
                uint32_t id = arena->heap[0];

                if (warmed_up(space, id))
                        continue;
                if (evict_leaf(space, id))
                        evicted++;
                else if (!pass_over(space, arena, id, &aside))
                        break;
        }
        while (aside.n)
                leaf_add(space, aside.ids[--aside.n]);
        return evicted;
}

static uint32_t deepest_first_child(const struct space *space, uint32_t id) {
        while (space->blocks[id].child != NONE)
                id = space->blocks[id].child;
        return id;
}

/* The next block of a subtree in the order in which children come before their parents. */
static uint32_t next_upwards(const struct space *space, uint32_t id) {
        uint32_t sibling = space->blocks[id].sib_next;

        return sibling == NONE ? space->blocks[id].parent : deepest_first_child(space, sibling);
}

/*
 * Evicts what nobody uses of a block and everything behind it. False: the block itself is still
 * there.
 */
bool evict_subtree(struct space *space, uint32_t id, uint32_t *budget, uint32_t *evicted) {
        for (uint32_t at = deepest_first_child(space, id), next; *budget; at = next) {
                next = at == id ? NONE : next_upwards(space, at);
                (*budget)--;
                if (space->blocks[at].child == NONE && evict_leaf(space, at))
                        (*evicted)++;
                if (next == NONE)
                        return space->blocks[id].state != KVD_SEALED;
        }
        return false;
}

#define EVICT_PIECE 4096u

static int64_t evict_chain(struct space *space, kvd_ref chain, bool *more) {
        uint32_t id = kvd_ref_id(chain), budget = EVICT_PIECE, evicted = 0;

        if (id >= space->ix->capacity || space->blocks[id].state != KVD_SEALED ||
            block_ref(space, id) != chain)
                return store_refuse(space_store(space), -ENOENT,
                                    "block %u of generation %u is not cached (any more)", id,
                                    kvd_ref_generation(chain));
        *more = !evict_subtree(space, id, &budget, &evicted) && budget == 0;
        return evicted;
}

int64_t space_evict(struct space *space, uint64_t n, kvd_ref chain, bool *more) {
        uint64_t want = n ? MIN(n, EVICT_PIECE) : EVICT_PIECE;
        uint32_t evicted = 0;

        *more = false;
        if (chain != KVD_ROOT)
                return evict_chain(space, chain, more);
        for (struct arena *arena = space->memory.arenas; arena && evicted < want;
             arena = arena->next)
                evicted += evict_coldest(space, arena, (uint32_t)want - evicted);
        *more = evicted == want && want != n;
        return evicted;
}
