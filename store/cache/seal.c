/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealing publishes filled blocks. Everything is checked before anything changes; after that
 * nothing can fail. A client sends the names of its own blocks and token ids; keys, depths and
 * links are the daemon's own.
 */

#include <errno.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "store/cache/inside.h"
#include "store/summaries.h"

/* A chain as it grows during one seal. */
struct growth {
        struct kvd_key root; /* of the chain; only set while its first run is incomplete */
        uint32_t parent;     /* block before, or NONE */
        bool joint;          /* the request has promises */
        struct kvd_promise promises[KVD_SHARDS - 1]; /* of all blocks */
        struct kvd_desc fields; /* of the next block: key is that of the block before it */
};

/* ---- checks ---------------------------------------------------------------------------------- */

static int refuse(struct attachment *a, int error, const char *what) {
        return store_refuse(space_store(a->space), error, "seal in space '%s': %s", a->space->name,
                            what);
}

/* No early exit, so that several tokens are compared at once. */
static bool tokens_are_valid(const struct kvd_shape *g, const uint32_t *tokens, uint32_t n) {
        uint32_t most = 0;

        for (uint32_t i = 0; i < n; i++)
                most = MAX(most, tokens[i]);
        return kvd_token_is_valid(g, most);
}

static int check_counts(struct attachment *a, const struct seal_request *q) {
        const struct kvd_shape *g = &a->space->ix->geometry;
        uint32_t full = kvd_full_tokens(g, q->group);
        uint64_t room = (uint64_t)q->n_blocks * full;
        bool bidirectional = a->space->ix->kind == KVD_kind_bidirectional;

        if (!q->n_blocks || q->n_tokens > room || q->n_tokens + full <= room)
                return refuse(a, -EINVAL, "the number of tokens does not fit the number of blocks");
        if (!kvd_has_group(a->space->ix, q->group))
                return refuse(a, -EINVAL, "there is no such layer group");
        if (bidirectional && (!q->root || q->root > UINT32_MAX))
                return refuse(a, -EINVAL, "root must be the number of tokens of the whole prefix");
        if (q->group != KVD_GROUP_KEYED && !tokens_are_valid(g, q->tokens, q->n_tokens))
                return refuse(a, -EINVAL, "a token id is beyond the vocabulary");
        return 0;
}

/* Refuses a block that is named twice, since it would be sealed twice. */
bool blocks_filled_by(const struct attachment *a, const kvd_ref *refs, uint32_t n_refs) {
        struct block *blocks = a->space->blocks;
        uint32_t n = 0;

        for (; n < n_refs; n++) {
                if (!block_filled_by(a, refs[n]) || blocks[kvd_ref_id(refs[n])].marked)
                        break;
                blocks[kvd_ref_id(refs[n])].marked = true;
        }
        for (uint32_t i = 0; i < n; i++)
                blocks[kvd_ref_id(refs[i])].marked = false;
        return n == n_refs;
}

static int check_blocks(struct attachment *a, const struct seal_request *q) {
        if (!blocks_filled_by(a, q->blocks, q->n_blocks))
                return refuse(a, -ESTALE,
                              "a block is not (or no longer) one that this client is filling");
        return 0;
}

static int check_parent(struct attachment *a, const struct seal_request *q,
                        const struct kvd_desc *parent) {
        struct space *space = a->space;

        if (parent->group != q->group || parent->n_tokens < space_full_tokens(space, q->group) ||
            parent->root != q->root)
                return refuse(a, -EINVAL,
                              "the chain cannot continue there: other group, salt or prefix, or "
                              "its last block is not full");
        return 0;
}

static int check_prefix_end(struct attachment *a, const struct seal_request *q, uint32_t depth) {
        const struct kvd_index *ix = a->space->ix;
        uint64_t end = (uint64_t)depth * ix->geometry.block_tokens + q->n_tokens;
        bool partial = q->n_tokens % ix->geometry.block_tokens != 0;

        if (ix->kind == KVD_kind_bidirectional && (end > q->root || (partial && end != q->root)))
                return refuse(
                        a, -EINVAL,
                        "more tokens than the prefix has, or a part-filled block before its end");
        return 0;
}

/* ---- the parent ------------------------------------------------------------------------------ */

static struct kvd_key chain_root(const struct kvd_index *ix, const struct seal_request *q) {
        return ix->kind == KVD_kind_bidirectional ?
                       kvd_key_prefix_root(ix, q->prefix_key, q->group) :
                       kvd_key_root(ix, q->group, q->root);
}

kvd_ref content_of(const struct attachment *a, kvd_ref ref) {
        return block_filled_by(a, ref) ? a->space->blocks[kvd_ref_id(ref)].twin : ref;
}

