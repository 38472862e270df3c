/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Takes posts: blocks that clients seal without waiting for an answer. Posts are in a ring in the
 * client's pin page, which the client may write at any time. So each post is copied once, and only
 * the copy is used, with the same checks as a request. The daemon has its own count of posts taken.
 * The client counts the posts made, and is trusted only up to the number of blocks that it is
 * filling. A block whose post was not taken when the daemon ends is still being filled.
 */

#include <errno.h>

#include "ipc/base/enums.h"
#include "store/cache/inside.h"

static const struct kvd_post *post_at(const struct attachment *a, uint64_t number) {
        const struct kvd_index *ix = a->space->ix;

        return (const void *)((const uint8_t *)a->page + kvd_posts_off(ix->capacity) +
                              number % kvd_posts(ix->geometry.block_tokens) *
                                      kvd_post_stride(ix->geometry.block_tokens));
}

/* ---- ahead ----------------------------------------------------------------------------------- */

/* Posts that are taken together, in stages with prefetches: their blocks are in no CPU cache. */
#define WINDOW 16u
/* room for their copies: 16 posts of blocks of 256 tokens, or one of 4,096 */
#define WINDOW_BYTES 17408u
static_assert(sizeof(struct kvd_post) + KVD_MAX_BLOCK_TOKENS * sizeof(uint32_t) <= WINDOW_BYTES,
              "a window has a post");

struct window {
        uint32_t n, stride; /* stride: bytes from copy to copy */
        alignas(struct kvd_post) uint8_t copies[WINDOW_BYTES];
        struct key_ahead keys[WINDOW];
};

static struct kvd_post *copy_in(const struct window *w, uint32_t i) {
        return (struct kvd_post *)(w->copies + i * w->stride);
}

/* Number of posts of the next window, if so many are left. */
static uint32_t window_of(const struct attachment *a, uint32_t left) {
        uint64_t fit = WINDOW_BYTES / kvd_post_stride(space_block_tokens(a->space));

        return (uint32_t)MIN(MIN(left, WINDOW), fit);
}

static void copy_post(const struct attachment *a, uint64_t number, struct kvd_post *ret) {
        shm_read_words((uint32_t *)ret, (const uint32_t *)post_at(a, number),
                       sizeof *ret / sizeof(uint32_t) + space_block_tokens(a->space));
}

static void fetch_block(const struct space *space, kvd_ref ref) {
        uint32_t id = kvd_ref_id(ref);

        if (id >= space->ix->capacity)
                return;
        __builtin_prefetch(&space->blocks[id], 1);
        __builtin_prefetch(kvd_index_desc(space->ix, id), 1);
        __builtin_prefetch((uint8_t *)kvd_index_desc(space->ix, id) + 64, 1);
}

/* The key of the block before a post, as the post says. blocks_seal verifies it. */
static struct kvd_key key_before(const struct space *space, const struct window *w, uint32_t i) {
        const struct kvd_post *post = copy_in(w, i);
        uint32_t id = kvd_ref_id(post->parent);

        if (post->parent == KVD_ROOT)
                return kvd_key_root(space->ix, post->group, post->root);
        if (i && post->parent == copy_in(w, i - 1)->block)
                return w->keys[i - 1].key;
        return id < space->ix->capacity ? kvd_index_desc(space->ix, id)->key : (struct kvd_key){0};
}

/*
 * Copies the posts, computes their keys, and prefetches what sealing will touch: first the blocks
 * and those before them, then the keys' places in the table. Where a guess is wrong, the key is
 * computed again.
 */
static void look_ahead(const struct attachment *a, struct window *w) {
        const struct space *space = a->space;

        for (uint32_t i = 0; i < w->n; i++) {
                struct kvd_post *post = copy_in(w, i);

                copy_post(a, a->posts_taken + i, post);
                fetch_block(space, post->block);
                fetch_block(space, post->parent);
        }
        for (uint32_t i = 0; i < w->n; i++) {
                const struct kvd_post *post = copy_in(w, i);
                struct key_ahead *key = &w->keys[i];

                key->before = key_before(space, w, i);
                key->key = kvd_key_block(space->ix, key->before, post->tokens,
                                         space_full_tokens(space, post->group));
                if (kvd_ref_id(post->block) < space->ix->capacity)
                        index_prefetch(space, key->key, kvd_ref_id(post->block));
        }
}

