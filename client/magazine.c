/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks to fill. They come from the daemon in batches and wait in the view's magazine, so that
 * most allocations are a pop under an uncontended lock. The magazine is small beside the pool,
 * unless kvd_reserve says otherwise: what lies in it, nobody else can have. It is in order, so that
 * ids which belong together are handed out together.
 */

#include <errno.h>
#include <string.h>

#include "client/internal.h"
#include "ipc/base/sys.h"

#define BATCH 128u
#define FETCH_MAX 4096u /* as in message allocate */

/*
 * Blocks fetched ahead: 128, but a 64th of the space at most (of arenas, a quarter of the ids is in
 * use).
 */
static uint32_t batch(const struct view *view) {
        uint32_t blocks = view->ix->arena ? view->ix->capacity / 4 : view->ix->capacity;

        return MAX(1, MIN(BATCH, blocks / 64));
}

static uint32_t floor_of(const struct view *view) {
        return MIN(atomic_load(&view->space->reserve), view->ix->capacity);
}

/* What it holds at most; more goes back to the daemon. */
static uint32_t ceiling_of(const struct view *view) {
        return floor_of(view) + batch(view);
}

/* ---- with the daemon ------------------------------------------------------------------------- */

static void release(struct view *view, const kvd_ref *blocks, uint32_t n) {
        struct kvd_msg_release request = {view->handle, {blocks, n * (uint32_t)sizeof *blocks}};

        if (n && view->epoch == view->space->handle->epoch &&
            conn_is_open(view->space->handle->conn))
                handle_call(view->space->handle, KVD_MSG_release, &request, NULL, NULL);
}

/* Under kvd.lock: n blocks at most, into to. How many, or an error. */
static int fetch(struct view *view, uint32_t n, kvd_ref *to) {
        struct kvd_msg_allocate request = {view->handle, n};
        struct kvd_msg_allocate_reply reply;
        int r = handle_call(view->space->handle, KVD_MSG_allocate, &request, &reply, NULL);
        uint32_t got;

        if (r < 0)
                return r;
        got = reply.blocks.size / (uint32_t)sizeof *to;
        if (got == 0 || got > n)
                return client_fail(-EPROTO, "the daemon handed out %u blocks of %u", got, n);
        memcpy(to, reply.blocks.data, got * sizeof *to);
        for (uint32_t i = 0; i < got; i++) {
                r = view_map_block(view, kvd_ref_id(to[i]), true);
                if (r < 0) {
                        release(view, to, got);
                        return r;
                }
        }
        return (int)got;
}

void magazine_send_back(struct view *view, const kvd_ref *blocks, uint32_t n) {
        pthread_mutex_lock(&view->space->handle->lock);
        for (uint32_t i = 0; i < n; i += FETCH_MAX)
                release(view, blocks + i, MIN(n - i, FETCH_MAX));
        pthread_mutex_unlock(&view->space->handle->lock);
}

/* ---- the magazine: all under its lock -------------------------------------------------------- */

static bool make_room(struct view *view, uint32_t n) {
        uint32_t room = MAX(4 * BATCH, (uint32_t)ALIGN_UP((uint64_t)view->magazine.n + n, 64));
        kvd_ref *more;

        if (room <= view->magazine.room)
                return true;
        more = sys->calloc(room, sizeof *more);
        if (!more)
                return false;
        if (view->magazine.n)
                memcpy(more, view->magazine.refs, view->magazine.n * sizeof *more);
        free(view->magazine.refs);
        view->magazine.refs = more;
        view->magazine.room = room;
        return true;
}

/* Moves what is at `at` up among every step-th before it, which are in order. */
static void sink(kvd_ref *refs, uint32_t at, uint32_t step) {
        kvd_ref ref = refs[at];

        for (; at >= step && kvd_ref_id(refs[at - step]) < kvd_ref_id(ref); at -= step)
                refs[at] = refs[at - step];
        refs[at] = ref;
}

/*
 * n more lie behind those that are in order. Few are put in their places; for many it is Shell's
 * sort, since qsort asks for memory.
 */
