/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This file is the only writer of a space's shared index. Clients read the index at any time, so
 * every change leaves it readable at each step:
 *
 *  - A descriptor is written while its slot word says FILLING, and believed only while it says
 *    SEALED.
 *  - A run is written while its leaf word is 0.
 *  - A table entry is entered after what it names, and taken out before that changes. Entries stay
 *    where they are (layout.h): to a reader one appears or disappears.
 */

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/device.h"
#include "ipc/base/pack.h"
#include "ipc/base/sys.h"
#include "store/cache/inside.h"
#include "store/hooks.h"

/* ---- changes, for followers ------------------------------------------------------------------ */

/* Followers poll. The daemon neither notifies them nor waits for them. */
static void tell_change(struct space *space, uint32_t id) {
        struct kvd_index *ix = space->ix;
        uint64_t n = atomic_load_explicit(&ix->changes, memory_order_relaxed);

        shm_write_begin(&ix->changes_begun, n + 1);
        atomic_store_explicit(&kvd_index_changes(ix)[n & (ix->change_slots - 1)], id,
                              memory_order_relaxed);
        shm_write_end(&ix->changes, n + 1);
}

void space_follow(struct space *space, bool begins) {
        shm_u32 *n = &space->ix->n_followers;

        atomic_store_explicit(n, atomic_load_explicit(n, memory_order_relaxed) + (begins ? 1 : -1u),
                              memory_order_relaxed);
}

/* ---- buckets --------------------------------------------------------------------------------- */

/* The two tables differ only in where they lie. */
struct table {
        shm_u64 *slots;
        uint32_t n_slots;
};

static struct kvd_key block_key(const struct kvd_index *ix, uint32_t id) {
        return kvd_index_desc(ix, id)->key;
}

static struct kvd_key run_key(const struct kvd_index *ix, uint32_t id) {
        return kvd_index_run(ix, id)->key;
}

static struct table block_table(const struct kvd_index *ix) {
        return (struct table){kvd_index_table(ix), ix->table_slots};
}

static struct table run_table(const struct kvd_index *ix) {
        return (struct table){kvd_index_run_table(ix), ix->run_table_slots};
}

/* One of the KVD_BUCKETS buckets in which a key may be. */
static shm_u64 *bucket_of(const struct table *t, struct kvd_key key, uint32_t which) {
        return t->slots + kvd_bucket(t->n_slots, key, which);
}

/* The first of a key's slots that has this value, or NULL. */
static shm_u64 *table_find(const struct table *t, struct kvd_key key, uint64_t value) {
        for (uint32_t which = 0; which < KVD_BUCKETS; which++) {
                shm_u64 *bucket = bucket_of(t, key, which);

                for (uint32_t i = 0; i < KVD_BUCKET_SLOTS; i++) {
                        shm_u64 *slot = bucket + kvd_bucket_slot(key, i);

                        if (atomic_load_explicit(slot, memory_order_relaxed) == value)
                                return slot;
                }
        }
        return NULL;
}

static bool table_insert(const struct table *t, struct kvd_key key, uint32_t id) {
        shm_u64 *slot = table_find(t, key, 0);

        if (slot)
                atomic_store_explicit(slot, kvd_table_slot(key, id), memory_order_release);
        return slot;
}

static bool table_holds(const struct table *t, struct kvd_key key, uint32_t id) {
        return table_find(t, key, kvd_table_slot(key, id));
}

static void table_remove(const struct table *t, struct kvd_key key, uint32_t id) {
        atomic_store_explicit(table_find(t, key, kvd_table_slot(key, id)), 0, memory_order_release);
}

/* ---- making an index ------------------------------------------------------------------------- */

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

/* ---- blocks ---------------------------------------------------------------------------------- */

