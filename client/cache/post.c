/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealing without a reply. Posts lie in a ring in our pin page. The daemon is woken only if it was
 * not woken since it last looked at the ring, so that most posts are only a few stores. Each posted
 * block has a pin of its own, from before its post is published until the caller frees the block,
 * so that it stays in place whatever the daemon does with it. The daemon counts the posts that it
 * has taken in our page, where the count survives the daemon.
 */

#include <errno.h>
#include <string.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/sys.h"

#define GONE "the blocks belong to a daemon that is gone; free them"

/* ---- with the daemon -------------------------------------------------------------------------- */

static int ask(struct view *view) {
        const struct kvd_msg_flush request = {view->handle};
        struct kvd_space *space = view->space;
        struct view *now;
        int r = handle_lock(space->handle);

        if (r < 0)
                return r;
        r = view_attach(space, &now);
        if (r == 0 && now != view)
                r = client_fail(-ESTALE, GONE);
        else if (r == 0)
                r = handle_call(space->handle, KVD_MSG_flush, &request, NULL, NULL);
        handle_unlock(space->handle);
        if (r == 0 && posts_untaken(view) && sys_now_ns() > deadline_ns())
                r = client_fail(-ETIMEDOUT, "the daemon does not process posts");
        return r;
}

/* ---- errors of posts ------------------------------------------------------------------------- */

static int tell_lost(struct kvd_space *space) {
        unsigned long long n = atomic_exchange(&space->posts.lost, 0);

        if (!n)
                return 0;
        return client_fail(-ECONNRESET,
                           "%llu posted blocks were not published: the previous daemon ended", n);
}

/* Only one of the threads that see new refusals reports them. */
static int tell_refused(struct view *view, uint64_t refused) {
        uint64_t told = atomic_load(&view->space->posts.told);
        uint32_t error = atomic_load(&view->page->posts_errno);

        if (refused <= told ||
            !atomic_compare_exchange_strong(&view->space->posts.told, &told, refused))
                return 0;
        if (!error || error > 4095)
                return daemon_fail(-EPROTO, "posts were refused without a reason");
        return client_fail(-ECANCELED, "%llu posted blocks were refused, the last one: %s",
                           (unsigned long long)(refused - told), strerror((int)error));
}

/*
 * Reports errors that were not reported yet. A new count is seen with its reason; partner:
 * refuse in store/cache/post.c.
 */
static int tell(struct view *view) {
        struct kvd_space *space = view->space;
        uint64_t refused = atomic_load_explicit(&view->page->posts_refused, memory_order_acquire);

        if (unlikely(atomic_load_explicit(&space->posts.lost, memory_order_relaxed)))
                return tell_lost(space);
        if (unlikely(refused > atomic_load_explicit(&space->posts.told, memory_order_relaxed)) &&
            view_is_current(view))
                return tell_refused(view, refused);
        return 0;
}

/* ---- posting --------------------------------------------------------------------------------- */

struct posts {
        struct view *view;
        struct kvd_pin *pin;
        struct kvd_block *blocks;
        const uint32_t *tokens;
        uint32_t n, done;
};

static uint32_t ring(const struct view *view) {
        return kvd_posts(view->ix->geometry.block_tokens);
}

static struct kvd_post *place(const struct view *view, uint64_t number) {
        return (struct kvd_post *)((uint8_t *)view->page + kvd_posts_off(view->ix->capacity) +
                                   number % ring(view) *
                                           kvd_post_stride(view->ix->geometry.block_tokens));
}

/* From now on the caller may only read the block. */
static void becomes_posted(struct view *view, struct kvd_pin *pin, struct kvd_block *block) {
        count_pin(view, block->id);
        pin->n_posted++;
        pin->posted = block->id;
        pin->posted_generation = block->generation;
        block->data = view->sealed + block->id * view->ix->shard_bytes;
        block->view = (uint8_t *)view + 1;
}

static void write_post(const struct posts *p, uint64_t number) {
        struct kvd_block *block = &p->blocks[p->done];
        struct kvd_post *post = place(p->view, number);
        uint32_t bt = kvd_full_tokens(&p->view->ix->geometry, p->pin->group);

        post->block = kvd_ref_make(block->id, block->generation);
        post->parent = chain_end(p->pin);
        post->root = p->pin->salt;
        post->group = p->pin->group;
        post->pad = 0;
        memcpy(post->tokens, p->tokens + p->done * bt, bt * sizeof *post->tokens);
        becomes_posted(p->view, p->pin, block);
}