static int find_parent(struct attachment *a, const struct seal_request *q, struct growth *g) {
        struct space *space = a->space;
        kvd_ref before = content_of(a, q->parent);
        uint32_t id = kvd_ref_id(before);
        const struct kvd_desc *parent;

        *g = (struct growth){.parent = NONE};
        g->fields = (struct kvd_desc){.group = (uint16_t)q->group, .root = q->root};
        if (q->parent == KVD_ROOT) {
                g->fields.key = g->root = chain_root(space->ix, q);
                return 0;
        }
        if (!block_current(space, before) || space->blocks[id].private)
                return refuse(a, -ESTALE,
                              "the block before is not in the cache (any more); look up again");
        if (space->blocks[id].poisoned)
                return refuse(a, -ESTALE,
                              "the data of the block before was never written: its producer died");
        parent = kvd_index_desc(space->ix, id);
        g->parent = id;
        g->fields.parent = before;
        g->fields.key = parent->key;
        g->fields.depth = parent->depth + 1;
        if (g->fields.depth < KVD_RUN_BLOCKS)
                g->root = chain_root(space->ix, q);
        return check_parent(a, q, parent);
}

/* ---- growing it ------------------------------------------------------------------------------ */

static void step(struct space *space, struct growth *g, uint32_t id) {
        g->parent = id;
        g->fields.parent = block_ref(space, id);
        g->fields.depth++;
}

/*
 * A block with the same content behind the same parent. Not in bidirectional spaces: there the
 * content also depends on tokens that follow the block.
 */
static uint32_t find_duplicate(struct space *space, const struct growth *g,
                               const uint32_t *tokens) {
        return space->ix->kind == KVD_kind_causal ? index_find(space, &g->fields, tokens) : NONE;
}

#define SUPERSEDED 4096u /* maximum number of blocks to follow to the end of a chain */

/*
 * A lookup of a bidirectional prefix follows the first chain that it finds, and a chain that has
 * lost its end is useless. So a chain that is sealed again from its start replaces the old chain of that prefix in the
 * index, and the old one is evicted first.
 */
static void supersede(struct space *space, const struct kvd_desc *first, const uint32_t *tokens) {
        uint32_t id = index_find(space, first, tokens), last = id;

        if (id == NONE)
                return;
        index_leave(space, id);
        for (uint32_t n = 0; id != NONE && n < SUPERSEDED; n++) {
                if (space->blocks[id].run)
                        index_leave(space, id);
                last = id;
                id = space->blocks[id].child;
        }
        block_condemn(space, last);
}

static kvd_ref seal_one(struct attachment *a, struct growth *g, kvd_ref block, struct kvd_key key,
                        const uint32_t *tokens, uint32_t n) {
        uint32_t id = kvd_ref_id(block), duplicate;
        struct space *space = a->space;

        g->fields.key = key;
        g->fields.n_tokens = (uint16_t)n;
        duplicate = find_duplicate(space, g, tokens);
        if (duplicate != NONE) {
                space_count(space, KVD_SPACE_DUPLICATES, 1);
                step(space, g, duplicate);
                return g->fields.parent;
        }
        if (g->parent == NONE && space_finds_whole(space))
                supersede(space, &g->fields, tokens);
        block_fill_end(space, id);
        space->blocks[id].parent = g->parent; /* publish_run follows it */
        index_write(space, id, &g->fields, tokens);
        index_promise(space, id, g->promises);
        if (g->fields.semaphore)
                semaphores_promised(a, id, &g->fields, g->joint);
        block_set_state(space, id, KVD_SEALED, kvd_ref_generation(block));
        index_enter(space, id, g->root);
        block_link(space, id, g->parent);
        space_count(space, KVD_SPACE_SEALED, 1);
        if (!space->blocks[id].pending)
                summary_want(space, id);
        step(space, g, id);
        return block;
}

#define WINDOW 32u

/* Computes the keys of the next blocks, and prefetches their places in the table all at once. */
static void look_ahead(struct space *space, const struct growth *g, const struct seal_request *q,
                       uint32_t first, uint32_t n, struct kvd_key *ret) {
        uint32_t bt = space_full_tokens(space, q->group);
        struct kvd_key key = g->fields.key;

        for (uint32_t i = 0; i < n; i++) {
                uint32_t at = (first + i) * bt;

                key = ret[i] = kvd_key_block(space->ix, key, q->tokens + at,
                                             MIN(bt, q->n_tokens - at));
                index_prefetch(space, key, kvd_ref_id(q->blocks[first + i]));
        }
}

static void seal_window(struct attachment *a, struct growth *g, const struct seal_request *q,
                        uint32_t first, kvd_ref *ret) {
        uint32_t bt = space_full_tokens(a->space, q->group), n = MIN(q->n_blocks - first, WINDOW);
        struct kvd_key keys[WINDOW];

        look_ahead(a->space, g, q, first, n, keys);
        for (uint32_t i = 0; i < n; i++) {
                uint32_t at = (first + i) * bt;

                ret[first + i] = seal_one(a, g, q->blocks[first + i], keys[i], q->tokens + at,
                                          MIN(bt, q->n_tokens - at));
        }
}

static void seal_all(struct attachment *a, struct growth *growth, const struct seal_request *q,
                     kvd_ref *ret) {
        for (uint32_t first = 0; first < q->n_blocks; first += WINDOW)
                seal_window(a, growth, q, first, ret);
}

