/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The jobs that carry blocks between a pool on a GPU and places of the host: those of KVReviver's exact copies.
 * After a worker was lost the next one does the same again, to the same places.
 */

#include "store/tier/carry.h"

#include <errno.h>

#include "store/cache/memory.h"
#include "store/disk.h"
#include "store/job.h"
#include "store/tier/tier.h"

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

/* NULL: nobody wants to know, or the next worker does it. */
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

#define PIECE_BYTES (UINT64_C(2) << 20) /* given back at once */

bool carry_shrink(struct carry *c) {
        uint64_t bytes = c->last ? c->last->ix->block_bytes : 0;
        uint32_t n = c->n_spare ? (uint32_t)MIN(c->n_spare, DIV_UP(PIECE_BYTES, bytes)) : 0;

        while (n--)
                place_erase(c->last, c->spare[--c->n_spare]);
        return c->n_spare;
}

void carry_take_back(struct carry *c, struct space *space, uint32_t place) {
        uint64_t most = MIN(MAX(STORE_CARRY_BYTES / space->ix->block_bytes, 1), CARRY_MOST);

        space_changes(space);
        if (space == c->last && c->n_spare < most)
                c->spare[c->n_spare++] = place;
        else
                place_erase(space, place);
}

void carry_begin(struct carry *c, struct space *space) {
        while (c->last != space && carry_shrink(c))
                ;
        c->space = c->last = space;
        c->n = 0;
}

bool carry_has_room(const struct carry *c, const struct space *space) {
        return (c->last == space && c->n_spare) || place_available(space);
}

void carry_add(struct carry *c, kvd_ref block) {
        uint32_t place = c->n_spare ? c->spare[--c->n_spare] : place_take(c->space);

        c->items[c->n++] = (struct carry_item){
                .block = block, .place = place, .error = place == KVD_NOWHERE ? -ENOSPC : 0};
}

void carry_add_copy(struct carry *c, kvd_ref block, uint32_t place, uint64_t checksum) {
        c->items[c->n++] = (struct carry_item){
                .block = block, .place = place, .borrowed = true, .checksum = checksum};
}

static int memory_of_copy(struct space *space, uint32_t place, uint64_t *offset) {
        uint32_t tier;
        uint64_t bytes;

        if (place == KVD_NOWHERE)
                return -ENOSPC;
        tier = kvd_place_tier(space->ix, place);
        *offset = (place - kvd_tier_first(space->ix, tier)) * space->ix->block_bytes;
        return space_tier_fd(space, tier, &bytes);
}

int carry_memory(const struct carry *c, uint32_t item, struct space *space, kvd_ref block,
                 uint64_t *offset) {
        uint32_t id = kvd_ref_id(block), segment = kvd_segment_of(space->ix, id);

        if (c)
                return memory_of_copy(space, c->items[item].place, offset);
        *offset = (id - kvd_segments_ids(space->ix, segment)) * space->ix->block_bytes;
        return space_store(space)->memory->descriptor(space, &space->memory.segments[segment], true);
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

uint64_t carry_changes(const struct carry *c, const struct space *space) {
        return c ? atomic_load(&space->ix->counters[KVD_SPACE_ALLOCATED]) +
                           atomic_load(&space->ix->counters[KVD_SPACE_SEALED]) :
                   space->audit.changes;
}