void index_set_state(struct space *space, uint32_t id, enum kvd_state state, uint32_t generation) {
        struct kvd_desc *desc = kvd_index_desc(space->ix, id);
        uint64_t word = kvd_slot_make(state, generation);

        if (unlikely(space->memory.left))
                return; /* left to the next daemon: must not change while this one cleans up */
        /*
         * D2 and D3 (evict.c): a full fence between this store and the scan of the pins. Partner:
         * C3, C4.
         */
        if (state == KVD_RETIRING)
                atomic_exchange_explicit(&desc->slot, word, memory_order_seq_cst);
        else
                shm_write_end(&desc->slot, word);
}

static void write_desc(struct kvd_desc *desc, const struct kvd_desc *fields, const uint32_t *tokens,
                       uint32_t room) {
        shm_set64(&desc->key.lo, fields->key.lo);
        shm_set64(&desc->key.hi, fields->key.hi);
        shm_set64(&desc->parent, fields->parent);
        shm_set32(&desc->depth, fields->depth);
        __atomic_store_n(&desc->n_tokens, fields->n_tokens, __ATOMIC_RELAXED);
        __atomic_store_n(&desc->group, fields->group, __ATOMIC_RELAXED);
        shm_set64(&desc->root, fields->root);
        shm_set32(&desc->flags, fields->flags);
        shm_set64(&desc->semaphore_value, fields->semaphore_value);
        shm_set32(&desc->semaphore, fields->semaphore);
        shm_write_words(desc->tokens, tokens, fields->n_tokens);
        for (uint32_t i = fields->n_tokens; i < room; i++)
                shm_set32(desc->tokens + i, 0);
}

static uint32_t chain_tokens(const struct kvd_index *ix, uint32_t id, const struct block *blocks,
                             uint32_t *ids, uint32_t *tokens) {
        uint32_t bt = ix->geometry.block_tokens;

        for (uint32_t i = KVD_RUN_BLOCKS; i-- > 0; id = blocks[id].parent) {
                ids[i] = id;
                memcpy(tokens + i * bt, kvd_index_desc(ix, id)->tokens, bt * sizeof *tokens);
        }
        return id; /* the block before the run, or NONE */
}

/* The key of the run before the one that ends with leaf, or of the root. False: no such run. */
static bool run_key_before(struct space *space, const struct kvd_desc *leaf, uint32_t before,
                           struct kvd_key root, struct kvd_key *ret) {
        if (leaf->depth < KVD_RUN_BLOCKS) {
                *ret = root;
                return true;
        }
        if (!space->blocks[before].run)
                return false;
        *ret = kvd_index_run(space->ix, space->blocks[before].run - 1)->key;
        return true;
}

static void write_run(struct kvd_run *run, const struct kvd_run *fields, const uint32_t *packed,
                      uint32_t words, kvd_ref leaf) {
        shm_write_begin(&run->leaf, 0);
        shm_set64(&run->key.lo, fields->key.lo);
        shm_set64(&run->key.hi, fields->key.hi);
        shm_set64(&run->parent, fields->parent);
        shm_set32(&run->group, fields->group);
        shm_set64(&run->root, fields->root);
        shm_write_words(run->ids, fields->ids, KVD_RUN_BLOCKS);
        shm_write_words(run->tokens, packed, words);
        shm_write_end(&run->leaf, leaf);
}

/* Entry i is the difference from the initial order, so that calloc's zeros are a valid stack. */
static uint32_t free_run(const struct space *space) {
        uint32_t i = space->runs.n_free - 1;

        return space->runs.free[i] + (space->ix->run_capacity - 1 - i);
}

static void put_free_run(struct space *space, uint32_t run) {
        uint32_t i = space->runs.n_free++;

        space->runs.free[i] = run - (space->ix->run_capacity - 1 - i);
}