/* ---- taking ---------------------------------------------------------------------------------- */

/* If an older block has the content, the client's chain continues behind that one (twin). */
static int take(struct attachment *a, const struct kvd_post *post, const struct key_ahead *key) {
        struct space *space = a->space;
        const struct seal_request q = {.group = post->group,
                                       .parent = post->parent,
                                       .root = post->root,
                                       .n_blocks = 1,
                                       .blocks = &post->block,
                                       .n_tokens = space_full_tokens(space, post->group),
                                       .tokens = post->tokens};
        kvd_ref now;
        int r;

        if (space->ix->kind != KVD_kind_causal)
                return -EINVAL;
        if (!block_filled_by(a, post->block))
                return -ESTALE;
        space->blocks[kvd_ref_id(post->block)].twin = 0;
        r = blocks_seal(a, &q, key, &now);
        if (r == 0 && now != post->block)
                space->blocks[kvd_ref_id(post->block)].twin = now;
        return r;
}

/* The reason comes before the count: partner of tell in client/cache/post.c. */
static void refuse(struct kvd_pinpage *page, uint64_t n, int error) {
        atomic_store_explicit(&page->posts_errno, (uint32_t)-error, memory_order_relaxed);
        atomic_fetch_add_explicit(&page->posts_refused, n, memory_order_release);
}

static void take_one(struct attachment *a, const struct kvd_post *post,
                     const struct key_ahead *key) {
        struct kvd_pinpage *page = a->page;
        int r = take(a, post, key);

        if (r < 0)
                refuse(page, 1, r);
        atomic_store_explicit(&page->posts_taken, ++a->posts_taken, memory_order_release);
}

static void take_window(struct attachment *a, uint32_t n) {
        struct window w;

        w.n = n;
        w.stride = (uint32_t)kvd_post_stride(space_block_tokens(a->space));
        look_ahead(a, &w);
        for (uint32_t i = 0; i < n; i++)
                take_one(a, copy_in(&w, i), &w.keys[i]);
}

/* How many posts the client says are waiting. It may say anything. */
static uint64_t said(const struct attachment *a) {
        return atomic_load_explicit(&a->page->posted, memory_order_seq_cst) - a->posts_taken;
}

/* Refuses posts that cannot exist, all at once; otherwise each call would look for them again. */
static void refuse_rest(struct attachment *a, uint64_t n) {
        if (!n)
                return;
        refuse(a->page, n, -ESTALE);
        a->posts_taken += n;
        atomic_store_explicit(&a->page->posts_taken, a->posts_taken, memory_order_release);
}

static void take_posts(struct attachment *a, uint32_t n) {
        bool quiet = a->space->listed.quiet;

        a->space->listed.quiet = true;
        for (uint32_t left = n, some; left; left -= some) {
                some = window_of(a, left);
                take_window(a, some);
        }
        a->space->listed.quiet = quiet;
}

bool attachment_take_posts(struct attachment *a) {
        uint64_t all = said(a);
        uint32_t n = (uint32_t)MIN(all, attachment_posts(a));

        take_posts(a, n);
        refuse_rest(a, all - n);
        if (n)
                available_tell(a);
        return n;
}

/*
 * R3, R4. A client that posts from now on sends a message again; what was posted before is seen
 * here. Partner: R1, R2. Both words are sequentially consistent: an acquire load may pass the store
 * (LDAPR).
 */
bool attachment_was_kicked(struct attachment *a) {
        atomic_exchange(&a->page->kicked, 0); /* a store would not order what follows */
        return attachment_take_posts(a);
}

/* ---- the last ones --------------------------------------------------------------------------- */

static void take_piece(struct attachment *a) {
        uint32_t n = window_of(a, a->posts_left);

        take_posts(a, n);
        a->posts_left -= n;
}

/*
 * A process may leave a full ring in each of many spaces when it ends. The number of posts is fixed
 * then (posts_left). Taking them is idle work, a window at a time; an allocation that would be
 * refused takes a window first.
 */
bool posts_take_left(struct space *space) {
        for (struct attachment *a = NULL; (a = space_next_attachment(space, a));) {
                if (!a->posts_left)
                        continue;
                take_piece(a);
                return true;
        }
        return false;
}
