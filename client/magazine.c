/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks to fill. They come from the daemon in batches and wait in the view's magazine, so that most allocations are a
 * pop under an uncontended lock. The magazine is small beside the pool, unless kvd_reserve says otherwise: what lies in
 * it, nobody else can have. It is in order, so that ids which belong together are handed out together.
 */

#include <errno.h>
#include <string.h>

#include "client/device.h"
#include "ipc/base/sys.h"

#define BATCH 128u
#define FETCH_MAX 4096u /* as in message allocate */
#define PIECE 256u
#define REPLACED (-ERESTART)     /* another daemon's view has taken the place of this one: look at that */

/* Blocks fetched ahead: 128, but a 64th of the space at most (of arenas, a quarter of the ids is in use). */
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

/* ---- with the daemon ---------------------------------------------------------------------------------------- */

static void release(struct view *view, const kvd_ref *blocks, uint32_t n) {
        struct kvd_msg_release request = {view->handle, {blocks, n * (uint32_t)sizeof *blocks}};

        if (n && view->epoch == view->space->handle->epoch && conn_is_open(view->space->handle->conn))
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

static void send_back(struct view *view, const kvd_ref *blocks, uint32_t n) {
        pthread_mutex_lock(&view->space->handle->lock);
        for (uint32_t i = 0; i < n; i += FETCH_MAX)
                release(view, blocks + i, MIN(n - i, FETCH_MAX));
        pthread_mutex_unlock(&view->space->handle->lock);
}

/* ---- the magazine: all under its lock ---------------------------------------------------------------------------- */

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
 * n more lie behind those that are in order. Few are put in their places; for many it is Shell's sort, since qsort asks
 * for memory.
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
                r = now == view ? fetch(view, n, view->magazine.refs + view->magazine.n) : REPLACED;
        pthread_mutex_unlock(&space->handle->lock);
        if (r > 0)
                put_in_order(view, (uint32_t)r);
        return r;
}

/* So that it holds n, and some more; and what is below the floor is replaced, if the daemon says that there is any. */
static int refill(struct view *view, uint32_t n) {
        uint64_t want = (uint64_t)n + floor_of(view);
        int r = 0;

        if (view->magazine.n >= n && (view->magazine.n >= want || !atomic_load(&view->page->available)))
                return 0;
        do
                r = fetch_more(view, (uint32_t)MIN(MAX(want - view->magazine.n, batch(view)), FETCH_MAX));
        while (r > 0 && view->magazine.n < n);
        return r;
}

/* The highest go. */
static void shrink(struct view *view, uint32_t to) {
        uint32_t n = view->magazine.n - MIN(view->magazine.n, to);

        if (!n)
                return;
        send_back(view, view->magazine.refs, n);
        view->magazine.n -= n;
        memmove(view->magazine.refs, view->magazine.refs + n, view->magazine.n * sizeof *view->magazine.refs);
}

/* ---- in and out ------------------------------------------------------------------------------------------------- */

/* n blocks at most from magazine or daemon. */
static int take(struct view *view, uint32_t n, kvd_ref *to) {
        uint32_t got = 0;
        int r;

        if (unlikely(view->device))
                semaphore_settle(view);
        pthread_mutex_lock(&view->magazine.lock);
        r = refill(view, n);
        if (r != REPLACED)
                got = pop(view, n, to);
        pthread_mutex_unlock(&view->magazine.lock);
        return got ? (int)got : r;
}

/* Blocks that nobody wants any more: into the magazine, and what it has no room for to the daemon. */
void magazine_put(struct view *view, const kvd_ref *blocks, uint32_t n) {
        uint32_t kept = 0;

        if (view_is_current(view)) {
                pthread_mutex_lock(&view->magazine.lock);
                kept = MIN(n, ceiling_of(view) - MIN(view->magazine.n, ceiling_of(view)));
                if (kept && !make_room(view, kept))
                        kept = 0;
                if (kept)
                        memcpy(view->magazine.refs + view->magazine.n, blocks, kept * sizeof *blocks);
                put_in_order(view, kept);
                pthread_mutex_unlock(&view->magazine.lock);
        }
        if (kept < n)
                send_back(view, blocks + kept, n - kept);
}

/* Fills it to the floor, or brings it down to it. How many it holds, or an error. */
static int keep(struct view *view) {
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

/* ---- the calls ---------------------------------------------------------------------------------------------- */

static int refuse_fork(void) {
        return client_fail(-ECHILD, "this process was forked from the one that opened the space; open it anew");
}

static void hand_out(struct view *view, const kvd_ref *refs, uint32_t n, struct kvd_block *blocks) {
        for (uint32_t i = 0; i < n; i++) {
                uint32_t id = kvd_ref_id(refs[i]);

                blocks[i] = (struct kvd_block){view->base + id * view->ix->block_bytes, view, id,
                                               kvd_ref_generation(refs[i])};
        }
        atomic_fetch_add(&view->refs, n);
        count(view->space, COUNT_ALLOCATED, n);
}

static int alloc_piece(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        kvd_ref refs[PIECE];
        struct view *view;
        int r;

        do {
                view = view_get(space);
                r = take(view, n, refs);
                if (r > 0)
                        hand_out(view, refs, (uint32_t)r, blocks);
                view_put(view);
        } while (r == REPLACED);
        return r;
}

int kvd_alloc(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        uint32_t got = 0, want;
        int r;

        if (forked(space->handle))
                return refuse_fork();
        if (n == 0)
                return client_fail(-EINVAL, "0 blocks asked for");
        do {
                want = MIN(n - got, PIECE);
                r = alloc_piece(space, want, blocks + got);
                got += r > 0 ? (uint32_t)r : 0;
        } while (r == (int)want && got < n);
        if (r == -ENOBUFS || r == -EDQUOT)
                count(space, COUNT_REFUSED, 1);
        return got ? (int)got : r;
}

int kvd_reserve(struct kvd_space *space, uint32_t n) {
        struct view *view;
        int r;

        if (forked(space->handle))
                return refuse_fork();
        atomic_store(&space->reserve, n);
        do {
                view = view_get(space);
                r = keep(view);
                view_put(view);
        } while (r == REPLACED);
        return r;
}

/* What the daemon wrote into our page, and what our pins became since. */
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

        if (forked(space->handle))
                return refuse_fork();
        view = view_get(space);
        n = (int64_t)(from_daemon(view->page) + atomic_load(&view->magazine.n));
        view_put(view);
        return n;
}

/* As many as can go back with one message: of one view, and all or none of them perhaps sealed. */
static uint32_t free_some(uint32_t n, struct kvd_block *blocks) {
        struct view *view = blocks[0].view;
        bool in_doubt = !blocks[0].data;
        kvd_ref refs[PIECE];
        uint32_t k = 0;

        for (; k < MIN(n, PIECE) && blocks[k].view == view && !blocks[k].data == in_doubt; k++) {
                refs[k] = kvd_ref_make(blocks[k].id, blocks[k].generation);
                blocks[k] = (struct kvd_block){0};
        }
        if (!view)
                return k;
        if (in_doubt)
                send_back(view, refs, k); /* see seal.c: the daemon knows what they are */
        else
                magazine_put(view, refs, k);
        for (uint32_t i = 0; i < k; i++)
                view_put(view);
        return k;
}

void kvd_free(struct kvd_space *space, uint32_t n, struct kvd_block *blocks) {
        if (forked(space->handle))
                return;
        for (uint32_t i = 0; i < n;)
                i += free_some(n - i, blocks + i);
}
