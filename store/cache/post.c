/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks that clients seal without waiting for an answer. They lie in a ring in the client's pin
 * page, which the client may write at any time: each is copied once, and only the copy is looked
 * at, by the same checks as a request's. How many were taken is our own count. What was not taken
 * when the client or we end is a block that was being filled.
 */

#include <errno.h>

#include "ipc/base/enums.h"
#include "store/cache/inside.h"

union copy {
        struct kvd_post post;
        uint32_t words[sizeof(struct kvd_post) / sizeof(uint32_t) + KVD_MAX_BLOCK_TOKENS];
};

static const struct kvd_post *post_at(const struct attachment *a, uint64_t number) {
        const struct kvd_index *ix = a->space->ix;

        return (const void *)((const uint8_t *)a->page + kvd_posts_off(ix->capacity) +
                              number % KVD_POSTS * kvd_post_stride(ix->geometry.block_tokens));
}

static void copy_post(const struct attachment *a, uint64_t number, union copy *ret) {
        shm_read_words(ret->words, (const uint32_t *)post_at(a, number),
                       sizeof ret->post / sizeof(uint32_t) +
                               a->space->ix->geometry.block_tokens);
}

static void fetch_block(const struct space *space, kvd_ref ref) {
        uint32_t id = kvd_ref_id(ref);

        if (id >= space->ix->capacity)
                return;
        __builtin_prefetch(&space->blocks[id], 1);
        __builtin_prefetch((uint8_t *)(&space->blocks[id] + 1) - 1, 1);
        __builtin_prefetch(kvd_index_desc(space->ix, id), 1);
        __builtin_prefetch((uint8_t *)kvd_index_desc(space->ix, id) + 64, 1);
}

/*
 * What the daemon knows of the blocks of a client that woke it has gone cold, and comes all at
 * once. Nothing follows from what is read here.
 */
static void fetch_blocks(const struct attachment *a, uint64_t n) {
        for (uint64_t i = 0; i < n; i++) {
                const struct kvd_post *post = post_at(a, a->posts_taken + i);

                fetch_block(a->space, shm_get64(&post->block));
                fetch_block(a->space, shm_get64(&post->parent));
        }
}

/* Behind a block whose content another one had already, its client goes on as if it were that. */
static int take(struct attachment *a, const struct kvd_post *post) {
        struct space *space = a->space;
        const struct seal_request q = {.group = post->group,
                                       .parent = post->parent,
                                       .root = post->root,
                                       .n_blocks = 1,
                                       .blocks = &post->block,
                                       .n_tokens = space->ix->geometry.block_tokens,
                                       .tokens = post->tokens};
        kvd_ref now;
        int r;

        if (space->ix->kind != KVD_kind_causal)
                return -EINVAL;
        if (!block_filled_by(a, post->block))
                return -ESTALE;
        space->blocks[kvd_ref_id(post->block)].twin = 0;
        r = blocks_seal(a, &q, &now);
        if (r == 0 && now != post->block)
                space->blocks[kvd_ref_id(post->block)].twin = now;
        return r;
}

static void take_one(struct attachment *a) {
        struct kvd_pinpage *page = a->page;
        union copy copy;
        int r;

        copy_post(a, a->posts_taken++, &copy);
        r = take(a, &copy.post);
        if (r < 0) {
                atomic_store_explicit(&page->posts_errno, (uint32_t)-r, memory_order_relaxed);
                atomic_fetch_add_explicit(&page->posts_refused, 1, memory_order_relaxed);
        }
        atomic_store_explicit(&page->posts_taken, a->posts_taken, memory_order_release);
}

/* As many as a ring holds: a client that says more cannot have meant them. */
bool attachment_take_posts(struct attachment *a) {
        uint64_t posted = atomic_load_explicit(&a->page->posted, memory_order_acquire);
        uint64_t n = MIN(posted - a->posts_taken, KVD_POSTS);

        fetch_blocks(a, n);
        for (uint64_t i = 0; i < n; i++)
                take_one(a);
        if (n)
                available_tell(a);
        return n;
}

/* Whoever posts from now on says so again; what was posted before is seen here. */
bool attachment_was_kicked(struct attachment *a) {
        atomic_store_explicit(&a->page->kicked, 0, memory_order_seq_cst);
        return attachment_take_posts(a);
}
