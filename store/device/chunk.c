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

static struct cu_allocation allocation_on(const struct store_gpu *gpu) {
        return (struct cu_allocation){.type = CU_ALLOCATION_PINNED,
                                      .handle_types = CU_HANDLE_POSIX_FD,
                                      .location = {CU_LOCATION_DEVICE, gpu->ordinal}};
}

static int make_shard(struct store *store, struct shard *shard, const struct store_gpu *gpu) {
        struct device_pool *pool = pool_of(store);
        struct cu_allocation what = allocation_on(gpu);
        cu_result error = CU_OK;
        char text[128];

        if (pool->cuda)
                error = pool->cuda->cuMemCreate(&shard->memory, pool->bytes, &what, 0);
        if (!error)
                return 0;
        shard->memory = 0;
        return store_refuse(store, kvd_cuda_errno(error),
                            "a segment of %llu MiB cannot be allocated on GPU %d: %s",
                            (unsigned long long)(pool->bytes >> 20), gpu->ordinal,
                            kvd_cuda_why(pool->cuda, error, text, sizeof text));
}

static void unmake_shard(struct device_pool *pool, struct shard *shard) {
        if (shard->memory)
                pool->cuda->cuMemRelease(shard->memory);
        shard->memory = 0;
        closep(&shard->fd);
        shard->fd = -1;
}

/* On all GPUs or on none. */
static int make(struct store *store, struct chunk *chunk) {
        struct device_pool *pool = pool_of(store);
        uint32_t n = 0;
        int r = 0;

        for (; r == 0 && n < pool->n_gpus; n++)
                r = make_shard(store, &chunk->shards[n], &pool->gpus[n]);
        if (r < 0) {
                while (n--)
                        unmake_shard(pool, &chunk->shards[n]);
                return r;
        }
        chunk->n_cleared = 0;
        chunk_set_state(pool, chunk, DIRTY);
        return 0;
}

