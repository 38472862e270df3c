/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Carries blocks between a pool on a GPU and places in host memory, with the jobs that make
 * and read exact copies. If a worker is lost, the next one repeats the job with the same places.
 */

#include "store/below/carry.h"

#include <assert.h>
#include <errno.h>

#include "store/account.h"
#include "store/below/place.h"
#include "store/cache/memory.h"
#include "store/file_tier.h"
#include "store/job.h"

/* ---- jobs ------------------------------------------------------------------------------------ */

static bool write_items(struct ticket *t, struct job *job) {
        const struct carry *c = t->owner;

        for (uint32_t i = 0; i < c->n; i++) {
                struct kvd_job_item *item;

                if (c->items[i].error)
                        continue;
                item = job_add(job, c->items[i].block, i);
                item->place = c->items[i].place;
                item->checksum = c->items[i].checksum;
        }
        return job->n_items;
}

/* NULL: the carry was forgotten, or the next worker repeats the job. */
static struct carry *settled(const struct job *job, enum job_end end) {
        struct carry *c = job->ticket ? job->ticket->owner : NULL;

        if (!c || end == JOB_AGAIN)
                return NULL;
        for (uint32_t i = 0; end == JOB_FAILED && i < job->n_items; i++)
                c->items[job->items[i].at].error = -ECANCELED;
        return c;
}

static void settle_down(struct job *job, enum job_end end, const void *results, uint32_t n) {
        const struct kvd_spilled *copies = results;
        struct carry *c = settled(job, end);

        if (!c)
                return;
        for (uint32_t i = 0; end == JOB_DONE && i < job->n_items; i++) {
                c->items[job->items[i].at].error = -(int32_t)copies[i].error;
                c->items[job->items[i].at].checksum = copies[i].checksum;
        }
        c->done(c, end == JOB_FAILED);
}

static void settle_up(struct job *job, enum job_end end, const void *results, uint32_t n) {
        const uint32_t *errors = results;
        struct carry *c = settled(job, end);

        if (!c)
                return;
        for (uint32_t i = 0; end == JOB_DONE && i < job->n_items; i++)
                c->items[job->items[i].at].error = -(int32_t)errors[i];
        c->done(c, end == JOB_FAILED);
}

static const struct job_kind down = {.number = KVD_JOB_SPILL,
                                     .result_bytes = sizeof(struct kvd_spilled),
                                     .write = write_items,
                                     .settle = settle_down};

static const struct job_kind up = {.number = KVD_JOB_REVIVE,
                                   .result_bytes = sizeof(uint32_t),
                                   .urgent = true,
                                   .write = write_items,
                                   .settle = settle_up};

static void ask(struct carry *c, const struct job_kind *kind) {
        ticket_init(&c->ticket, kind, c->space, c);
        job_ask(&c->ticket);
}

void carry_down(struct carry *c) {
        ask(c, &down);
}

void carry_up(struct carry *c) {
        ask(c, &up);
}

bool carry_up_written(struct carry *c, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n) {
        bool any = false;

        for (uint32_t i = 0; i < c->n; i++) {
                c->items[i].error = i < n ? errors[i] : -ECANCELED;
                c->items[i].checksum = i < n ? checksums[i] : 0;
                any = any || !c->items[i].error;
        }
        if (any)
                carry_up(c);
        else
                carry_end(c);
        return any;
}

bool carry_is_whole(const struct carry *c) {
        for (uint32_t i = 0; i < c->n; i++)
                if (c->items[i].error)
                        return false;
        return true;
}

bool carry_is_under_way(const struct carry *c) {
        return job_pending(&c->ticket);
}

/* ---- places ---------------------------------------------------------------------------------- */

#define PIECES 8u /* spare places are given back in this many parts: 2 MiB of a tier at once */

bool carry_shrink(struct carry *c) {
        uint64_t piece = c->most / PIECES;
        uint32_t n;

        if (!c->last)
                return false;
        n = (uint32_t)MIN(c->n_spare, DIV_UP(piece, space_block_bytes(c->last)));
        while (n--)
                place_erase(c->last, c->spare[--c->n_spare]);
        return c->n_spare;
}

void carry_take_back(struct carry *c, struct space *space, uint32_t place) {
        uint64_t most = MIN(MAX(c->most / space_block_bytes(space), 1), CARRY_MOST);

        space_changes(space);
        if (space == c->last && c->n_spare < most)
                c->spare[c->n_spare++] = place;
        else
                place_erase(space, place);
}

bool carry_may_begin(struct carry *c, struct space *space) {
        if (c->last != space && c->n_spare)
                return false;
        c->last = space;
        return true;
}

void carry_begin(struct carry *c, struct space *space) {
        assert(c->last == space || !c->n_spare);
        c->space = c->last = space;
        c->n = 0;
}

bool carry_has_room(const struct carry *c, const struct space *space) {
        return (c->last == space && c->n_spare) || place_available(space);
}

