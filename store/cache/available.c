/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemon writes into each client's pin page how many blocks the client could allocate, and
 * kvd_available reads it there: blocks that are free, that memory could be found for, or that could
 * be evicted. To know the last number, the daemon must know which blocks pins hold: pinned blocks
 * and all before them. It finds out by rounds through the pin pages, as idle work in pieces. A
 * round begins only if pins have changed, as clients say in `held` and `moved` (which are trusted
 * for nothing else). Between two rounds the number follows the space's counts. Chains that sessions
 * pin (session.c) are held, too.
 */

#include "store/account.h"
#include "store/cache/inside.h"

/* ---- the number ------------------------------------------------------------------------------ */

uint32_t fill_limit(const struct space *space) {
        uint64_t quota = space->domain->config.client_quota;
        uint64_t limit = quota ? quota / space->ix->block_bytes : space->memory.max_blocks / 2;

        return (uint32_t)MIN(MAX(limit, 1), UINT32_MAX);
}

/* The first segment may be larger than a small quota: max_blocks then limits its use. */
uint64_t segments_to_come(const struct space *space) {
        const struct domain *domain = space->domain;
        uint64_t bytes = space->ix->segment_bytes, n = account_room(domain, KVD_COST_pool) / bytes;

        if (domain->used[KVD_COST_pool] == 0)
                n = MAX(n, (uint64_t)(account_unreserved(domain, KVD_COST_pool) >= bytes));
        return MIN(n, space->ix->max_segments - space->memory.n_with_memory);
}

/*
 * Counts segments of other spaces in which no block is used. Taking those of its own domain does
 * not change what the domain has. The others are limited by the domain's quota, and guarantees of
 * other domains come first.
 */
uint64_t segments_to_take(const struct space *space) {
        const struct domain *d = space->domain;
        uint64_t bytes = space->ix->segment_bytes, come = segments_to_come(space);
        uint64_t used = d->used[KVD_COST_pool], most = domain_most(d, KVD_COST_pool);
        uint64_t free = less(account_room(d, KVD_COST_pool), come * bytes);
        uint64_t own = less(d->unused - space->account.unused, less(used, most));
        uint64_t others = MIN(account_spare(d) + free, less(less(most, used), come * bytes));
        uint64_t n = less(own + others, account_over(d)) / bytes;

        return MIN(n, space->ix->max_segments - space->memory.n_with_memory - come);
}

/* Blocks that have memory. */
static uint64_t total_of(const struct space *space) {
        return space->ix->capacity - space->count[KVD_ABSENT];
}

/* Was the pool made smaller than its use, and has the domain more than it is guaranteed? */
static bool pool_is_over(const struct space *space) {
        const struct domain *d = space->domain;

        return d->store->account.used[KVD_COST_pool] > d->store->config.pool_bytes &&
               d->used[KVD_COST_pool] >=
                       domain_guaranteed(d, KVD_COST_pool) + space->ix->segment_bytes;
}

bool space_has_too_much(const struct space *space) {
        return space->memory.n_with_memory &&
               (pool_is_over(space) ||
                total_of(space) >= (uint64_t)space->memory.max_blocks + space->ix->segment_blocks);
}

static uint64_t growth(const struct space *space, uint64_t total) {
        uint64_t segments = space->memory.n_with_memory + segments_to_come(space) +
                            segments_to_take(space);

        return MIN(less(space->memory.max_blocks, total),
                   less(segments * space->ix->segment_blocks, total));
}

/*
 * With isolation = arena only the client's own segments count, and every held block of the space is
 * counted as if it were in these.
 */
void available_tell(struct attachment *a) {
        const struct space *space = a->space;
        uint64_t total = total_of(space);
        uint64_t ready = space->ix->arena ? a->arena->n_ready : total;
        uint64_t filling = space->ix->arena ? a->filling.n :
                                              space->count[KVD_FILLING] + space->count[KVD_LIMBO];
        uint64_t busy = filling + space->private.n + space->unready.n_pending + space->look.n_held;
        uint64_t may_fill = less(fill_limit(space), a->tenant->n_filling);

        atomic_store_explicit(&a->page->may_fill, (uint32_t)may_fill, memory_order_relaxed);
        atomic_store_explicit(&a->page->available,
                              (uint32_t)MIN(growth(space, total) + less(ready, busy), may_fill),
                              memory_order_relaxed);
}

static void tell_all(struct space *space) {
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));)
                if (a->state != FOLDING)
                        available_tell(a);
}

/* ---- held blocks ----------------------------------------------------------------------------- */

/*
 * a is NULL for sessions, which come first. False: this client or several have marked the block
 * before, and so all blocks above it.
 */
static bool mark(struct space *space, struct attachment *a, uint32_t id) {
        const struct block *b = &space->blocks[id];
        struct look *look = &space->look;
        struct block_mark *m = &look->marks[id];
        uint32_t seat = a ? a->seat : NONE;

        if (b->state != KVD_SEALED || b->private)
                return false;
        if (m->round != look->round) {
                *m = (struct block_mark){look->round, seat};
                if (a)
                        a->look.alone++;
                look->found++;
                block_segment(space, id)->n_found++;
                return true;
        }
        if (m->seat == seat || m->seat == NONE)
                return false;
        if (space->attachments[m->seat])
                space->attachments[m->seat]->look.alone -= 1;
        m->seat = NONE;
        return true;
}

