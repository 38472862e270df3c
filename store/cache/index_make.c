/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Makes a space's index: cuts its pool into segments, or takes its predecessor's, describes the
 * space and maps the index. What is in it is written by index.c.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "store/cache/inside.h"
#include "store/hooks.h"

static uint64_t gcd(uint64_t a, uint64_t b) {
        return b ? gcd(b, a % b) : a;
}

/* The least number of blocks that fill whole pages of that size. */
static uint64_t blocks_of_pages(uint64_t page_bytes, uint64_t block_bytes) {
        return page_bytes / gcd(page_bytes, block_bytes);
}

/*
 * A segment has about the configured size. But a small pool has at least 16 segments, and a segment
 * must be a whole number of pages; of 2 MiB if that does not make it much larger.
 */
static uint64_t segment_blocks(const struct space *space, uint64_t block_bytes,
                               uint64_t max_blocks) {
        const struct store *store = space_store(space);
        uint64_t granule = blocks_of_pages(store->pages.bytes, block_bytes);
        uint64_t large = blocks_of_pages(SHARED_LARGE, block_bytes);
        uint64_t want = MIN(store->config.segment_bytes, store->config.pool_bytes / 16);

        want = MIN(want, UINT64_C(4) << 30) / block_bytes;
        want = MIN(MAX(want, max_blocks / (KVD_MAX_SEGMENTS / 8)), max_blocks);
        if (store->pages.large && 2 * large <= 3 * want && large <= max_blocks)
                granule = large;
        granule = granule ?: 1; /* it never is 0, which the analyzer does not see */
        return DIV_UP(MAX(want, 1), granule) * granule;
}

/* Counts the blocks that quota and caller allow in a pool of that size; there is at least one. */
static uint64_t blocks_in(const struct space *space, uint64_t pool_bytes, uint64_t block_bytes,
                          uint64_t asked) {
        uint64_t quota = space->domain->config.quota;
        uint64_t blocks = MAX((quota ? MIN(quota, pool_bytes) : pool_bytes) / block_bytes, 1);

        return asked ? MIN(blocks, asked) : blocks;
}

bool space_fit(struct space *space) {
        uint64_t n = blocks_in(space, space_store(space)->config.pool_bytes, space->ix->block_bytes,
                               space->ix->max_blocks);

        space->memory.max_blocks = (uint32_t)MIN(n, space->ix->capacity);
        return n <= space->ix->capacity;
}

/*
 * On a GPU the segments of all spaces have one size. The rest of a segment that does not hold a
 * whole block is wasted, so there is a limit to the size of blocks. There are some more segment
 * numbers than needed, since some segments wait for clients to unmap them.
 */
static int cut_device(struct space *space, uint64_t block_bytes, uint64_t max_blocks,
                      struct kvd_index *ix) {
        uint64_t bytes = space_store(space)->config.segment_bytes, whole = bytes / block_bytes;
        uint64_t least = bytes % block_bytes ? whole - MIN(whole, 1) : whole;

        if (!least)
                return store_refuse(space_store(space), -E2BIG,
                                    "a block of space '%s' has %llu KiB and segments have "
                                    "%llu; set segment in kvd.conf to twice the block or more",
                                    space->name, (unsigned long long)(block_bytes >> 10),
                                    (unsigned long long)(bytes >> 10));
        ix->segment_bytes = bytes;
        ix->segment_blocks = (uint32_t)MIN(whole, UINT32_MAX);
        ix->max_segments = (uint32_t)MIN(DIV_UP(max_blocks, least) * 5 / 4 + 4, KVD_MAX_SEGMENTS);
        return 0;
}

static int cut_host(struct space *space, uint64_t block_bytes, uint64_t max_blocks,
                    struct kvd_index *ix) {
        uint64_t per_segment = segment_blocks(space, block_bytes, max_blocks);

        ix->segment_bytes = per_segment * block_bytes;
        ix->segment_blocks = (uint32_t)per_segment;
        ix->max_segments = (uint32_t)MIN(DIV_UP(max_blocks, per_segment), UINT32_MAX);
        return 0;
}

