/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A GPU's memory, without a context: the driver makes it and gives descriptors for it after cuInit alone. The pool is
 * cut into chunks of one size, each of which becomes one segment of one space at a time:
 *
 *      MISSING ──made──► DIRTY ──a worker──► CLEARING ──it says so──► CLEAN ──begin──► USED ──let_go──► DRAINING
 *         ▲                ▲                     │                              ▲                          │
 *         │                └───it fails, or dies─┘                              └──nobody was told yet─────┤
 *         └─────────made anew, for any domain────── RETURNED ◄──nobody has it mapped any more──────────────┘
 *                                                       └──begin, in the same domain──► USED
 *
 * Who once had a chunk's descriptor could have kept it, and could map it again, whatever it says: so a chunk never
 * changes domains. It is given up and another is made, which the driver does when the last mapping and the last
 * descriptor of the old one are gone, anywhere; until then there is one chunk less. What the driver makes is not known
 * to be empty, and is cleared before anybody gets it.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "store/check.h"
#include "store/memory.h"

enum chunk_state { MISSING, DIRTY, CLEARING, CLEAN, USED, DRAINING, RETURNED, N_STATES };

struct chunk {
        cu_memory memory;        /* owned; not in MISSING */
        int fd;                  /* owned; -1: not handed out yet */
        enum chunk_state state;
        struct domain *domain;   /* USED to RETURNED: of whoever may have its descriptor */
        struct space *space;     /* USED, DRAINING: where it is */
        struct segment *segment;
};

struct device_pool {
        const struct kvd_cuda *cuda;
        struct cu_allocation what;
        uint64_t bytes;          /* of a chunk */
        uint32_t n;
        uint32_t count[N_STATES];
        uint32_t hand;           /* where to look first for a clean one */
        bool clear_failed;       /* wait until somebody says to try again */
        struct chunk chunks[];
};

static struct device_pool *pool_of(const struct store *store) {
        return store->device_pool;
}

static void set_state(struct device_pool *pool, struct chunk *chunk, enum chunk_state state) {
        pool->count[chunk->state]--;
        pool->count[state]++;
        chunk->state = state;
}

/* ---- chunks ------------------------------------------------------------------------------------------------------ */

/* Tells who runs the worker that there is something for it. */
static void want_worker(struct store *store) {
        if (store->on_job)
                store->on_job(store->on_job_data);
}

static int make(struct store *store, struct chunk *chunk) {
        struct device_pool *pool = pool_of(store);
        cu_result error = pool->cuda->cuMemCreate(&chunk->memory, pool->bytes, &pool->what, 0);
        char text[128];

        if (error)
                return store_refuse(store, kvd_cuda_errno(error), "a segment of %llu MiB cannot be had from the GPU: %s",
                                    (unsigned long long)(pool->bytes >> 20),
                                    kvd_cuda_why(pool->cuda, error, text, sizeof text));
        set_state(pool, chunk, DIRTY);
        return 0;
}

static void unmake(struct device_pool *pool, struct chunk *chunk) {
        if (chunk->state != MISSING)
                pool->cuda->cuMemRelease(chunk->memory);
        closep(&chunk->fd);
        chunk->fd = -1;
        chunk->domain = NULL;
        set_state(pool, chunk, MISSING);
}

/* Nothing is lost if it fails: store_make_missing tries again. */
static void remake(struct store *store, struct chunk *chunk) {
        unmake(pool_of(store), chunk);
        if (make(store, chunk) == 0)
                want_worker(store);
}

uint32_t store_make_missing(struct store *store) {
        struct device_pool *pool = pool_of(store);
        bool made = false;

        if (!pool)
                return 0;
        pool->clear_failed = false;
        for (uint32_t i = 0; i < pool->n && pool->count[MISSING]; i++) {
                if (pool->chunks[i].state != MISSING)
                        continue;
                if (make(store, &pool->chunks[i]) < 0)
                        break;
                made = true;
        }
        if (made || pool->count[DIRTY])
                want_worker(store);
        return pool->count[MISSING];
}