/* Enters the run that ends with a block just sealed, if there is room and a run to continue. */
static void publish_run(struct space *space, uint32_t id, struct kvd_key root) {
        struct kvd_index *ix = space->ix;
        const struct kvd_desc *leaf = kvd_index_desc(ix, id);
        uint32_t n_tokens = KVD_RUN_BLOCKS * ix->geometry.block_tokens;
        uint32_t tokens[KVD_RUN_TOKENS_MOST], room[KVD_PACKED_MOST];
        const uint32_t *packed;
        struct kvd_run fields = {.group = leaf->group, .root = leaf->root};
        struct table table = run_table(ix);
        struct kvd_key key;
        uint32_t before, run;

        before = chain_tokens(ix, id, space->blocks, fields.ids, tokens);
        if (!space->runs.n_free || !run_key_before(space, leaf, before, root, &key)) {
                space_count(space, KVD_SPACE_RUNS_REFUSED, 1);
                return;
        }
        packed = kvd_pack(&ix->geometry, tokens, n_tokens, room);
        fields.key = kvd_key_run(ix, key, tokens, n_tokens, packed);
        fields.parent = before == NONE ? KVD_ROOT : block_ref(space, before);
        run = free_run(space);
        write_run(kvd_index_run(ix, run), &fields, packed, ix->run_words, block_ref(space, id));
        if (!table_insert(&table, fields.key, run)) {
                shm_write_end(&kvd_index_run(ix, run)->leaf, 0);
                space_count(space, KVD_SPACE_RUNS_REFUSED, 1);
                return;
        }
        space->runs.n_free--;
        space->blocks[id].run = run + 1;
        space_count(space, KVD_SPACE_RUNS_MADE, 1);
}

/*
 * Ties a descriptor to its block's generation: the descriptor of an older generation does not pass
 * for a sealed block's, whatever the slot word says. Tokens are covered by the key.
 */
uint64_t block_proof(const struct kvd_index *ix, kvd_ref block, const struct kvd_desc *desc) {
        const uint64_t words[] = {block,
                                  ix->proof_off ? desc->semaphore : 0,
                                  ix->proof_off ? desc->semaphore_value : 0,
                                  desc->key.lo,
                                  desc->key.hi,
                                  desc->parent,
                                  (uint64_t)desc->depth << 32 | desc->flags,
                                  (uint64_t)desc->n_tokens << 32 | desc->group,
                                  desc->root};

        return kvd_key_proof(ix, words, sizeof words);
}

/* NULL: this index has no proofs. */
static uint64_t *proof_of(const struct kvd_index *ix, uint32_t id) {
        if (ix->proof_off)
                return (uint64_t *)((uint8_t *)ix + ix->proof_off) + id;
        return ix->semaphore_rows ? NULL : &kvd_index_desc(ix, id)->semaphore_value;
}

static void prove(struct space *space, uint32_t id, const struct kvd_desc *fields) {
        uint64_t *proof = proof_of(space->ix, id);

        if (proof)
                shm_set64(proof, block_proof(space->ix, block_ref(space, id), fields));
}

/*
 * The proof is written first: from then on it says that the data is there, whether or not the next
 * daemon finds the semaphore cleared.
 */
void index_arrived(struct space *space, uint32_t id) {
        struct kvd_desc *desc = kvd_index_desc(space->ix, id), fields;

        memcpy(&fields, desc, sizeof fields);
        fields.semaphore = 0;
        prove(space, id, &fields);
        __atomic_store_n(&desc->semaphore, 0, __ATOMIC_RELEASE);
}

/* Writes the descriptor of a block that is being filled. Readers ignore it until it is SEALED. */
void index_write(struct space *space, uint32_t id, const struct kvd_desc *fields,
                 const uint32_t *tokens) {
        struct kvd_desc *desc = kvd_index_desc(space->ix, id);

        shm_write_begin(&desc->slot, kvd_slot_make(KVD_FILLING, block_generation(space, id)));
        write_desc(desc, fields, tokens, space->ix->geometry.block_tokens);
        prove(space, id, fields);
}

