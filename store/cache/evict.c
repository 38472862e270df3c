/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Eviction chooses the block to evict, and makes sure that it is not in use.
 *
 * Candidates are leaves: sealed blocks without resident children. So a parent stays as long as its
 * children do, and a client that pins the deepest block of a chain holds the whole chain. leaves.c
 * keeps them in order.
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
 * The last blocks of a chain go through these steps together, deepest first, if they would be
 * evicted one after another anyway: they share D4's look at who uses their groups, which costs a
 * load for each client. At a pinned block this stops: it and those above it are sealed again.
 *
 * Either the client's second look at the slot word (C5) comes after D2 and sees it, or its pin (C3)
 * comes before the scan and the daemon sees it.
 *
 * Reading pins is what costs time: one word of every client for every leaf. So a call has a budget
 * of reads (KVD_PIN_READS), stops when they are spent, and remembers what it found. A leaf in use
 * moves to its arena's shelf. Leaves of the shelf are looked at again one at a time, beginning with
 * the client that had the leaf pinned. Eviction finds nothing only when the heap is empty and the
 * whole shelf was looked at in vain.
 */

#include "store/cache/leaves.h"

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
 * of which is a leaf when the one before it has gone, with that stamp. They share one look at the
 * clients' groups. Their pins were just read, so reading them again costs next to nothing. Returns
 * how many have gone; the others are sealed again.
 */
static uint32_t retire(struct space *space, const uint32_t *ids, const uint64_t *stamps, uint32_t n,
                       uint32_t *reads) {
        uint32_t gone = 0;
        bool news;

        for (uint32_t i = 0; i < n; i++)
                block_set_state(space, ids[i], KVD_RETIRING, block_generation(space, ids[i]));
        news = look_at_all(space, ids, n);
        for (; !news && gone < n && !is_pinned(space, ids[gone]); gone++) {
                space->blocks[ids[gone]].stamp = stamps[gone]; /* its parent inherits it */
                take_out(space, ids[gone], reads);
        }
        for (uint32_t i = gone; i < n; i++)
                block_set_state(space, ids[i], KVD_SEALED, block_generation(space, ids[i]));
        return gone;
}

/*
 * Evicts a leaf unless it is in use. Pins are looked at before its word changes, too: clients that
 * pin it should not see it RETIRING again and again.
 */
bool evict_leaf(struct space *space, uint32_t id, uint32_t *reads) {
        if (!block_in_use(space, id, reads) &&
            retire(space, &id, &space->blocks[id].stamp, 1, reads))
                return true;
        space_count(space, KVD_SPACE_EVICTIONS_PINNED, 1);
        return false;
}

/* If the block was used since it got its stamp, updates the stamp and lets it sink. */
static bool warmed_up(struct space *space, uint32_t id) {
        struct block *b = &space->blocks[id];
        uint64_t stamp = b->stamp ? leaf_stamp(space, id) : 0;

        if (stamp <= b->stamp)
                return false;
        b->stamp = stamp;
        leaf_sift(space, id);
        return true;
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
        uint64_t second = leaves_second_coldest(space, arena), stamps[CHAIN];
        uint32_t ids[CHAIN] = {arena->heap[0]}, n = 1;

        stamps[0] = space->blocks[ids[0]].stamp;
        space->leaves.ages.coldest = stamps[0] & CLOCK;
        spend(reads, look_reads(space));
        while (n < MIN(most, CHAIN) && *reads && is_next(space, ids[n - 1], reads)) {
                uint32_t above = space->blocks[ids[n - 1]].parent;

                spend(reads, worth_reads(space, above) +
                                     (same_group(above, ids[n - 1]) ? 0 : look_reads(space)));
                stamps[n] = leaf_stamp_after(space, above, stamps[n - 1]);
                if (stamps[n] > second)
                        break;
                ids[n++] = above;
        }
        return retire(space, ids, stamps, n, reads);
}

/* 0: the coldest leaf sank, or is in use. */
static uint32_t try_coldest(struct space *space, struct arena *arena, uint32_t most,
                            uint32_t *reads) {
        uint32_t id = arena->heap[0];

        if (seems_in_use(space, id, reads)) {
                space_count(space, KVD_SPACE_EVICTIONS_PINNED, 1);
                leaf_shelve(arena, id);
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
        id = leaf_on_shelf(arena, shelf->hand);
        if (block_in_use(space, id, reads)) {
                shelf->hand++;
                shelf->in_vain++;
                return;
        }
        leaf_unshelve(arena, id);
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