/* Which streams are still writing the blocks. */
static int promise(struct attachment *a, const struct seal_request *q, struct growth *g) {
        const char *why = NULL;
        int r = 0;

        g->joint = q->n_promises;
        if (q->n_promises)
                r = semaphores_promise_all(a, q, &g->fields, g->promises, &why);
        else if (q->semaphore)
                r = semaphores_promise(a, q, &g->fields, &why);
        return r < 0 ? refuse(a, r, why) : 0;
}

int blocks_seal(struct attachment *a, const struct seal_request *q, const struct key_ahead *ahead,
                kvd_ref *ret) {
        struct growth growth;
        int r = check_counts(a, q);

        if (r == 0)
                r = check_blocks(a, q);
        if (r == 0)
                r = find_parent(a, q, &growth);
        if (r == 0)
                r = check_prefix_end(a, q, growth.fields.depth);
        if (r == 0)
                r = promise(a, q, &growth);
        if (r < 0)
                return r;
        space_tick(a->space);
        if (ahead && kvd_key_equal(ahead->before, growth.fields.key))
                *ret = seal_one(a, &growth, *q->blocks, ahead->key, q->tokens, q->n_tokens);
        else
                seal_all(a, &growth, q, ret);
        return 0;
}

int space_seal(struct attachment *a, const struct seal_request *q, kvd_ref *ret) {
        int r = blocks_seal(a, q, NULL, ret);

        if (r == 0)
                available_tell(a);
        return r;
}

/* ---- blocks that come back ------------------------------------------------------------------- */

struct chain_at chain_begin(const struct space *space, uint32_t group, uint64_t salt,
                            const uint32_t *tokens, uint32_t n_tokens) {
        const struct kvd_index *ix = space->ix;
        struct chain_at at = {.group = group, .root = space_finds_whole(space) ? n_tokens : salt};

        at.key = space_finds_whole(space) ?
                         kvd_key_prefix_root(ix, kvd_key_prefix(ix, tokens, n_tokens), group) :
                         kvd_key_root(ix, group, salt);
        return at;
}

static void next_of(const struct space *space, const struct chain_at *at, const uint32_t *tokens,
                    struct kvd_desc *ret) {
        uint32_t n = tokens_at(space, at->group, at->root, at->depth);

        *ret = (struct kvd_desc){.key = kvd_key_block(space->ix, at->key, tokens, n),
                                 .parent = at->leaf,
                                 .depth = at->depth,
                                 .n_tokens = (uint16_t)n,
                                 .group = (uint16_t)at->group,
                                 .root = at->root};
}

bool chain_step(const struct space *space, struct chain_at *at, const uint32_t *tokens) {
        struct kvd_desc want;
        uint32_t id;

        next_of(space, at, tokens, &want);
        id = want.n_tokens ? index_find(space, &want, tokens) : NONE;
        if (id == NONE)
                return false;
        at->leaf = block_ref(space, id);
        at->key = want.key;
        at->depth++;
        return true;
}

/* Sets *at to the position behind the arrival's parent. False: that is poisoned or not cached. */
static bool stands_at(const struct space *space, const struct arrival *arrival,
                      struct chain_at *at) {
        const struct kvd_desc *desc;

        *at = *arrival->chain;
        if (arrival->parent == KVD_ROOT)
                return true;
        if (!block_current(space, arrival->parent) ||
            space->blocks[kvd_ref_id(arrival->parent)].private ||
            space->blocks[kvd_ref_id(arrival->parent)].poisoned)
                return false;
        desc = kvd_index_desc(space->ix, kvd_ref_id(arrival->parent));
        at->leaf = arrival->parent;
        at->key = desc->key;
        at->depth = desc->depth + 1;
        return true;
}

kvd_ref block_arrives(struct space *space, const struct arrival *arrival) {
        uint32_t id = kvd_ref_id(arrival->block), parent = kvd_ref_id(arrival->parent);
        struct chain_at at;
        struct kvd_desc fields;

        if (!stands_at(space, arrival, &at)) {
                block_discard(space, id);
                return 0;
        }
        next_of(space, &at, arrival->tokens, &fields);
        if (!space_finds_whole(space) && chain_step(space, &at, arrival->tokens)) {
                block_discard(space, id);
                return at.leaf;
        }
        if (space_finds_whole(space) && arrival->parent == KVD_ROOT)
                supersede(space, &fields, arrival->tokens);
        space->blocks[id].reviving = false;
        space->private.n_reviving--;
        space->blocks[id].parent = arrival->parent == KVD_ROOT ? NONE : parent;
        index_write(space, id, &fields, arrival->tokens);
        block_set_state(space, id, KVD_SEALED, block_generation(space, id));
        index_enter(space, id, arrival->chain->key);
        block_link(space, id, space->blocks[id].parent);
        space_count(space, KVD_SPACE_FETCHED, 1);
        summary_want(space, id);
        return arrival->block;
}
