/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chunks of GPU memory while no segment uses them: allocated, cleared, freed and allocated again
 * (chunk.h). A worker clears the memory, or an exporter allocates it; the daemon only has handles
 * of it.
 */

#include "store/device/chunk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/sys.h"

void chunk_set_state(struct device_pool *pool, struct chunk *chunk, enum chunk_state state) {
        pool->count[chunk->state]--;
        pool->count[state]++;
        chunk->state = state;
}

/* ---- chunks ---------------------------------------------------------------------------------- */

static int make(struct store *store, struct chunk *chunk) {
        struct device_pool *pool = pool_of(store);
        cu_result error = CU_OK;
        char text[128];

        if (pool->cuda)
                error = pool->cuda->cuMemCreate(&chunk->memory, pool->bytes, &pool->what, 0);
        if (error)
                return store_refuse(store, kvd_cuda_errno(error),
                                    "a segment of %llu MiB cannot be allocated on the GPU: %s",
                                    (unsigned long long)(pool->bytes >> 20),
                                    kvd_cuda_why(pool->cuda, error, text, sizeof text));
        chunk_set_state(pool, chunk, DIRTY);
        return 0;
}

void chunk_unmake(struct device_pool *pool, struct chunk *chunk) {
        if (chunk->state != MISSING && pool->cuda)
                pool->cuda->cuMemRelease(chunk->memory);
        closep(&chunk->fd);
        chunk->fd = -1;
        chunk->domain = NULL;
        chunk_set_state(pool, chunk, MISSING);
}

/* If the allocation fails, store_make_missing tries again later. */
void chunk_remake(struct store *store, struct chunk *chunk) {
        chunk_unmake(pool_of(store), chunk);
        if (make(store, chunk) == 0)
                jobs_want_worker(store);
}

/*
 * The pool must not take all memory, since the worker and every engine create contexts later. The
 * reserve for them is allocated before the chunks and freed after them, because a process without a
 * context cannot ask the driver how much memory is free.
 */
static int take_reserve(struct store *store, cu_memory *ret) {
        struct device_pool *pool = pool_of(store);
        uint64_t bytes = ALIGN_UP(store->config.reserve_bytes, store->pages.bytes);
        cu_result error;
        char text[128];

        *ret = 0;
        if (!pool->cuda || !bytes)
                return 0;
        error = pool->cuda->cuMemCreate(ret, bytes, &pool->what, 0);
        if (error)
                return store_refuse(store, kvd_cuda_errno(error),
                                    "the GPU has no %llu MiB left to keep free (reserve): %s",
                                    (unsigned long long)(bytes >> 20),
                                    kvd_cuda_why(pool->cuda, error, text, sizeof text));
        return 0;
}

/* Allocates as many missing chunks as possible. Negative: the error that stopped it. */
static int make_all(struct store *store) {
        struct device_pool *pool = pool_of(store);
        cu_memory reserve;
        int r = take_reserve(store, &reserve);

        for (uint32_t i = 0; i < pool->n && r == 0; i++)
                if (pool->chunks[i].state == MISSING)
                        r = make(store, &pool->chunks[i]);
        if (reserve)
                pool->cuda->cuMemRelease(reserve);
        return r;
}

uint32_t store_make_missing(struct store *store) {
        struct device_pool *pool = pool_of(store);

        if (!pool)
                return 0;
        pool->clear_failed = false;
        if (pool->count[MISSING])
                make_all(store);
        if (pool->count[DIRTY])
                jobs_want_worker(store);
        return pool->count[MISSING];
}

int store_make_memory(struct store *store) {
        struct device_pool *pool = pool_of(store);
        int r = pool && pool->count[MISSING] ? make_all(store) : 0;

        return r == -ENOMEM || !pool || pool->count[MISSING] < pool->n ? 0 : r;
}

#define LEGACY_GRANULARITY (UINT64_C(2) << 20)
#define LEGACY_SEGMENTS 8u /* spaces that there can be: each has one segment */
#define FILES_LEFT 64u     /* least number of descriptors for indexes and pin pages */

static int granularity_of(struct store *store, const struct cu_allocation *what, size_t *ret) {
        const struct kvd_cuda *cuda = store->config.cuda;
        cu_result error;
        char text[128];

        *ret = LEGACY_GRANULARITY;
        if (store->config.backend == KVD_BACKEND_LEGACY)
                return 0;
        error = cuda->cuMemGetAllocationGranularity(ret, what, CU_GRANULARITY_RECOMMENDED);
        if (error == CU_OK && *ret)
                return 0;
        return store_refuse(store, error ? kvd_cuda_errno(error) : -EIO,
                            "the GPU does not report its allocation granularity: %s",
                            kvd_cuda_why(cuda, error, text, sizeof text));
}