void index_promise(struct space *space, uint32_t id, const struct kvd_promise *promises) {
        struct kvd_promise *at = kvd_index_promises(space->ix, id);

        for (uint32_t i = 0; i + 1 < space->ix->n_shards; i++) {
                shm_set64(&at[i].value, promises[i].value);
                shm_set32(&at[i].semaphore, promises[i].semaphore);
        }
}

/*
 * Makes a sealed block findable, and the run that it completes, if any. root is the key of its
 * chain's root.
 */
void index_enter(struct space *space, uint32_t id, struct kvd_key root) {
        const struct kvd_desc *desc = kvd_index_desc(space->ix, id);
        struct table table = block_table(space->ix);

        space->blocks[id].indexed = table_insert(&table, desc->key, id);
        if (!space->blocks[id].indexed)
                space_count(space, KVD_SPACE_UNINDEXED, 1);
        tell_change(space, id);
        if (desc->depth % KVD_RUN_BLOCKS == KVD_RUN_BLOCKS - 1 &&
            desc->n_tokens == space->ix->geometry.block_tokens &&
            kvd_has_runs(&space->ix->geometry, desc->group))
                publish_run(space, id, root);
}

static void unpublish_run(struct space *space, uint32_t id) {
        uint32_t run = space->blocks[id].run - 1;
        struct table table = run_table(space->ix);

        table_remove(&table, run_key(space->ix, run), run);
        shm_write_end(&kvd_index_run(space->ix, run)->leaf, 0);
        put_free_run(space, run);
        space->blocks[id].run = 0;
}

void index_leave(struct space *space, uint32_t id) {
        struct table table = block_table(space->ix);

        if (space->blocks[id].run)
                unpublish_run(space, id);
        if (space->blocks[id].indexed)
                table_remove(&table, block_key(space->ix, id), id);
        space->blocks[id].indexed = false;
        tell_change(space, id);
}

/* ---- finding, for the daemon itself ---------------------------------------------------------- */

static bool same_child(const struct space *space, uint32_t id, const struct kvd_desc *want,
                       const uint32_t *tokens) {
        const struct kvd_desc *have = kvd_index_desc(space->ix, id);

        return space->blocks[id].state == KVD_SEALED && kvd_key_equal(have->key, want->key) &&
               have->parent == want->parent && have->group == want->group &&
               have->n_tokens == want->n_tokens && have->root == want->root &&
               memcmp(have->tokens, tokens, want->n_tokens * sizeof *tokens) == 0;
}

void index_prefetch(const struct space *space, struct kvd_key key, uint32_t id) {
        struct table t = block_table(space->ix);

        for (uint32_t i = 0; i < KVD_BUCKETS; i++)
                __builtin_prefetch(bucket_of(&t, key, i), 1);
        __builtin_prefetch(kvd_index_desc(space->ix, id), 1);
        __builtin_prefetch((uint8_t *)kvd_index_desc(space->ix, id) + 64, 1);
}

void index_fetch_entry(const struct space *space, uint32_t id) {
        struct table t = block_table(space->ix);

        __builtin_prefetch(bucket_of(&t, block_key(space->ix, id), 0), 1);
        if (space->blocks[id].run)
                __builtin_prefetch(kvd_index_run(space->ix, space->blocks[id].run - 1), 1);
}

void index_fetch_run(const struct space *space, uint32_t id) {
        struct table t = run_table(space->ix);

        if (space->blocks[id].run)
                __builtin_prefetch(bucket_of(&t, run_key(space->ix, space->blocks[id].run - 1), 0),
                                   1);
}

/*
 * May one of a bucket's slots be the key's? Compares all of them at once, since most sealed blocks
 * are new and match none. A free slot may match, too.
 */
static bool may_be_in(const shm_u64 *bucket, uint64_t like) {
        typedef uint32_t words __attribute__((vector_size(16), may_alias));
        const words *at = (const words *)bucket; /* written by us alone */
        uint32_t tag = (uint32_t)(like >> 32);
        words same = {0};

        for (uint32_t i = 0; i < KVD_BUCKET_SLOTS / 2; i++)
                same |= (words)(at[i] == (words){0, tag, 0, tag});
        return same[1] | same[3];
}