static int size_pool(struct store *store, const struct kvd_cuda *cuda, const struct cu_allocation *what) {
        struct store_config *config = &store->config;
        size_t granularity = 0;
        cu_result error = cuda->cuMemGetAllocationGranularity(&granularity, what, CU_GRANULARITY_RECOMMENDED);
        char text[128];

        if (error || !granularity)
                return store_refuse(store, error ? kvd_cuda_errno(error) : -EIO, "the GPU does not say how its memory "
                                    "is cut: %s", kvd_cuda_why(cuda, error, text, sizeof text));
        config->segment_bytes = ALIGN_UP(MIN(config->segment_bytes, config->pool_bytes / 16), granularity);
        config->pool_bytes -= config->pool_bytes % config->segment_bytes;
        store->page_bytes = granularity;
        if (config->pool_bytes == 0)
                return store_refuse(store, -EINVAL, "pool is smaller than the %llu MiB that GPU memory comes in; raise "
                                    "it", (unsigned long long)(granularity >> 20));
        return 0;
}

/* As many as can be had; others may be held by clients of a daemon before this one, until they notice. */
int device_open(struct store *store) {
        const struct kvd_cuda *cuda = store->config.cuda;
        struct cu_allocation what = {.type = CU_ALLOCATION_PINNED, .handle_types = CU_HANDLE_POSIX_FD,
                                     .location = {CU_LOCATION_DEVICE, store->config.device}};
        struct device_pool *pool;
        int r = size_pool(store, cuda, &what);
        uint32_t n;

        if (r < 0)
                return r;
        n = (uint32_t)(store->config.pool_bytes / store->config.segment_bytes);
        pool = store->device_pool = sys->calloc(1, sizeof *pool + n * sizeof *pool->chunks);
        if (!pool)
                return store_refuse(store, -ENOMEM, "out of memory for a pool of %u segments", n);
        pool->cuda = cuda;
        pool->what = what;
        pool->bytes = store->config.segment_bytes;
        pool->n = pool->count[MISSING] = n;
        for (uint32_t i = 0; i < n; i++)
                pool->chunks[i].fd = -1;
        for (uint32_t i = 0; i < n && r == 0; i++)
                r = make(store, &pool->chunks[i]);
        return r == -ENOMEM || pool->count[DIRTY] ? 0 : r;
}

static void close_pool(struct store *store) {
        struct device_pool *pool = pool_of(store);

        for (uint32_t i = 0; pool && i < pool->n; i++)
                unmake(pool, &pool->chunks[i]);
        free(pool);
        store->device_pool = NULL;
}

/* ---- clearing ---------------------------------------------------------------------------------------------------- */

static int export(struct store *store, struct chunk *chunk) {
        const struct kvd_cuda *cuda = pool_of(store)->cuda;
        cu_result error;
        char text[128];

        if (chunk->fd >= 0)
                return chunk->fd;
        error = cuda->cuMemExportToShareableHandle(&chunk->fd, chunk->memory, CU_HANDLE_POSIX_FD, 0);
        if (error == CU_OK)
                return chunk->fd;
        chunk->fd = -1;
        return store_refuse(store, kvd_cuda_errno(error), "the GPU gives no descriptor for a segment: %s",
                            kvd_cuda_why(cuda, error, text, sizeof text));
}

void store_clears(const struct store *store, struct store_clears *ret) {
        const struct device_pool *pool = pool_of(store);

        *ret = (struct store_clears){0};
        if (pool)
                *ret = (struct store_clears){.dirty = pool->count[DIRTY] + pool->count[CLEARING],
                                             .clean = pool->count[CLEAN], .missing = pool->count[MISSING]};
}

bool store_has_device(const struct store *store) {
        return store->config.backend != KVD_BACKEND_HOST;
}

