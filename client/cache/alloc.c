/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Allocates and frees blocks to fill. They come from the view's magazine and return to it. Each
 * block that the caller owns holds a reference to its view.
 */

#include <errno.h>
#include <string.h>

#include "client/gpu/gpu_view.h"

#define PIECE 256u

/* The caller's reference to the view passes to the first block; the others get new ones. */
static void hand_out(struct view *view, const kvd_ref *refs, uint32_t n, struct kvd_block *blocks) {
        for (uint32_t i = 0; i < n; i++) {
                uint32_t id = kvd_ref_id(refs[i]);

                blocks[i] = (struct kvd_block){view->base + id * view->ix->shard_bytes, view, id,
                                               kvd_ref_generation(refs[i])};
        }
        if (n > 1)
                atomic_fetch_add(&view->refs, n - 1);
}

static int alloc_piece(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        kvd_ref refs[PIECE];
        struct view *view;
        int r;

        do {
                view = view_get(space);
                if (unlikely(view->device))
                        deferred_settle(view);
                r = magazine_take(view, n, refs);
                if (r > 0)
                        hand_out(view, refs, (uint32_t)r, blocks);
                else
                        view_put(view);
        } while (r == MAGAZINE_REPLACED);
        return r;
}

/* Blocks of two daemons cannot be used together: keeps those of the later one. Returns how many. */
static uint32_t keep_one_view(struct kvd_space *space, struct kvd_block *blocks, uint32_t before,
                              uint32_t n) {
        if (!before || !n || blocks[before].view == blocks[0].view)
                return before + n;
        kvd_free(space, before, blocks);
        memmove(blocks, blocks + before, n * sizeof *blocks);
        return n;
}

int kvd_alloc(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        uint32_t got = 0, want;
        int r;

        if (space_check(space) < 0)
                return -ECHILD;
        if (n == 0)
                return client_fail(-EINVAL, "0 blocks asked for");
        do {
                want = MIN(n - got, PIECE);
                r = alloc_piece(space, want, blocks + got);
                got = keep_one_view(space, blocks, got, r > 0 ? (uint32_t)r : 0);
        } while (r == (int)want && got < n);
        if (r == -ENOBUFS || r == -EDQUOT)
                count(space, COUNT_REFUSED, 1);
        if (r == -ETIMEDOUT)
                kvd_free(space, got, blocks);
        return got && r != -ETIMEDOUT ? (int)got : r;
}

int kvd_reserve(struct kvd_space *space, uint32_t n) {
        struct view *view;
        int r;

        if (space_check(space) < 0)
                return -ECHILD;
        atomic_store(&space->reserve, n);
        do {
                view = view_get(space);
                r = magazine_keep(view);
                view_put(view);
        } while (r == MAGAZINE_REPLACED);
        return r;
}

/*
 * The number of available blocks that the daemon wrote into our page, corrected for what we have
 * pinned and unpinned since.
 */
static uint64_t from_daemon(const struct kvd_pinpage *page) {
        uint64_t held = atomic_load(&page->held), seen = atomic_load(&page->held_seen);
        uint64_t available = atomic_load(&page->available), own = atomic_load(&page->held_alone);

        if (held > seen)
                return available - MIN(available, held - seen);
        if (seen)
                available += own * (seen - held) / seen;
        return MIN(available, atomic_load(&page->may_fill));
}

int64_t kvd_available(struct kvd_space *space) {
        struct view *view;
        int64_t n;

        if (space_check(space) < 0)
                return -ECHILD;
        view = view_get(space);
        n = (int64_t)(from_daemon(view->page) + magazine_n(&view->magazine));
        view_put(view);
        return n;
}

/*
 * Frees the leading blocks that one message can return: they have the same view, are all posted or
 * all not, and are all in doubt (perhaps sealed) or all not. Returns their number.
 */
static uint32_t free_some(uint32_t n, struct kvd_block *blocks) {
        struct view *view = view_of(&blocks[0]);
        const struct kvd_block first = blocks[0];
        bool in_doubt = !first.data;
        kvd_ref refs[PIECE];
        uint32_t k = 0;

        for (; k < MIN(n, PIECE) && blocks[k].view == first.view && !blocks[k].data == in_doubt;
             k++) {
                refs[k] = kvd_ref_make(blocks[k].id, blocks[k].generation);
                blocks[k] = (struct kvd_block){0};
        }
        if (!view)
                return k;
        if (is_posted(&first))
                post_free(view, refs, k);
        else if (in_doubt)
                magazine_send_back(view, refs, k); /* the daemon knows if they are sealed */
        else
                magazine_put(view, refs, k);
        view_put_some(view, k);
        return k;
}

void kvd_free(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        if (forked(space->handle))
                return;
        for (uint32_t i = 0; i < n;)
                i += free_some(n - i, blocks + i);
}
