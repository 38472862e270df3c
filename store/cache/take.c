/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decides which space gives memory to which. A space that finds no free block, and must not grow,
 * takes memory from others, a segment at a time:
 *
 *      cold     segments that are colder than the coldest block that it could evict itself
 *      larger   unused segments of a space that has clearly more memory
 *      any      if it has nothing to evict itself: any unused segment
 *
 * The spaces of its own domain come first, then those of other domains, as far as these keep what
 * they are guaranteed and its own domain may have more. Of several, the coldest gives. Blocks do
 * not move, so a segment can be given only if each of its blocks is free or can be evicted.
 *
 * Looking costs reads (KVD_PIN_READS). A search stops when they are spent, and the next call
 * continues there. A search that found nothing is not repeated before something has changed.
 */

#include <errno.h>

#include "store/account.h"
#include "store/cache/inside.h"
#include "store/cache/memory.h"

/* ---- one segment ----------------------------------------------------------------------------- */

static bool wholly_free(const struct segment *segment) {
        return segment->n_ready && segment->free.n + segment->n_worn_out == segment->n_ready;
}

static bool used_before(const struct space *space, uint32_t id, uint64_t clock, uint32_t *reads) {
        if (clock == ANY_CLOCK)
                return true;
        *reads -= MIN(*reads, space->n_attachments);
        return block_used(space, id) < clock;
}

/* Are all of its blocks free, or sealed, unused and cold? Continues where the last call stopped. */
static bool found_unused(struct space *space, struct segment *segment, uint32_t *reads) {
        uint32_t first = kvd_segment_first(space->ix, segment->number);
        uint32_t *i = &space->memory.unused;

        for (; *i < segment->n_ready && *reads; ++*i) {
                enum kvd_state state = space->blocks[first + *i].state;

                *reads -= 1;
                if (state == KVD_FREE || state == KVD_ABSENT)
                        continue;
                if (state != KVD_SEALED || block_in_use(space, first + *i, reads) ||
                    !used_before(space, first + *i, space->memory.allowed, reads))
                        return false;
        }
        return true;
}

/*
 * Evicts a block and its descendants. False: one of them is in use, or the reads are spent and the
 * next call continues at `stopped`.
 */
static bool empty_block(struct space *space, uint32_t id, uint32_t *reads) {
        kvd_ref *stopped = &space->memory.stopped;
        uint32_t at = *stopped && block_current(space, *stopped) ? kvd_ref_id(*stopped) : NONE,
                 evicted = 0;
        bool gone = evict_subtree(space, id, &at, reads, &evicted);

        *stopped = at == NONE ? 0 : block_ref(space, at);
        return gone;
}

/* Evicts its blocks, and their descendants in other segments. False: one of them is in use. */
static bool empty_out(struct space *space, struct segment *segment, uint32_t *reads) {
        uint32_t first = kvd_segment_first(space->ix, segment->number);
        uint32_t *i = &space->memory.emptied;

        for (; *i < space->memory.unused && *reads; ++*i) {
                *reads -= 1;
                if (space->blocks[first + *i].state == KVD_SEALED &&
                    !empty_block(space, first + *i, reads))
                        return space->memory.stopped != 0;
        }
        return true;
}

/* 1: all of its blocks are free, 0: some are in use or too warm, -EAGAIN: not known yet. */
static int try_segment(struct space *space, struct segment *segment, uint32_t *reads) {
        if (!wholly_free(segment) &&
            (!found_unused(space, segment, reads) || !empty_out(space, segment, reads)))
                return 0;
        return wholly_free(segment) ? 1 : *reads ? 0 : -EAGAIN;
}

/* ---- one space ------------------------------------------------------------------------------- */

/* Which segments and blocks a space is asked for. */
struct wish {
        bool (*among)(const struct segment *, const struct arena *); /* may it be this segment? */
        const struct arena *arena;
        uint64_t before; /* blocks last used before that clock of the space; or ANY_CLOCK */
};

static void begin_segment(struct space *space) {
        space->memory.unused = space->memory.emptied = 0;
        space->memory.stopped = 0;
}

static void next_segment(struct space *space) {
        space->memory.hand++;
        begin_segment(space);
}

static struct segment *free_segment(struct space *space, const struct wish *wish, uint32_t n) {
        if (space->count[KVD_FREE] == 0)
                return NULL;
        for (uint32_t i = 0; i < n; i++) {
                struct segment *segment = &space->memory.segments[i];

                if (wholly_free(segment) && wish->among(segment, wish->arena))
                        return segment;
        }
        return NULL;
}

/*
 * A round begins at the segment of the coldest leaf. If this call allows fewer blocks than the last
 * one, the current segment is looked at again.
 */