void chunk_unmake(struct device_pool *pool, struct chunk *chunk) {
        for (uint32_t i = 0; i < pool->n_gpus; i++)
                unmake_shard(pool, &chunk->shards[i]);
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
static int take_reserve(struct store *store, const struct store_gpu *gpu, cu_memory *ret) {
        struct device_pool *pool = pool_of(store);
        uint64_t bytes = ALIGN_UP(store->config.reserve_bytes, store->pages.bytes);
        struct cu_allocation what = allocation_on(gpu);
        cu_result error;
        char text[128];

        if (!pool->cuda || !bytes)
                return 0;
        error = pool->cuda->cuMemCreate(ret, bytes, &what, 0);
        if (!error)
                return 0;
        *ret = 0;
        return store_refuse(store, kvd_cuda_errno(error),
                            "GPU %d has no %llu MiB left to keep free (reserve): %s", gpu->ordinal,
                            (unsigned long long)(bytes >> 20),
                            kvd_cuda_why(pool->cuda, error, text, sizeof text));
}

/* Allocates as many missing chunks as possible. Negative: the error that stopped it. */
static int make_all(struct store *store) {
        struct device_pool *pool = pool_of(store);
        cu_memory reserve[KVD_SHARDS] = {0};
        int r = 0;

        for (uint32_t i = 0; i < pool->n_gpus && r == 0; i++)
                r = take_reserve(store, &pool->gpus[i], &reserve[i]);
        for (uint32_t i = 0; i < pool->n && r == 0; i++)
                if (pool->chunks[i].state == MISSING)
                        r = make(store, &pool->chunks[i]);
        for (uint32_t i = 0; i < pool->n_gpus; i++)
                if (reserve[i])
                        pool->cuda->cuMemRelease(reserve[i]);
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

static int granularity_on(struct store *store, const struct store_gpu *gpu, size_t *ret) {
        const struct kvd_cuda *cuda = store->config.cuda;
        struct cu_allocation what = allocation_on(gpu);
        cu_result error = cuda->cuMemGetAllocationGranularity(ret, &what,
                                                              CU_GRANULARITY_RECOMMENDED);
        char text[128];

        if (error == CU_OK && *ret)
                return 0;
        return store_refuse(store, error ? kvd_cuda_errno(error) : -EIO,
                            "the GPU does not report its allocation granularity: %s",
                            kvd_cuda_why(cuda, error, text, sizeof text));
}

/* The largest of all GPUs; each is a power of two. */
static int granularity_of(struct store *store, size_t *ret) {
        const struct store_config *config = &store->config;
        int r = 0;

        *ret = LEGACY_GRANULARITY;
        if (config->backend == KVD_BACKEND_LEGACY)
                return 0;
        for (uint32_t i = 0; r == 0 && i < config->n_gpus; i++) {
                size_t one;

                r = granularity_on(store, &config->gpus[i], &one);
                if (r == 0)
                        *ret = i ? MAX(*ret, one) : one;
        }
        return r;
}

static int size_pool(struct store *store) {
        struct store_config *config = &store->config;
        size_t granularity;
        int r = granularity_of(store, &granularity);

        if (r < 0)
                return r;
        if (config->backend == KVD_BACKEND_LEGACY)
                config->segment_bytes = MAX(config->segment_bytes,
                                            config->pool_bytes / LEGACY_SEGMENTS);
        else
                config->segment_bytes = MIN(config->segment_bytes, config->pool_bytes / 16);
        config->segment_bytes = ALIGN_UP(DIV_UP(config->segment_bytes, config->n_gpus),
                                         granularity) *
                                config->n_gpus;
        config->pool_bytes -= config->pool_bytes % config->segment_bytes;
        store->pages.bytes = granularity;
        if (config->pool_bytes == 0)
                return store_refuse(
                        store, -EINVAL,
                        "pool is smaller than one segment of GPU memory, %llu MiB; raise it",
                        (unsigned long long)(config->segment_bytes >> 20));
        return 0;
}

/* Sets aside a descriptor for each shard, which stays open once it is cleared. */
static int take_files(struct store *store, uint32_t n_segments) {
        uint64_t *files = &store->config.max_files, n = (uint64_t)n_segments * store->config.n_gpus;

        if (!*files || store->config.backend == KVD_BACKEND_LEGACY)
                return 0;
        if (n + FILES_LEFT > *files)
                return store_refuse(
                        store, -EMFILE,
                        "a pool of %u segments needs %llu descriptors, and only %llu are left "
                        "after those for connections: raise the limit of open files "
                        "(LimitNOFILE), or segment",
                        n_segments, (unsigned long long)n, (unsigned long long)*files);
        *files -= n;
        return 0;
}

static int new_pool(struct store *store, uint32_t n) {
        struct store_config *config = &store->config;
        uint32_t n_shards = n * config->n_gpus;
        struct device_pool *pool = sys->calloc(1, sizeof *pool + n * sizeof *pool->chunks);

        store->device_pool = pool;
        if (pool)
                pool->shards = sys->calloc(n_shards, sizeof *pool->shards);
        if (!pool || !pool->shards)
                return store_refuse(store, -ENOMEM, "out of memory for a pool of %u segments", n);
        pool->cuda = config->backend == KVD_BACKEND_VMM ? config->cuda : NULL;
        pool->gpus = config->gpus;
        pool->n_gpus = config->n_gpus;
        pool->bytes = config->segment_bytes / config->n_gpus;
        pool->n = pool->count[MISSING] = n;
        for (uint32_t i = 0; i < n_shards; i++)
                pool->shards[i].fd = -1;
        for (uint32_t i = 0; i < n; i++)
                pool->chunks[i].shards = pool->shards + i * config->n_gpus;
        return 0;
}

/*
 * Allocates as many chunks as possible. Clients of a previous daemon may still hold some memory. If
 * there is a keeper, kept chunks are taken over first, and store_make_memory allocates the rest.
 */
int device_open(struct store *store) {
        int r = size_pool(store);
        uint32_t n;

        if (r < 0)
                return r;
        n = (uint32_t)(store->config.pool_bytes / store->config.segment_bytes);
        r = take_files(store, n);
        if (r == 0)
                r = new_pool(store, n);
        if (r < 0)
                return r;
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

static cu_result check_shard(const struct device_pool *pool, cu_memory memory,
                             const struct store_gpu *gpu) {
        struct cu_allocation is, what = allocation_on(gpu);
        cu_result error = pool->cuda->cuMemGetAllocationPropertiesFromHandle(&is, memory);

        if (error)
                return error;
        return is.location.type == what.location.type && is.location.id == what.location.id ?
                       check_size(pool, memory) :
                       CU_INVALID_DEVICE;
}

static int import_shard(struct store *store, struct shard *shard, const struct store_gpu *gpu,
                        int fd) {
        struct device_pool *pool = pool_of(store);
        cu_memory memory;
        char text[128];
        cu_result error = pool->cuda->cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)fd,
                                                                     CU_HANDLE_POSIX_FD);

        if (error == CU_OK) {
                error = check_shard(pool, memory, gpu);
                if (error)
                        pool->cuda->cuMemRelease(memory);
        }
        if (error)
                return store_refuse(store, kvd_cuda_errno(error),
                                    "a segment of the previous daemon cannot be used: %s",
                                    kvd_cuda_why(pool->cuda, error, text, sizeof text));
        shard->memory = memory;
        return 0;
}

int chunk_import(struct store *store, struct chunk *chunk, int *fds) {
        struct device_pool *pool = pool_of(store);
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < pool->n_gpus; i++)
                r = import_shard(store, &chunk->shards[i], &pool->gpus[i], fds[i]);
        for (uint32_t i = 0; i < pool->n_gpus; i++)
                if (r < 0)
                        unmake_shard(pool, &chunk->shards[i]);
                else
                        chunk->shards[i].fd = fds[i];
        return r;
}