static int size_pool(struct store *store, const struct cu_allocation *what) {
        struct store_config *config = &store->config;
        size_t granularity;
        int r = granularity_of(store, what, &granularity);

        if (r < 0)
                return r;
        if (config->backend == KVD_BACKEND_LEGACY)
                config->segment_bytes = MAX(config->segment_bytes,
                                            config->pool_bytes / LEGACY_SEGMENTS);
        else
                config->segment_bytes = MIN(config->segment_bytes, config->pool_bytes / 16);
        config->segment_bytes = ALIGN_UP(config->segment_bytes, granularity);
        config->pool_bytes -= config->pool_bytes % config->segment_bytes;
        store->pages.bytes = granularity;
        if (config->pool_bytes == 0)
                return store_refuse(
                        store, -EINVAL,
                        "pool is smaller than one segment of GPU memory, %llu MiB; raise it",
                        (unsigned long long)(config->segment_bytes >> 20));
        return 0;
}

/* Sets aside a descriptor for each chunk, which stays open once the chunk is cleared. */
static int take_files(struct store *store, uint32_t n) {
        uint64_t *files = &store->config.max_files;

        if (!*files || store->config.backend == KVD_BACKEND_LEGACY)
                return 0;
        if (n + FILES_LEFT > *files)
                return store_refuse(
                        store, -EMFILE,
                        "a pool of %u segments needs as many descriptors, and only %llu "
                        "are left after those for connections: raise the limit of open "
                        "files (LimitNOFILE), or segment",
                        n, (unsigned long long)*files);
        *files -= n;
        return 0;
}

/*
 * Allocates as many chunks as possible. Clients of a previous daemon may still hold some memory. If
 * there is a keeper, kept chunks are taken over first, and store_make_memory allocates the rest.
 */
int device_open(struct store *store) {
        struct cu_allocation what = {.type = CU_ALLOCATION_PINNED,
                                     .handle_types = CU_HANDLE_POSIX_FD,
                                     .location = {CU_LOCATION_DEVICE, store->config.device}};
        struct device_pool *pool;
        int r = size_pool(store, &what);
        uint32_t n;

        if (r < 0)
                return r;
        n = (uint32_t)(store->config.pool_bytes / store->config.segment_bytes);
        r = take_files(store, n);
        if (r < 0)
                return r;
        pool = store->device_pool = sys->calloc(1, sizeof *pool + n * sizeof *pool->chunks);
        if (!pool)
                return store_refuse(store, -ENOMEM, "out of memory for a pool of %u segments", n);
        pool->cuda = store->config.backend == KVD_BACKEND_VMM ? store->config.cuda : NULL;
        pool->what = what;
        pool->bytes = store->config.segment_bytes;
        pool->n = pool->count[MISSING] = n;
        for (uint32_t i = 0; i < n; i++)
                pool->chunks[i].fd = -1;
        return store->config.keep ? 0 : store_make_memory(store);
}

/* ---- chunks of the previous daemon ----------------------------------------------------------- */

/* Maps the chunk, without access: that succeeds only with its exact size, and needs no context. */
static cu_result check_size(const struct device_pool *pool, cu_memory memory) {
        const struct kvd_cuda *cuda = pool->cuda;
        cu_address at;
        cu_result error = cuda->cuMemAddressReserve(&at, pool->bytes, 0, 0, 0);

        if (error)
                return error;
        error = cuda->cuMemMap(at, pool->bytes, 0, memory, 0);
        if (error == CU_OK)
                cuda->cuMemUnmap(at, pool->bytes);
        cuda->cuMemAddressFree(at, pool->bytes);
        return error;
}

static cu_result check_chunk(const struct device_pool *pool, cu_memory memory) {
        struct cu_allocation is;
        cu_result error = pool->cuda->cuMemGetAllocationPropertiesFromHandle(&is, memory);

        if (error)
                return error;
        return is.location.type == pool->what.location.type &&
                               is.location.id == pool->what.location.id ?
                       check_size(pool, memory) :
                       CU_INVALID_DEVICE;
}