const uint8_t *store_device(const struct store *store) {
        return store->config.uuid;
}

bool store_wants_clearing(const struct store *store) {
        const struct device_pool *pool = pool_of(store);

        return pool && pool->count[DIRTY] && !pool->clear_failed;
}

uint32_t store_next_clear(struct store *store, int fds[STORE_CLEARS], uint64_t *bytes) {
        struct device_pool *pool = pool_of(store);
        uint32_t n = 0;

        if (!store_wants_clearing(store))
                return 0;
        *bytes = pool->bytes;
        for (uint32_t i = 0; i < pool->n && n < STORE_CLEARS; i++) {
                struct chunk *chunk = &pool->chunks[i];

                if (chunk->state != DIRTY || export(store, chunk) < 0)
                        continue;
                set_state(pool, chunk, CLEARING);
                fds[n++] = chunk->fd;
        }
        pool->clear_failed = n == 0;
        return n;
}

void store_clear_done(struct store *store, bool cleared) {
        struct device_pool *pool = pool_of(store);

        for (uint32_t i = 0; i < pool->n; i++)
                if (pool->chunks[i].state == CLEARING)
                        set_state(pool, &pool->chunks[i], cleared ? CLEAN : DIRTY);
}

void store_clear_failed(struct store *store) {
        store_clear_done(store, false);
        pool_of(store)->clear_failed = true;
}

/* ---- segments ---------------------------------------------------------------------------------------------------- */

bool device_draining(const struct segment *segment) {
        return segment->chunk && segment->chunk->state == DRAINING;
}

static struct chunk *find_chunk(struct device_pool *pool, enum chunk_state state, const struct domain *domain) {
        for (uint32_t i = 0; pool->count[state] && i < pool->n; i++) {
                struct chunk *chunk = &pool->chunks[(pool->hand + i) % pool->n];

                if (chunk->state == state && (!domain || chunk->domain == domain)) {
                        pool->hand = (pool->hand + i + 1) % pool->n;
                        return chunk;
                }
        }
        return NULL;
}

/* One whose chunk is only waiting to be unmapped takes it back, if no client is about to unmap it. */
static uint32_t vacant(const struct space *space, const struct segment *segment) {
        const struct device_pool *pool = pool_of(space_store(space));

        if (segment->chunk)
                return drain_told(space, segment->number) ? 0 : 2;
        return pool->count[CLEAN] || pool->count[RETURNED];
}

static int begin(struct space *space, struct segment *segment) {
        struct device_pool *pool = pool_of(space_store(space));
        struct chunk *chunk = segment->chunk;

        if (!chunk) {
                chunk = find_chunk(pool, RETURNED, space->domain) ?: find_chunk(pool, CLEAN, NULL);
                if (!chunk)
                        return -EAGAIN;
                chunk->space = space;
                chunk->segment = segment;
                chunk->domain = space->domain;
                segment->chunk = chunk;
                segment->turn++;
        }
        set_state(pool, chunk, USED);
        return 0;
}

/* There is nothing to put behind blocks: the chunk is there as a whole. */
static int fill(struct space *space, struct segment *segment, uint32_t first, uint32_t n) {
        return 0;
}

static void leave(struct chunk *chunk) {
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
        if (segment->worker) { /* it is next to unmap it: store_next_unmap */
                want_worker(store);
                return;
        }
        leave(chunk);
        set_state(pool_of(store), chunk, RETURNED);
}

/* Whoever has it mapped keeps it: the driver gives it up with the last of them. */
static void give_up(struct space *space, struct segment *segment) {
        struct chunk *chunk = segment->chunk;

        leave(chunk);
        remake(space_store(space), chunk);
}

/* Clients of a deleted space may write into what they had for some time, and are not asked to unmap it. */
static void let_go(struct space *space, struct segment *segment) {
        if (!space->ix->alive) {
                give_up(space, segment);
                return;
        }
        set_state(pool_of(space_store(space)), segment->chunk, DRAINING);
        atomic_fetch_add(&space->ix->drain_epoch, 1);
        device_undrain(space, segment);
}