/* ---- clearing -------------------------------------------------------------------------------- */

int chunk_export(struct store *store, struct chunk *chunk, uint32_t which) {
        const struct kvd_cuda *cuda = pool_of(store)->cuda;
        struct shard *shard = &chunk->shards[which];
        cu_result error;
        char text[128];

        if (shard->fd >= 0)
                return shard->fd;
        error = cuda->cuMemExportToShareableHandle(&shard->fd, shard->memory, CU_HANDLE_POSIX_FD,
                                                   0);
        if (error == CU_OK)
                return shard->fd;
        shard->fd = -1;
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

bool store_wants_clearing(const struct store *store) {
        const struct device_pool *pool = pool_of(store);

        return pool && pool->cuda && pool->count[DIRTY] && !pool->clear_failed;
}

/* Adds the next shard of a chunk, if it is on the same GPU as the others. */
static void add_clear(struct store *store, struct chunk *chunk, struct store_clear *clear) {
        struct device_pool *pool = pool_of(store);
        const uint8_t *device = pool->gpus[chunk->n_cleared].uuid;

        if ((clear->n && clear->device != device) ||
            chunk_export(store, chunk, chunk->n_cleared) < 0)
                return;
        chunk_set_state(pool, chunk, CLEARING);
        clear->device = device;
        clear->fds[clear->n++] = chunk->shards[chunk->n_cleared].fd;
}

bool store_next_clear(struct store *store, struct store_clear *ret) {
        struct device_pool *pool = pool_of(store);

        ret->n = 0;
        if (!store_wants_clearing(store))
                return false;
        ret->bytes = pool->bytes;
        for (uint32_t i = 0; i < pool->n && ret->n < STORE_CLEARS; i++)
                if (pool->chunks[i].state == DIRTY)
                        add_clear(store, &pool->chunks[i], ret);
        pool->clear_failed = ret->n == 0;
        return ret->n;
}

/* A chunk can be used once it is clear on all GPUs. */
static void shard_cleared(struct device_pool *pool, struct chunk *chunk) {
        chunk->n_cleared++;
        chunk_set_state(pool, chunk, chunk->n_cleared == pool->n_gpus ? CLEAN : DIRTY);
}

void store_clear_done(struct store *store, bool cleared) {
        struct device_pool *pool = pool_of(store);

        for (uint32_t i = 0; i < pool->n; i++)
                if (pool->chunks[i].state == CLEARING && cleared)
                        shard_cleared(pool, &pool->chunks[i]);
                else if (pool->chunks[i].state == CLEARING)
                        chunk_set_state(pool, &pool->chunks[i], DIRTY);
}

void store_clear_failed(struct store *store) {
        store_clear_done(store, false);
        pool_of(store)->clear_failed = true;
}

/* ---- legacy handles: an exporter allocates, clears and keeps the memory ---------------------- */

bool store_has_exporter(const struct store *store) {
        return store->config.backend == KVD_BACKEND_LEGACY;
}

bool store_next_export(struct store *store, struct store_export *ret) {
        struct device_pool *pool = pool_of(store);

        if (!pool || pool->cuda || pool->clear_failed)
                return false;
        for (uint32_t i = 0; i < pool->n; i++)
                if (pool->chunks[i].state == DIRTY) {
                        uint32_t which = pool->chunks[i].n_cleared;

                        chunk_set_state(pool, &pool->chunks[i], CLEARING);
                        *ret = (struct store_export){i * pool->n_gpus + which, pool->bytes,
                                                     pool->gpus[which].uuid};
                        return true;
                }
        return false;
}

void store_export_done(struct store *store, uint32_t number,
                       const uint8_t handle[CU_IPC_HANDLE_BYTES]) {
        struct device_pool *pool = pool_of(store);

        memcpy(pool->shards[number].handle.bytes, handle, CU_IPC_HANDLE_BYTES);
        shard_cleared(pool, &pool->chunks[number / pool->n_gpus]);
}

/* The exporter is gone, and so is its memory. */
void chunks_lost(struct store *store) {
        struct device_pool *pool = pool_of(store);

        for (uint32_t i = 0; i < pool->n; i++) {
                pool->chunks[i].n_cleared = 0;
                if (pool->chunks[i].state == CLEARING || pool->chunks[i].state == CLEAN)
                        chunk_set_state(pool, &pool->chunks[i], DIRTY);
        }
}