static void put_in_order(struct view *view, uint32_t n) {
        uint32_t total = view->magazine.n + n;

        for (uint32_t step = n > 16 ? total / 2 : 1; step; step /= 2)
                for (uint32_t i = step == 1 && n <= 16 ? view->magazine.n : step; i < total; i++)
                        sink(view->magazine.refs, i, step);
        view->magazine.n = total;
}

static uint32_t pop(struct view *view, uint32_t n, kvd_ref *to) {
        uint32_t got = MIN(n, view->magazine.n);

        for (uint32_t i = 0; i < got; i++)
                to[i] = view->magazine.refs[--view->magazine.n];
        return got;
}

/* Up to n more from the daemon. How many, or an error. */
static int fetch_more(struct view *view, uint32_t n) {
        struct kvd_space *space = view->space;
        struct view *now;
        int r;

        n = MIN(n, FETCH_MAX);
        if (!make_room(view, n))
                return client_fail(-ENOMEM, "out of memory");
        pthread_mutex_lock(&space->handle->lock);
        r = view_attach(space, &now);
        if (r == 0)
                r = now == view ? fetch(view, n, view->magazine.refs + view->magazine.n) :
                                  MAGAZINE_REPLACED;
        pthread_mutex_unlock(&space->handle->lock);
        if (r > 0)
                put_in_order(view, (uint32_t)r);
        return r;
}

/*
 * So that it holds n, and some more; and what is below the floor is replaced, if the daemon says
 * that there is any.
 */
static int refill(struct view *view, uint32_t n) {
        uint64_t want = (uint64_t)n + floor_of(view);
        int r = 0;

        if (view->magazine.n >= n &&
            (view->magazine.n >= want || !atomic_load(&view->page->available)))
                return 0;
        do
                r = fetch_more(view,
                               (uint32_t)MIN(MAX(want - view->magazine.n, batch(view)), FETCH_MAX));
        while (r > 0 && view->magazine.n < n);
        return r;
}

/* The highest go. */
static void shrink(struct view *view, uint32_t to) {
        uint32_t n = view->magazine.n - MIN(view->magazine.n, to);

        if (!n)
                return;
        magazine_send_back(view, view->magazine.refs, n);
        view->magazine.n -= n;
        memmove(view->magazine.refs, view->magazine.refs + n,
                view->magazine.n * sizeof *view->magazine.refs);
}

/* ---- in and out ------------------------------------------------------------------------------ */

/* n blocks at most from magazine or daemon. */
int magazine_take(struct view *view, uint32_t n, kvd_ref *to) {
        uint32_t got = 0;
        int r;

        pthread_mutex_lock(&view->magazine.lock);
        r = refill(view, n);
        if (r != MAGAZINE_REPLACED)
                got = pop(view, n, to);
        pthread_mutex_unlock(&view->magazine.lock);
        return got ? (int)got : r;
}

/*
 * Blocks that nobody wants any more: into the magazine, and what it has no room for to the daemon.
 */
void magazine_put(struct view *view, const kvd_ref *blocks, uint32_t n) {
        uint32_t kept = 0;

        if (view_is_current(view)) {
                pthread_mutex_lock(&view->magazine.lock);
                kept = MIN(n, ceiling_of(view) - MIN(view->magazine.n, ceiling_of(view)));
                if (kept && !make_room(view, kept))
                        kept = 0;
                if (kept)
                        memcpy(view->magazine.refs + view->magazine.n, blocks,
                               kept * sizeof *blocks);
                put_in_order(view, kept);
                pthread_mutex_unlock(&view->magazine.lock);
        }
        if (kept < n)
                magazine_send_back(view, blocks + kept, n - kept);
}

/* Fills it to the floor, or brings it down to it. How many it holds, or an error. */
int magazine_keep(struct view *view) {
        uint32_t n = floor_of(view);
        int r = 1;

        pthread_mutex_lock(&view->magazine.lock);
        while (r > 0 && view->magazine.n < n)
                r = fetch_more(view, n - view->magazine.n);
        shrink(view, ceiling_of(view));
        if (r > 0 || r == -ENOBUFS || r == -EDQUOT)
                r = (int)view->magazine.n;
        pthread_mutex_unlock(&view->magazine.lock);
        return r;
}