/* The space has one segment, which the driver maps at an address of its choice. */
static int cut_legacy(struct space *space, uint64_t block_bytes, struct kvd_index *ix) {
        ix->segment_bytes = space_store(space)->config.segment_bytes;
        ix->segment_blocks = (uint32_t)MIN(ix->segment_bytes / block_bytes, UINT32_MAX);
        ix->max_segments = 1;
        if (ix->segment_blocks)
                return 0;
        return store_refuse(
                space_store(space), -E2BIG,
                "a block of space '%s' has %llu MiB, more than a segment; set segment in kvd.conf",
                space->name, (unsigned long long)(block_bytes >> 20));
}

/*
 * Chooses the size of segments and the number of block ids. With isolation = arena there are more
 * ids, since segments without memory stay with their writer.
 */
static int cut(struct space *space, uint64_t block_bytes, uint64_t max_blocks,
               struct kvd_index *ix) {
        const struct store *store = space_store(space);
        int r = store->config.backend == KVD_BACKEND_VMM ?
                        cut_device(space, block_bytes, max_blocks, ix) :
                store->config.backend == KVD_BACKEND_LEGACY ?
                        cut_legacy(space, block_bytes, ix) :
                        cut_host(space, block_bytes, max_blocks, ix);
        uint64_t ids;

        if (r < 0)
                return r;
        if (space->domain->config.arena)
                ix->max_segments = MIN(ix->max_segments * 4, KVD_MAX_SEGMENTS);
        ids = ix->max_segments * ix->segment_bytes / block_bytes;
        if (ix->max_segments > KVD_MAX_SEGMENTS || ids > UINT32_MAX / 4)
                return store_refuse(space_store(space), -E2BIG,
                                    "space '%s' would have %llu blocks, more than an index "
                                    "holds; give it max_blocks",
                                    space->name, (unsigned long long)max_blocks);
        ix->capacity = (uint32_t)ids;
        ix->run_capacity = kvd_run_capacity(&ix->geometry, ix->capacity);
        return 0;
}

/* Clients know blocks by their ids, so a successor has the same ids in the same segments. */
static int cut_again(const struct kvd_index *before, struct kvd_index *ix) {
        ix->segment_bytes = before->segment_bytes;
        ix->segment_blocks = before->segment_blocks;
        ix->max_segments = before->max_segments;
        ix->capacity = before->capacity;
        ix->run_capacity = before->run_capacity;
        return 0;
}

/* A worker, which reads planes, uses one GPU; and shards must be equal. */
static int check_shards(struct space *space, const struct kvd_shape *geometry, uint32_t n_shards) {
        if (n_shards == 1)
                return 0;
        if (!kvd_shape_is_opaque(geometry))
                return store_refuse(space_store(space), -EOPNOTSUPP,
                                    "the pool has %u GPUs, and only opaque blocks can be divided "
                                    "among them; give space '%s' block_bytes and layout",
                                    n_shards, space->name);
        if (geometry->block_bytes % (64 * n_shards) == 0)
                return 0;
        return store_refuse(space_store(space), -EINVAL,
                            "a block of space '%s' has %llu bytes, which is not a multiple of 64 "
                            "on each of the pool's %u GPUs",
                            space->name, (unsigned long long)geometry->block_bytes, n_shards);
}

