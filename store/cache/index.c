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

#include <string.h>

#include "ipc/base/pack.h"
#include "store/cache/inside.h"

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