int chunk_import(struct store *store, struct chunk *chunk, int *fd) {
        struct device_pool *pool = pool_of(store);
        cu_memory memory;
        char text[128];
        cu_result error = pool->cuda->cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)*fd,
                                                                     CU_HANDLE_POSIX_FD);

        if (error == CU_OK) {
                error = check_chunk(pool, memory);
                if (error)
                        pool->cuda->cuMemRelease(memory);
        }
        if (error)
                return store_refuse(store, kvd_cuda_errno(error),
                                    "a segment of the previous daemon cannot be used: %s",
                                    kvd_cuda_why(pool->cuda, error, text, sizeof text));
        chunk->memory = memory;
        chunk->fd = *fd;
        *fd = -1;
        return 0;
}

/* ---- clearing -------------------------------------------------------------------------------- */

int chunk_export(struct store *store, struct chunk *chunk) {
        const struct kvd_cuda *cuda = pool_of(store)->cuda;
        cu_result error;
        char text[128];

        if (chunk->fd >= 0)
                return chunk->fd;
        error = cuda->cuMemExportToShareableHandle(&chunk->fd, chunk->memory, CU_HANDLE_POSIX_FD,
                                                   0);
        if (error == CU_OK)
                return chunk->fd;
        chunk->fd = -1;
        return store_refuse(store, kvd_cuda_errno(error),
                            "the GPU gives no descriptor for a segment: %s",
                            kvd_cuda_why(cuda, error, text, sizeof text));
}

void store_clears(const struct store *store, struct store_clears *ret) {
        const struct device_pool *pool = pool_of(store);

        *ret = (struct store_clears){0};
        if (pool)
                *ret = (struct store_clears){.dirty = pool->count[DIRTY] + pool->count[CLEARING],
                                             .clean = pool->count[CLEAN],
                                             .missing = pool->count[MISSING]};
}

bool store_has_device(const struct store *store) {
        return store->config.backend != KVD_BACKEND_HOST;
}

const uint8_t *store_device(const struct store *store) {
        return store->config.uuid;
}

bool store_wants_clearing(const struct store *store) {
        const struct device_pool *pool = pool_of(store);

        return pool && pool->cuda && pool->count[DIRTY] && !pool->clear_failed;
}

uint32_t store_next_clear(struct store *store, int fds[STORE_CLEARS], uint64_t *bytes) {
        struct device_pool *pool = pool_of(store);
        uint32_t n = 0;

        if (!store_wants_clearing(store))
                return 0;
        *bytes = pool->bytes;
        for (uint32_t i = 0; i < pool->n && n < STORE_CLEARS; i++) {
                struct chunk *chunk = &pool->chunks[i];

                if (chunk->state != DIRTY || chunk_export(store, chunk) < 0)
                        continue;
                chunk_set_state(pool, chunk, CLEARING);
                fds[n++] = chunk->fd;
        }
        pool->clear_failed = n == 0;
        return n;
}

void store_clear_done(struct store *store, bool cleared) {
        struct device_pool *pool = pool_of(store);

        for (uint32_t i = 0; i < pool->n; i++)
                if (pool->chunks[i].state == CLEARING)
                        chunk_set_state(pool, &pool->chunks[i], cleared ? CLEAN : DIRTY);
}

void store_clear_failed(struct store *store) {
        store_clear_done(store, false);
        pool_of(store)->clear_failed = true;
}

/* ---- legacy handles: an exporter allocates, clears and keeps the memory ---------------------- */

bool store_has_exporter(const struct store *store) {
        return store->config.backend == KVD_BACKEND_LEGACY;
}

bool store_next_export(struct store *store, uint32_t *number, uint64_t *bytes) {
        struct device_pool *pool = pool_of(store);

        if (!pool || pool->cuda || pool->clear_failed)
                return false;
        for (uint32_t i = 0; i < pool->n; i++)
                if (pool->chunks[i].state == DIRTY) {
                        chunk_set_state(pool, &pool->chunks[i], CLEARING);
                        *number = i;
                        *bytes = pool->bytes;
                        return true;
                }
        return false;
}

void store_export_done(struct store *store, uint32_t number,
                       const uint8_t handle[CU_IPC_HANDLE_BYTES]) {
        struct chunk *chunk = &pool_of(store)->chunks[number];

        memcpy(chunk->handle.bytes, handle, sizeof chunk->handle.bytes);
        chunk_set_state(pool_of(store), chunk, CLEAN);
}

/* The exporter is gone, and so is its memory. */
void chunks_lost(struct store *store) {
        struct device_pool *pool = pool_of(store);

        for (uint32_t i = 0; i < pool->n; i++)
                if (pool->chunks[i].state == CLEARING || pool->chunks[i].state == CLEAN)
                        chunk_set_state(pool, &pool->chunks[i], DIRTY);
}
