/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Segments in GPU memory: the other table of memory.h. A segment has one chunk while it has blocks,
 * and keeps it until no process has it mapped any more (drain.c).
 */

#include <errno.h>
#include <string.h>

#include "store/device/chunk.h"
#include "store/keep_inside.h"

/* ---- segments -------------------------------------------------------------------------------- */

bool device_draining(const struct segment *segment) {
        return segment->chunk && segment->chunk->state == DRAINING;
}

static struct chunk *find_chunk(struct device_pool *pool, enum chunk_state state,
                                const struct domain *domain) {
        for (uint32_t i = 0; pool->count[state] && i < pool->n; i++) {
                struct chunk *chunk = &pool->chunks[(pool->hand + i) % pool->n];

                if (chunk->state == state && (!domain || chunk->domain == domain)) {
                        pool->hand = (pool->hand + i + 1) % pool->n;
                        return chunk;
                }
        }
        return NULL;
}

/* A segment whose chunk is draining can use it again, unless a client was told to unmap it. */
static uint32_t vacant(const struct space *space, const struct segment *segment) {
        const struct device_pool *pool = pool_of(space_store(space));

        if (segment->chunk)
                return pool->cuda && drain_told(space, segment->number) ? 0 : 2;
        return pool->count[CLEAN] || pool->count[RETURNED];
}

static void place(struct space *space, struct segment *segment, struct chunk *chunk,
                  uint32_t version) {
        chunk->space = space;
        chunk->segment = segment;
        chunk->domain = space_domain(space);
        segment->chunk = chunk;
        segment->memory_version = version;
        atomic_store(&kvd_index_memory(space_index(space))[segment->number], version);
}

/* The chunk's descriptors go to the keeper before any client gets a block of it. */
static void keep_chunk(struct space *space, struct segment *segment) {
        struct store *store = space_store(space);
        int fds[KVD_SHARDS];

        for (uint32_t i = 0; i < pool_of(store)->n_gpus; i++) {
                fds[i] = chunk_export(store, segment->chunk, i);
                if (fds[i] < 0)
                        return;
        }
        keep_segment(space, segment, fds);
}

static int begin(struct space *space, struct segment *segment) {
        struct store *store = space_store(space);
        struct device_pool *pool = pool_of(store);

        if (!segment->chunk) {
                struct chunk *chunk = find_chunk(pool, RETURNED, space_domain(space)) ?:
                                              find_chunk(pool, CLEAN, NULL);

                if (!chunk)
                        return -EAGAIN;
                place(space, segment, chunk, segment->memory_version + 1);
                if (pool->cuda)
                        keep_chunk(space, segment);
        }
        chunk_set_state(pool, segment->chunk, USED);
        return 0;
}

/* All clients of the previous daemon count as having it mapped: they cannot be asked. */
static int adopt(struct space *space, struct segment *segment, uint32_t version, int *fds) {
        struct store *store = space_store(space);
        struct device_pool *pool = pool_of(store);
        struct chunk *chunk = find_chunk(pool, MISSING, NULL);
        int r = chunk ? chunk_import(store, chunk, fds) : -ENOMEM;

        if (r < 0)
                return r;
        place(space, segment, chunk, version);
        chunk_set_state(pool, chunk, USED);
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));)
                drain_handed_out(a, segment->number);
        return 0;
}

/* Nothing to do: a chunk always has all its memory. */
static int fill(struct space *space, struct segment *segment, uint32_t first, uint32_t n) {
        return 0;
}

static void leave(struct chunk *chunk) {
        drop_segment(chunk->space, chunk->segment);
        chunk->segment->chunk = NULL;
        chunk->segment->worker = false;
        chunk->segment = NULL;
        chunk->space = NULL;
}

void device_undrain(struct space *space, struct segment *segment) {
        struct store *store = space_store(space);
        struct chunk *chunk = segment->chunk;

        if (!device_draining(segment) || drain_mapped(space, segment->number))
                return;
        if (segment->worker) { /* the worker unmaps it next: store_next_unmap */
                jobs_want_worker(store);
                return;
        }
        leave(chunk);
        chunk_set_state(pool_of(store), chunk, RETURNED);
}

/* The driver frees the memory when its last mapping and descriptor are gone. */
static void give_up(struct space *space, struct segment *segment) {
        struct chunk *chunk = segment->chunk;

        leave(chunk);
        if (space_is_left(space))
                chunk_unmake(pool_of(space_store(space)), chunk);
        else
                chunk_remake(space_store(space), chunk);
}