/* Marks a pinned block and those above it, while the budget lasts. */
static void mark_chain(struct space *space, struct attachment *a, uint32_t *budget) {
        struct look *look = &space->look;

        for (; look->up != NONE && *budget; (*budget)--) {
                uint32_t id = look->up;

                look->up = mark(space, a, id) ? space->blocks[id].parent : NONE;
        }
}

uint64_t pins_state(const struct space *space) {
        uint64_t state = space->leaves.sessions.moved;

        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));)
                if (a->state != FOLDING)
                        state = (state * 31 + atomic_load(&a->page->held) + 1) * 31 +
                                atomic_load_explicit(&a->page->moved, memory_order_acquire);
        return state;
}

/* Clears n_found of all segments; if the round is complete (counts), it becomes n_held. */
static void take_found(struct space *space, bool counts) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);

        for (uint32_t i = 0; i < n; i++) {
                struct segment *s = &space->memory.segments[i];

                if (counts)
                        segment_keeps(space, s, 0, s->n_found);
                s->n_found = 0;
        }
}

static void begin(struct space *space, uint64_t state) {
        space_is_busy(space);
        take_found(space, false);
        space->look = (struct look){.under_way = true,
                                    .marks = space->look.marks,
                                    .seat = NONE,
                                    .up = NONE,
                                    .n_held = space->look.n_held,
                                    .round = space->look.round + 1,
                                    .state = state};
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));)
                a->look = (struct attachment_look){0};
}

static void end(struct space *space) {
        take_found(space, true);
        space->look.under_way = false;
        space->look.n_held = space->look.found;
        space->look.rest = space->look.pieces / 8; /* long rounds are made less often */
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));) {
                if (a->state == FOLDING)
                        continue;
                a->pinned = a->look.pinned;
                atomic_store_explicit(&a->page->held_seen, a->look.held, memory_order_relaxed);
                atomic_store_explicit(&a->page->held_alone, (uint32_t)MAX(a->look.alone, 0),
                                      memory_order_relaxed);
        }
        tell_all(space);
}

#define PIECE 16384u /* pins looked at in one call */
#define MARKS 4096u  /* blocks of pinned chains in one call */

/* Returns true when all pins of this client have been looked at. */
static bool look_through(struct space *space, struct attachment *a) {
        struct look *look = &space->look;
        uint32_t ids = space_ids(space), marks = MARKS, stop;

        if (look->id == 0)
                a->look.held = atomic_load(&a->page->held);
        mark_chain(space, a, &marks);
        if (look->up == NONE)
                look->id = attachment_words_from(a, look->id);
        stop = MIN(ids, look->id + PIECE);
        for (; look->id < stop && marks; look->id++) {
                if (look->id % KVD_GROUP_IDS == 0)
                        look->id = attachment_words_from(a, look->id);
                if (look->id >= stop)
                        break;
                if (!atomic_load_explicit(&a->words[look->id].pins, memory_order_relaxed))
                        continue;
                a->look.pinned++;
                look->up = look->id;
                mark_chain(space, a, &marks);
        }
        return look->id >= ids && look->up == NONE;
}

/* The same for the chains that sessions pin. */
static bool look_through_sessions(struct space *space) {
        struct look *look = &space->look;
        uint32_t marks = MARKS;

        mark_chain(space, NULL, &marks);
        for (; look->id < space->leaves.sessions.n_used && marks; look->id++) {
                const struct session_chain *c = session_chain(space, look->id);

                if (c->block == NONE || chain_session(space, c)->keep != KVD_keep_pinned)
                        continue;
                look->up = c->block;
                mark_chain(space, NULL, &marks);
        }
        return look->id >= space->leaves.sessions.n_used && look->up == NONE;
}

static void next_client(struct look *look) {
        look->seat++; /* from NONE to the first one */
        look->id = 0;
        look->up = NONE;
}

bool available_look(struct space *space) {
        struct look *look = &space->look;
        struct attachment *a;

        if (!look->under_way)
                return false;
        look->pieces++;
        if (look->seat == NONE) {
                if (!look_through_sessions(space))
                        return true;
                next_client(look);
        }
        if (look->seat == space->n_attachments) {
                end(space);
                return false;
        }
        a = space->attachments[look->seat];
        if (!a || a->state == FOLDING || look_through(space, a))
                next_client(look);
        return true;
}

/* ---- the timer ------------------------------------------------------------------------------- */

/*
 * Would further rounds change something in a space without clients? Then they continue. If they
 * stopped with the last client, the clients of other domains, which keep the timer running, would
 * decide how far the rounds get, and that can be observed.
 */
static bool is_unsettled(const struct space *space) {
        return space->look.rest || space->look.under_way || space->private.garbage.n ||
               space->leaves.sessions.n;
}

uint32_t available_round(struct space *space) {
        uint64_t state = pins_state(space);
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);
        bool used = space_age(space, state);

        if (space->look.rest)
                space->look.rest--;
        else if (!space->look.under_way && state != space->look.state)
                begin(space, state);
        /* pins may be gone, and clients may have written to segments without blocks */
        if (space->listed.changed || space->private.garbage.n || n > space->memory.n_with_memory ||
            space->memory.awaits_pages || space_has_too_much(space))
                space_is_busy(space);
        tell_all(space);
        space->memory.tidy = 0;
        space->listed.changed = false;
        return space_users(space) + (used || is_unsettled(space));
}