static int describe(struct space *space, const struct space_spec *spec,
                    const struct kvd_index *before, struct kvd_index *ix) {
        const struct store_config *config = &space_store(space)->config;
        uint64_t block_bytes = kvd_shape_bytes(&spec->geometry);
        uint32_t n_shards = MAX(config->n_gpus, 1);
        uint64_t max_blocks = blocks_in(space, space_store(space)->config.pool_most, block_bytes,
                                        spec->options.max_blocks);
        int r = check_shards(space, &spec->geometry, n_shards);

        if (r < 0)
                return r;
        *ix = (struct kvd_index){
                .magic = KVD_INDEX_MAGIC,
                .version = KVD_LAYOUT_VERSION,
                .geometry = spec->geometry,
                .kind = spec->options.kind,
                .keys = spec->options.keys,
                .policy = spec->options.policy,
                .arena = space->domain->config.arena,
                .block_bytes = block_bytes,
                .shard_bytes = block_bytes / n_shards,
                .n_shards = n_shards,
                .backend = config->backend,
                .semaphore_rows = config->backend ? config->max_attachments : 0,
                .label_channels = MIN(SETTING_LABEL_CHANNELS, spec->geometry.head_dim),
        };
        hooks_lay_out(space, max_blocks, ix);
        r = before ? cut_again(before, ix) : cut(space, block_bytes, max_blocks, ix);
        if (r < 0)
                return r;
        for (uint32_t i = 0; i < config->n_gpus; i++)
                memcpy(ix->devices[i], config->gpus[i].uuid, sizeof ix->devices[i]);
        memcpy(ix->name, space->name, sizeof ix->name);
        memcpy(ix->domain, space->domain->config.name, sizeof ix->domain);
        kvd_index_lay_out(ix);
        return 0;
}

/* A successor keeps the secret, since keys depend on it, and the number of the cache. */
static int draw_secrets(const struct kvd_index *before, struct kvd_index *ix) {
        if (sys->getrandom(ix->secret, sizeof ix->secret, 0) != (ssize_t)sizeof ix->secret ||
            sys->getrandom(ix->instance, sizeof ix->instance, 0) != (ssize_t)sizeof ix->instance)
                return -EIO;
        if (before) {
                memcpy(ix->secret, before->secret, sizeof ix->secret);
                ix->instance[0] = before->instance[0];
        }
        ix->life = before ? before->life + 1 : 1;
        return 0;
}

/* Covers the header without the fields that may change, of which any value is valid. */
uint64_t index_proof(const struct kvd_index *ix) {
        struct kvd_index fixed;

        memcpy(&fixed, ix, offsetof(struct kvd_index, proof));
        fixed.policy = fixed.max_blocks = 0;
        return kvd_key_proof(ix, &fixed, offsetof(struct kvd_index, proof));
}

static int map_index(struct space *space, const struct kvd_index *description) {
        int r = shared_file_new("kvd-index", description->size,
                                SHARED_MAPPED | SHARED_TWIN | SHARED_ONE_WRITER, &space->index);

        if (r < 0)
                return r;
        space->ix = space->index.at;
        pages_place(space_store(space), space->index.fd, description->size, 0);
        /* has an effect where shmem_enabled = advise */
        sys->madvise(space->ix, description->size, MADV_HUGEPAGE);
        memcpy(space->ix, description, sizeof *description);
        return 0;
}

int index_new(struct space *space, const struct space_spec *spec, const struct kvd_index *before) {
        struct kvd_index description;
        int r = describe(space, spec, before, &description);

        if (r < 0)
                return r;
        r = draw_secrets(before, &description);
        if (r < 0)
                return store_refuse(space_store(space), r,
                                    "the kernel gives no random numbers for the space's secret");
        description.proof = index_proof(&description);
        description.max_blocks = (uint32_t)MIN(spec->options.max_blocks, UINT32_MAX);
        r = map_index(space, &description);
        if (r < 0)
                return store_refuse(space_store(space), r,
                                    "no memory for the index of space '%s': %s", space->name,
                                    strerror(-r));
        atomic_store(&space->ix->alive, 1);
        atomic_store(&space->ix->clock, 1);
        space->clock = 1;
        space_fit(space);
        return 0;
}

void index_free(struct space *space) {
        store_close_file(space_store(space), &space->index);
        space->ix = NULL;
}