/*
 * Clients of a deleted space are not asked to unmap its segments, and may still write to them for a
 * while. So these chunks are freed, not drained.
 */
static bool let_go(struct space *space, struct segment *segment) {
        if (!space_index(space)->alive) {
                give_up(space, segment);
                return true;
        }
        if (!pool_of(space_store(space))->cuda) /* legacy: the space keeps its only segment */
                return true;
        chunk_set_state(pool_of(space_store(space)), segment->chunk, DRAINING);
        atomic_fetch_add(&space->ix->drain_epoch, 1);
        device_undrain(space, segment);
        return true;
}

static bool bury(struct space *space, struct segment *segment) {
        if (!segment->chunk)
                return false;
        give_up(space, segment);
        return true;
}

/* A returned chunk that its own domain did not reuse at once is remade for all domains. */
static bool idle(struct store *store) {
        struct device_pool *pool = pool_of(store);
        struct chunk *chunk = find_chunk(pool, RETURNED, NULL);

        if (chunk)
                chunk_remake(store, chunk);
        return pool->count[RETURNED] > 0;
}

static int descriptor(struct space *space, struct segment *segment, uint32_t shard, bool writable) {
        if (shard >= pool_of(space_store(space))->n_gpus)
                return -ENOENT;
        if (!segment->chunk || segment->chunk->state != USED)
                return -ENODATA;
        if (!pool_of(space_store(space))->cuda)
                return -EOPNOTSUPP;
        return chunk_export(space_store(space), segment->chunk, shard);
}

/* a client that should unmap them may be asleep: take some more meanwhile, but not many */
#define MOST_DRAINING 4u

/*
 * True while memory taken from one space is on its way to others: being remade, cleared, or
 * drained.
 */
static bool scarce(const struct store *store) {
        const struct device_pool *pool = pool_of(store);

        return pool->count[DIRTY] + pool->count[CLEARING] + pool->count[RETURNED] > 0 ||
               pool->count[DRAINING] >= MOST_DRAINING;
}

/* Nothing to do: segments without memory cost nothing. */
static bool tidy(struct space *space) {
        return false;
}

static void close_pool(struct store *store) {
        struct device_pool *pool = pool_of(store);

        for (uint32_t i = 0; pool && i < pool->n; i++)
                chunk_unmake(pool, &pool->chunks[i]);
        if (pool)
                free(pool->shards);
        free(pool);
        store->device_pool = NULL;
}

const uint8_t *space_segment_handle(const struct space *space, uint32_t segment, uint32_t shard) {
        const struct kvd_index *ix = space_index(space);
        bool there = segment < ix->max_segments && shard < ix->n_shards &&
                     space_segment(space, segment)->chunk;

        return there && ix->backend == KVD_BACKEND_LEGACY ?
                       space_segment(space, segment)->chunk->shards[shard].handle.bytes :
                       NULL;
}

/* ---- the worker ------------------------------------------------------------------------------ */

static bool next_unmap(struct store *store, struct space **space, uint32_t *segment) {
        struct device_pool *pool = pool_of(store);

        for (uint32_t i = 0; pool->count[DRAINING] && i < pool->n; i++) {
                struct chunk *chunk = &pool->chunks[i];

                if (chunk->state != DRAINING || !chunk->segment->worker ||
                    drain_mapped(chunk->space, chunk->segment->number))
                        continue;
                *space = chunk->space;
                *segment = chunk->segment->number;
                return true;
        }
        return false;
}

const struct memory_ops memory_device = {.close = close_pool,
                                         .vacant = vacant,
                                         .begin = begin,
                                         .fill = fill,
                                         .adopt = adopt,
                                         .let_go = let_go,
                                         .bury = bury,
                                         .idle = idle,
                                         .tidy = tidy,
                                         .descriptor = descriptor,
                                         .handed_out = drain_handed_out,
                                         .next_unmap = next_unmap,
                                         .scarce = scarce};

bool store_next_unmap(struct store *store, struct space **space, uint32_t *segment) {
        return store->memory->next_unmap(store, space, segment);
}

void space_worker_unmapped(struct space *space, uint32_t segment) {
        space_segment(space, segment)->worker = false;
        device_undrain(space, space_segment(space, segment));
}

void store_worker_gone(struct store *store) {
        struct device_pool *pool = pool_of(store);

        if (!pool)
                return;
        store_clear_done(store, false);
        for (uint32_t i = 0; i < pool->n; i++)
                if (pool->chunks[i].segment && pool->chunks[i].segment->worker)
                        space_worker_unmapped(pool->chunks[i].space,
                                              pool->chunks[i].segment->number);
}