void carry_add(struct carry *c, kvd_ref block) {
        uint32_t place = c->n_spare ? c->spare[--c->n_spare] : place_take(c->space);

        c->items[c->n++] = (struct carry_item){.block = block,
                                               .place = place,
                                               .error = place == KVD_NOWHERE ? -ENOSPC : 0};
}

void carry_add_copy(struct carry *c, kvd_ref block, uint32_t place, uint64_t checksum) {
        c->items[c->n++] = (struct carry_item){.block = block,
                                               .place = place,
                                               .borrowed = true,
                                               .checksum = checksum};
}

int carry_memory(const struct carry *c, uint32_t item, struct space *space, kvd_ref block,
                 uint64_t *offset) {
        uint32_t id = kvd_ref_id(block), segment = kvd_segment_of(space_index(space), id);

        if (c)
                return place_memory(space, c->items[item].place, offset);
        *offset = (id - kvd_segments_ids(space_index(space), segment)) * space_block_bytes(space);
        return space_store(space)->memory->descriptor(space, space_segment(space, segment), 0,
                                                      true);
}

uint32_t carry_give(struct carry *c, uint32_t item) {
        uint32_t place = c->items[item].place;

        c->items[item].place = KVD_NOWHERE;
        space_changes(c->space);
        return place;
}

void carry_end(struct carry *c) {
        for (uint32_t i = 0; c->space && i < c->n; i++)
                if (!c->items[i].borrowed && c->items[i].place != KVD_NOWHERE)
                        carry_take_back(c, c->space, c->items[i].place);
        c->space = NULL;
        c->n = 0;
}

void carry_forget(struct carry *c) {
        job_withdraw(&c->ticket);
        c->space = c->last = NULL;
        c->n = c->n_spare = 0;
}

/* ---- room that copies leave ------------------------------------------------------------------ */

void carry_open(struct carry *c, struct store *store) {
        c->next = store->account.carries;
        store->account.carries = c;
}

void carry_close(struct carry *c, struct store *store) {
        struct carry **link = &store->account.carries;

        while (*link && *link != c)
                link = &(*link)->next;
        if (*link)
                *link = c->next;
        carry_forget(c);
}

/* The carry's part of most, the bytes for copies. All carries together have at most half of it. */
static uint64_t needs(const struct store *store, const struct carry *carry, uint64_t most) {
        uint64_t all = 0;

        for (const struct carry *c = store->account.carries; c; c = c->next)
                all += c->most;
        return most / 2 >= all ? carry->most : most / 2 * carry->most / all;
}

static uint64_t places_held(const struct carry *c) {
        uint64_t n = c->n_spare;

        for (uint32_t i = 0; i < c->n; i++)
                n += !c->items[i].borrowed && c->items[i].place != KVD_NOWHERE;
        return n;
}

/* Bytes of a domain, or of all (NULL), that the carry has. */
static uint64_t held_by(const struct carry *c, const struct domain *domain) {
        return c->last && (!domain || c->last->domain == domain) ?
                       places_held(c) * c->last->ix->block_bytes :
                       0;
}

#define COME_BACK 16u /* 1/16 of the memory for copies is reserved for reading copies from files */

/* Bytes reserved for copies that are read from files: enough for at least one. */
static uint64_t come_back(const struct space *space, uint64_t most) {
        return space_store(space)->account.copies_below ?
                       MAX(most / COME_BACK, space_block_bytes(space)) :
                       0;
}

bool carry_spares(const struct space *space, uint64_t bytes) {
        const struct store *store = space_store(space);
        const struct domain *domain = space_domain(space);
        uint64_t limit = store->account.limit[KVD_COST_spill];
        uint64_t own = bytes + come_back(space, domain_most(domain, KVD_COST_spill));
        uint64_t all = bytes + come_back(space, limit);

        for (const struct carry *c = store->account.carries; c; c = c->next) {
                uint64_t most = needs(store, c, domain_most(domain, KVD_COST_spill));

                own += less(MAX(most, space_block_bytes(space)), held_by(c, domain));
                all += less(needs(store, c, limit), held_by(c, NULL));
        }
        return own <= account_room(domain, KVD_COST_spill) &&
               all <= account_unreserved(domain, KVD_COST_spill);
}

bool carry_spares_place(const struct space *space) {
        const struct store *store = space_store(space);
        uint64_t all = domain_most(space_domain(space), KVD_COST_spill), kept = 0;
        uint64_t bytes = space_block_bytes(space);

        for (const struct carry *c = store->account.carries; c; c = c->next) {
                uint64_t most = needs(store, c, all) / bytes;

                most = MIN(MAX(most, 1), CARRY_MOST);
                kept += less(most, c->last == space ? places_held(c) : 0);
        }
        return places_free(space) > MIN(kept, kvd_places(space_index(space)) / 2) &&
               carry_spares(space, bytes);
}

uint64_t carry_changes(const struct carry *c, const struct space *space) {
        return c ? atomic_load(&space_index(space)->counters[KVD_SPACE_ALLOCATED]) +
                               atomic_load(&space_index(space)->counters[KVD_SPACE_SEALED]) :
                   space->audit.changes;
}