static void begin_round(struct space *space, const struct wish *wish) {
        struct arena *arena = space->memory.arenas;

        if (space->memory.given_up == 0 && space->memory.unused == 0 && arena && arena->n_heap)
                space->memory.hand = kvd_segment_of(space->ix, arena->heap[0]);
        if (wish->before < space->memory.allowed)
                begin_segment(space);
        space->memory.allowed = wish->before;
}

/*
 * Gives one segment's memory back to the pool. A hand goes round the segments, and stops where the
 * reads of a call end. 1: done, 0: a whole round found none, -EAGAIN: not yet.
 */
static int give_segment(struct space *space, const struct wish *wish, uint32_t *reads) {
        uint32_t n = atomic_load_explicit(&space->ix->n_segments, memory_order_relaxed);
        struct segment *segment;

        if (space->memory.returning)
                return segment_go_on_returning(space);
        segment = free_segment(space, wish, n);
        if (segment)
                return segment_return(space, segment);
        for (begin_round(space, wish); space->memory.given_up < n;
             space->memory.given_up++, next_segment(space)) {
                int r = 0;

                segment = &space->memory.segments[space->memory.hand % n];
                if (segment->n_ready && !segment->n_kept && wish->among(segment, wish->arena))
                        r = try_segment(space, segment, reads);
                if (r < 0)
                        return r;
                if (r == 0)
                        continue;
                next_segment(space);
                space->memory.given_up = 0;
                return segment_return(space, segment);
        }
        space->memory.given_up = 0;
        return 0;
}

static bool any_segment(const struct segment *segment, const struct arena *arena) {
        return true;
}

bool space_trim(struct space *space) {
        const struct wish wish = {any_segment, NULL, ANY_CLOCK};
        uint32_t reads = KVD_PIN_READS;

        if (space->memory.returning)
                return segment_go_on_returning(space) != 0;
        return space_has_too_much(space) && give_segment(space, &wish, &reads) != 0;
}

/*
 * With isolation = arena, a segment of another arena can be spared if its writer has ended, or if
 * all of its blocks are free.
 */
static bool spare_segment(const struct segment *segment, const struct arena *arena) {
        return segment->arena != arena && (!segment->arena->writer || wholly_free(segment));
}

int arena_reclaim(struct space *space, struct arena *arena, uint32_t *reads) {
        const struct wish wish = {spare_segment, arena, ANY_CLOCK};

        return space->ix->arena ? give_segment(space, &wish, reads) : 0;
}

/* ---- among spaces ---------------------------------------------------------------------------- */

static uint64_t pool_bytes(const struct space *space) {
        return space->memory.n_with_memory * space->ix->segment_bytes;
}

static bool quota_used_up(const struct domain *domain, uint64_t bytes) {
        uint64_t used = domain->used[KVD_COST_pool];

        return used && used + bytes > domain_most(domain, KVD_COST_pool);
}

/*
 * Deleted spaces of other domains count only while its own domain may have more: otherwise it would
 * wait for memory that it cannot get.
 */
bool space_may_inherit(const struct space *space) {
        bool own_domain_only = quota_used_up(space->domain, space->ix->segment_bytes);

        if (blocks_with_memory(space) >= space->memory.max_blocks)
                return false;
        for (const struct space *s = space_store(space)->deleted; s; s = s->next)
                if (s->domain == space->domain || !own_domain_only)
                        return true;
        return false;
}

/* A space that may be asked for memory. */
struct donor {
        struct space *space; /* NULL if none */
        unsigned rank;       /* lower ranks are asked first ... */
        uint64_t age;        /* ... then lower ages (rank_cold, rank_any) */
        uint64_t before;     /* as in struct wish */
};

static bool goes_first(const struct donor *a, const struct donor *b) {
        return !b->space || a->rank < b->rank || (a->rank == b->rank && a->age < b->age);
}

/* May memory of that space come to the domain at all? */
static bool may_give(const struct space *donor, const struct domain *to, bool own_domain_only) {
        if (donor->memory.n_with_memory == 0)
                return false;
        return donor->domain == to ||
               (!own_domain_only && account_may_give(donor->domain, donor->ix->segment_bytes));
}

static bool has_clearly_more(const struct space *donor, const struct space *space) {
        return pool_bytes(donor) > pool_bytes(space) + space->ix->segment_bytes;
}

/* Are some of its segments without blocks that keep them? Reads one line of memory. */
static bool may_have_some(const struct space *donor) {
        return donor->memory.n_with_memory > donor->memory.n_kept;
}

/* Does it have segments without used blocks, or may it have some since pins changed? */
static bool has_some(const struct space *donor) {
        return donor->account.unused || donor->look.under_way ||
               donor->look.state != pins_state(donor);
}

/* Nothing has changed since it was found to have nothing. */
static bool is_vain(const struct space *donor) {
        const struct vain *vain = &donor->memory.vain;

        return vain->changes == donor->audit.changes && vain->pins == pins_state(donor);
}

enum { COLD, COLD_OF_OTHERS, LARGER, NOT_ASKED };