static bool bury(struct space *space, struct segment *segment) {
        if (!segment->chunk)
                return false;
        give_up(space, segment);
        return true;
}

/* What nobody in its domain took again at once becomes everybody's. */
static bool idle(struct store *store) {
        struct device_pool *pool = pool_of(store);
        struct chunk *chunk = find_chunk(pool, RETURNED, NULL);

        if (chunk)
                remake(store, chunk);
        return pool->count[RETURNED] > 0;
}

static int descriptor(struct space *space, struct segment *segment, bool writable) {
        if (!segment->chunk || segment->chunk->state != USED)
                return -ENODATA;
        return export(space_store(space), segment->chunk);
}

#define MOST_DRAINING 4u /* whoever should unmap them may be asleep: that is no reason to take more, nor to take none */

/* What was taken from one space is not the other's before it is made anew and cleared. */
static bool scarce(const struct store *store) {
        const struct device_pool *pool = pool_of(store);

        return pool->count[DIRTY] + pool->count[CLEARING] + pool->count[RETURNED] > 0 ||
               pool->count[DRAINING] >= MOST_DRAINING;
}

const struct memory_ops memory_device = {.close = close_pool, .vacant = vacant, .begin = begin, .fill = fill,
                                         .let_go = let_go, .bury = bury, .idle = idle, .descriptor = descriptor,
                                         .scarce = scarce};

/* ---- the worker ---------------------------------------------------------------------------------------------------- */

bool store_next_unmap(struct store *store, struct space **space, uint32_t *segment) {
        struct device_pool *pool = pool_of(store);

        for (uint32_t i = 0; pool && pool->count[DRAINING] && i < pool->n; i++) {
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

void space_worker_unmapped(struct space *space, uint32_t segment) {
        space->segments[segment].worker = false;
        device_undrain(space, &space->segments[segment]);
}

void store_worker_gone(struct store *store) {
        struct device_pool *pool = pool_of(store);

        if (!pool)
                return;
        store_clear_done(store, false);
        for (uint32_t i = 0; i < pool->n; i++)
                if (pool->chunks[i].segment && pool->chunks[i].segment->worker)
                        space_worker_unmapped(pool->chunks[i].space, pool->chunks[i].segment->number);
}

/* ---- check --------------------------------------------------------------------------------------------------------- */

static const char *wrong(const struct chunk *chunk) {
        bool placed = chunk->state == USED || chunk->state == DRAINING;

        if (placed != (chunk->segment != NULL) || placed != (chunk->space != NULL))
                return "a chunk is in a segment and in none";
        if (placed && chunk->segment->chunk != chunk)
                return "a chunk and its segment do not know each other";
        if (placed && chunk->domain != chunk->space->domain)
                return "a chunk has changed domains";
        if (chunk->state < USED && chunk->domain)
                return "a chunk that somebody had is handed out as new";
        if (chunk->state == DRAINING && chunk->segment->n_ready)
                return "a segment with blocks is being unmapped";
        return NULL;
}

void device_check(struct walk *w) {
        const struct space *space = w->space;
        struct device_pool *pool = pool_of(space_store(space));
        uint32_t count[N_STATES] = {0};
        const char *what = NULL;

        for (uint32_t i = 0; pool && i < pool->n; i++) {
                count[pool->chunks[i].state]++;
                what = what ?: wrong(&pool->chunks[i]);
        }
        for (uint32_t i = 0; pool && i < space->ix->max_segments; i++)
                if (space->segments[i].n_ready && (!space->segments[i].chunk || space->segments[i].chunk->state != USED))
                        what = "a segment has blocks and no memory";
        if (pool && !what && memcmp(count, pool->count, sizeof count) != 0)
                what = "the chunks of a state are not as many as were counted";
        expect(w, !what, "G1 %s", what);
}