/*
 * R2 (tests/client/spin/post.pml): wakes the daemon, unless it was woken and has not looked since,
 * or polls the ring. In these cases it is woken once more when half of the ring is full.
 */
static void kick(struct view *view) {
        uint32_t what = posts_untaken(view) < ring(view) / 2 ? KVD_KICKED : KVD_KICKED_HARD;

        if (atomic_exchange(&view->page->kicked, what) < what)
                handle_kick(view->space->handle);
}

/* R1: posts as many blocks as the ring has room for. Partner: attachment_posts. */
static void fill(struct posts *p) {
        struct kvd_pinpage *page = p->view->page;
        uint64_t posted, first = p->done;

        pthread_mutex_lock(&p->view->magazine.lock);
        posted = atomic_load_explicit(&page->posted, memory_order_relaxed);
        for (; p->done < p->n && posts_untaken(p->view) < ring(p->view); p->done++) {
                write_post(p, posted++);
                atomic_store_explicit(&page->posted, posted, memory_order_release);
        }
        pthread_mutex_unlock(&p->view->magazine.lock);
        atomic_fetch_add_explicit(&page->held, p->done - first, memory_order_relaxed);
        count(p->view->space, COUNT_SEALED, p->done - first);
        if (p->done > first)
                kick(p->view);
}

static int check(const struct kvd_space *space, const struct view *view, uint32_t group, uint32_t n,
                 uint32_t n_tokens) {
        if (space->options.kind == KVD_BIDIRECTIONAL)
                return client_fail(-EINVAL, "a bidirectional prefix is sealed whole: kvd_seal");
        if ((uint64_t)n * kvd_full_tokens(&space->geometry, group) != n_tokens)
                return client_fail(-EINVAL, "only full blocks are posted: kvd_seal the last one");
        if (!view_is_current(view) || !view_is_served(view))
                return client_fail(-ESTALE, GONE);
        return 0;
}

int post_blocks(struct kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
                const uint32_t *tokens, uint32_t n_tokens) {
        struct posts p = {blocks[0].view, pin, blocks, tokens, n, 0};
        int r = tell(p.view);

        if (r == 0)
                r = check(space, p.view, pin->group, n, n_tokens);
        if (r < 0)
                return r;
        for (fill(&p); r == 0 && p.done < n; fill(&p))
                r = ask(p.view);
        return p.done ? (int)p.done : r;
}

int kvd_post(struct kvd_space *space, struct kvd_pin *pin, uint32_t n, struct kvd_block *blocks,
             const uint32_t *tokens, uint32_t n_tokens) {
        int r = seal_check(space, pin, n, blocks, n_tokens);

        return r < 0 ? r : post_blocks(space, pin, n, blocks, tokens, n_tokens);
}

int kvd_flush(struct kvd_space *space) {
        struct view *view;
        int r = space_check(space), told;

        if (r < 0)
                return r;
        view = view_get(space);
        if (posts_untaken(view))
                r = ask(view);
        view_put(view);
        view = view_get(space); /* a new one, if the daemon was replaced */
        told = tell(view);
        view_put(view);
        return told < 0 ? told : r == -ESTALE ? 0 : r;
}

/* ---- freeing --------------------------------------------------------------------------------- */

/* A block that the daemon sealed belongs to the cache, also while the daemon looks for its pins. */
static bool was_sealed(const struct view *view, kvd_ref ref) {
        uint64_t slot = atomic_load(&kvd_index_desc(view->ix, kvd_ref_id(ref))->slot);

        return kvd_slot_generation(slot) == kvd_ref_generation(ref) && slot_stands(slot);
}

/*
 * If the daemon has taken all posts, blocks that it did not seal are ours again. Otherwise they are
 * released by message, and the daemon takes the posts before it reads the message.
 */
void post_free(struct view *view, kvd_ref *refs, uint32_t n) {
        uint32_t clock = atomic_load_explicit(&view->ix->clock, memory_order_relaxed), k = 0;
        bool taken = view_is_current(view) && !posts_untaken(view);

        for (uint32_t i = 0; i < n; i++) {
                kvd_ref ref = refs[i];
                uint32_t id = kvd_ref_id(ref);

                if (!was_sealed(view, ref))
                        refs[k++] = ref;
                atomic_store_explicit(&view->words[id].touch, clock, memory_order_relaxed);
                unpin_block(view, id);
        }
        atomic_fetch_sub_explicit(&view->page->held, n, memory_order_relaxed);
        if (k)
                (taken ? magazine_put : magazine_send_back)(view, refs, k);
}