static uint32_t find_in(const struct space *space, const shm_u64 *bucket,
                        const struct kvd_desc *want, const uint32_t *tokens) {
        uint64_t like = kvd_table_slot(want->key, 0);

        if (likely(!may_be_in(bucket, like)))
                return NONE;
        for (uint32_t i = 0; i < KVD_BUCKET_SLOTS; i++) {
                uint64_t slot = atomic_load_explicit(bucket + i, memory_order_relaxed);

                if ((slot ^ like) >> 32 == 0 && slot &&
                    same_child(space, (uint32_t)slot - 1, want, tokens))
                        return (uint32_t)slot - 1;
        }
        return NONE;
}

uint32_t index_find(const struct space *space, const struct kvd_desc *want,
                    const uint32_t *tokens) {
        struct table t = block_table(space->ix);
        uint32_t id = NONE;

        for (uint32_t i = 0; i < KVD_BUCKETS && id == NONE; i++)
                id = find_in(space, bucket_of(&t, want->key, i), want, tokens);
        return id;
}

bool index_holds(const struct space *space, uint32_t id) {
        struct table table = block_table(space->ix);

        return table_holds(&table, block_key(space->ix, id), id);
}

bool index_holds_run(const struct space *space, uint32_t id) {
        struct table table = run_table(space->ix);
        uint32_t run = space->blocks[id].run - 1;

        return table_holds(&table, run_key(space->ix, run), run);
}

/* ---- looking at the tables, for checks ------------------------------------------------------- */

static struct table table_of(const struct kvd_index *ix, enum index_table which) {
        return which == INDEX_BLOCKS ? block_table(ix) : run_table(ix);
}

uint32_t index_slots(const struct space *space, enum index_table which) {
        return table_of(space->ix, which).n_slots;
}

/* Skips pages that were never written: reading them would allocate memory. */
uint32_t index_written(const struct space *space, enum index_table which, uint32_t from) {
        struct table t = table_of(space->ix, which);
        off_t begin = (off_t)((const uint8_t *)t.slots - (const uint8_t *)space->ix);
        off_t at = begin + (off_t)(from * sizeof *t.slots), data;

        if (from >= t.n_slots)
                return t.n_slots;
        data = lseek(space->index.fd, at, SEEK_DATA);
        if (data < 0)
                return errno == ENXIO ? t.n_slots : from;
        return (uint32_t)MIN((uint64_t)(MAX(data, at) - begin) / sizeof *t.slots, t.n_slots);
}

static bool names_indexed(const struct space *space, enum index_table which, uint32_t id) {
        uint32_t leaf = id;

        if (id >= (which == INDEX_BLOCKS ? space->ix->capacity : space->ix->run_capacity))
                return false;
        if (which == INDEX_BLOCKS)
                return space->blocks[id].indexed;
        leaf = kvd_ref_id(shm_load(&kvd_index_run(space->ix, id)->leaf));
        return leaf < space->ix->capacity && space->blocks[leaf].run == id + 1;
}

enum index_slot index_slot(const struct space *space, enum index_table which, uint32_t at) {
        struct table t = table_of(space->ix, which);
        uint64_t slot = atomic_load_explicit(&t.slots[at], memory_order_relaxed);
        uint32_t id = (uint32_t)slot - 1;
        struct kvd_key key;

        if (!slot)
                return INDEX_EMPTY;
        if (!names_indexed(space, which, id))
                return INDEX_WRONG;
        key = which == INDEX_BLOCKS ? block_key(space->ix, id) : run_key(space->ix, id);
        return table_find(&t, key, kvd_table_slot(key, id)) == &t.slots[at] ? INDEX_RIGHT :
                                                                              INDEX_WRONG;
}