/* when: last use of the asking space's coldest leaf, on the store's clock. */
static struct donor rank_cold(struct space *donor, const struct space *space, uint64_t when) {
        uint64_t coldest = leaves_coldest(donor);
        bool same = donor->domain == space->domain;
        struct donor d = {donor, NOT_ASKED, clock_when(donor, coldest),
                          clock_before(donor, when, space_users(donor) > 0)};

        if (when > donor->memory.warm && d.before > coldest) {
                d.rank = same ? COLD : COLD_OF_OTHERS;
        } else if (!is_vain(donor) &&
                   (has_clearly_more(donor, space) ||
                    (!same && account_below_guarantee(space->domain, KVD_COST_pool)))) {
                d.rank = LARGER;
                d.age = UINT64_MAX - pool_bytes(donor);
                d.before = ANY_CLOCK;
        }
        return d;
}

static struct donor rank_any(struct space *donor, const struct space *space) {
        bool same = donor->domain == space->domain;
        struct donor d = {donor, same ? 0 : 1, clock_when(donor, leaves_coldest(donor)), ANY_CLOCK};

        if (is_vain(donor))
                d.rank = NOT_ASKED;
        return d;
}

/* The one to ask next in this search. when: as in rank_cold, or ANY_TIME. */
static struct donor next_donor(const struct space *space, uint64_t search, uint64_t when) {
        bool own_domain_only = quota_used_up(space->domain, space->ix->segment_bytes);
        struct donor best = {.rank = NOT_ASKED};

        for (struct domain *d = space_store(space)->domains; d; d = d->next)
                for (uint32_t i = 0; i < d->spaces.n; i++) {
                        struct space *s = d->spaces.at[i].space;
                        struct donor donor;

                        if (s == space || !may_have_some(s) || s->memory.asked_in == search ||
                            space_is_incomplete(s) ||
                            !may_give(s, space->domain, own_domain_only) || !has_some(s))
                                continue;
                        donor = when == ANY_TIME ? rank_any(s, space) : rank_cold(s, space, when);
                        if (donor.rank != NOT_ASKED && goes_first(&donor, &best))
                                best = donor;
                }
        return best;
}

static int ask(const struct donor *donor, uint32_t *reads) {
        const struct wish wish = {any_segment, NULL, donor->before};

        return give_segment(donor->space, &wish, reads);
}

/* Does it have max_blocks already, or is so much on its way that no more should be taken? */
static bool wants_none(const struct space *space) {
        const struct store *store = space_store(space);

        return blocks_with_memory(space) >= space->memory.max_blocks ||
               store->memory->scarce(store);
}

/* Notes that it was asked in vain, for cold memory or for any. */
static void remember(const struct donor *donor) {
        struct space *space = donor->space;

        if (donor->before == ANY_CLOCK)
                space->memory.vain = (struct vain){pins_state(space), space->audit.changes};
        else
                space->memory.warm = space_store(space)->spaces.clock;
}

static int end_search(struct search *search, int r) {
        *search = (struct search){0};
        return r;
}

/*
 * Asks each other space once, over several calls if necessary. Searches of other spaces may
 * overwrite its marks (asked_in), so it also counts the spaces that it asked.
 */
static int go_on_searching(struct space *space, struct search *search, uint64_t when,
                           uint32_t *reads) {
        struct space_lists *all = &space_store(space)->spaces;
        struct donor donor;
        int r;

        if (wants_none(space))
                return 0;
        if (!search->id)
                search->id = ++all->searches;
        for (; search->n_asked <= all->all.n; search->n_asked++) {
                if (!*reads)
                        return -EAGAIN;
                donor = next_donor(space, search->id, when);
                *reads -= MIN(*reads, all->all.n);
                if (!donor.space)
                        break;
                r = ask(&donor, reads);
                if (r)
                        return r < 0 ? r : end_search(search, r);
                donor.space->memory.asked_in = search->id;
                remember(&donor);
        }
        return end_search(search, 0);
}

int space_take_cold(struct space *space, struct arena *arena, uint32_t *reads) {
        return go_on_searching(space, &space->memory.cold, leaf_age(space, arena), reads);
}

/* Spaces that are still being taken over may give memory later. */
static bool others_are_incomplete(const struct space *space) {
        bool own_domain_only = quota_used_up(space->domain, space->ix->segment_bytes);

        for (struct domain *d = space_store(space)->domains; d; d = d->next)
                for (uint32_t i = 0; i < d->spaces.n; i++)
                        if (space_is_incomplete(d->spaces.at[i].space) &&
                            may_give(d->spaces.at[i].space, space->domain, own_domain_only))
                                return true;
        return false;
}

int space_take_any(struct space *space, uint32_t *reads) {
        int r = go_on_searching(space, &space->memory.any, ANY_TIME, reads);

        return r == 0 && !wants_none(space) && others_are_incomplete(space) ? -EAGAIN : r;
}
