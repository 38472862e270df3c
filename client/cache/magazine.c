/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks to fill. They come from the daemon in batches and wait in the view's magazine, so that
 * most allocations are a pop under an uncontended lock. No other client can use them, so the
 * magazine is small compared to the pool, unless kvd_reserve asks for more. It is sorted by id, so
 * that adjacent ids are handed out together.
 */

#include <errno.h>
#include <string.h>

#include "client/internal.h"
#include "ipc/base/sys.h"

#define BATCH 128u
#define FETCH_MAX 4096u /* limit of message allocate */
#define FRESH_MAX 512u  /* limit of message seal */
#define FRESH_LEAST 32u /* replies to seal bring no blocks to magazines with a smaller batch */

/* n, but at most a 64th of the space's blocks. (An arena uses only a quarter of its ids.) */
static uint32_t share(const struct view *view, uint32_t n) {
        uint32_t blocks = view->ix->arena ? view->ix->capacity / 4 : view->ix->capacity;

        return MAX(1, MIN(n, blocks / 64));
}

/* Minimum number of blocks to request from the daemon. */
static uint32_t batch(const struct view *view) {
        return share(view, BATCH);
}

static uint32_t floor_of(const struct view *view) {
        return MIN(atomic_load_explicit(&view->space->reserve, memory_order_relaxed),
                   view->ix->capacity);
}

/* If the magazine holds this many blocks, freed blocks go back to the daemon. */
static uint32_t ceiling_of(const struct view *view) {
        return floor_of(view) + batch(view);
}

/* ---- with the daemon ------------------------------------------------------------------------- */

static void release(const struct view *view, const kvd_ref *blocks, uint32_t n) {
        struct kvd_msg_release request = {view->handle, {blocks, n * (uint32_t)sizeof *blocks}};

        if (n && view_is_connected(view))
                handle_call(view->space->handle, KVD_MSG_release, &request, NULL, NULL);
}

/*
 * The daemon searches for unused blocks in pieces, and sets `more` in a reply if it has found none
 * yet. Then retry until the deadline of the call.
 */
static int ask(struct view *view, uint32_t n, struct kvd_msg_allocate_reply *reply) {
        struct kvd_msg_allocate request = {view->handle, n};
        uint64_t begun_ns = sys_now_ns();
        int r;

        do
                r = handle_call(view->space->handle, KVD_MSG_allocate, &request, reply, NULL);
        while (r >= 0 && reply->more && sys_now_ns() < deadline_ns());
        latency_count(view, KVD_LATENCY_ALLOCATE, begun_ns);
        if (r >= 0 && reply->more)
                return client_fail(-ENOBUFS,
                                   "the daemon is still searching for an unused block of space "
                                   "'%s'; release some blocks, or retry",
                                   view->space->name);
        return r;
}

/*
 * Under kvd.lock: copies the blocks of a reply, at most n, to `to`, and maps them. Returns their
 * number or an error.
 */
static int take_in(struct view *view, struct kvd_slice blocks, uint32_t n, kvd_ref *to) {
        uint32_t got = blocks.size / (uint32_t)sizeof *to;
        int r;

        if (got == 0 || got > n)
                return client_fail(-EPROTO, "the daemon handed out %u blocks of %u", got, n);
        memcpy(to, blocks.data, got * sizeof *to);
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
        bool now = handle_lock(view->space->handle) == 0;

        for (uint32_t i = 0; i < n; i += FETCH_MAX)
                (now ? release : later_release)(view, blocks + i, MIN(n - i, FETCH_MAX));
        if (now)
                handle_unlock(view->space->handle);
}

/* ---- the magazine: all under its lock -------------------------------------------------------- */

static bool make_room(struct magazine *m, uint32_t n) {
        uint64_t holds = magazine_n(m), room = MAX(4 * BATCH, ALIGN_UP(holds + n, 64));
        kvd_ref *more;

        if (likely(holds + n <= m->room))
                return true;
        more = sys->calloc(room, sizeof *more);
        if (!more)
                return false;
        if (holds)
                memcpy(more, m->refs, holds * sizeof *more);
        free(m->refs);
        m->refs = more;
        m->room = (uint32_t)room;
        return true;
}

/* Inserts refs[at] among every step-th reference before it; those are sorted, highest id first. */
static void sink(kvd_ref *refs, uint32_t at, uint32_t step) {
        kvd_ref ref = refs[at];

        for (; at >= step && kvd_ref_id(refs[at - step]) < kvd_ref_id(ref); at -= step)
                refs[at] = refs[at - step];
        refs[at] = ref;
}

/* Inserts up to 16 blocks one by one; more with a Shell sort, because qsort allocates memory. */
static void put_in_order(struct magazine *m, const kvd_ref *refs, uint32_t n) {
        uint32_t holds = magazine_n(m), total = holds + n;

        for (uint32_t i = 0; i < n; i++)
                m->refs[holds + i] = refs[i];
        for (uint32_t step = n > 16 ? total / 2 : 1; step; step /= 2)
                for (uint32_t i = step == 1 && n <= 16 ? holds : step; i < total; i++)
                        sink(m->refs, i, step);
        magazine_set_n(m, total);
}

/* The counter may lose blocks if two threads pop from two views of a space at the same time. */
static uint32_t pop(struct view *view, uint32_t n, kvd_ref *to) {
        struct magazine *m = &view->magazine;
        _Atomic uint64_t *counter = &view->space->counters[COUNT_ALLOCATED];
        uint32_t holds = magazine_n(m), got = MIN(n, holds);

        for (uint32_t i = 0; i < got; i++)
                to[i] = m->refs[--holds];
        magazine_set_n(m, holds);
        atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + got,
                              memory_order_relaxed);
        return got;
}

/* Removes the blocks with the highest ids, at most `most`. */
static uint32_t take_highest(struct magazine *m, uint32_t most, kvd_ref *to) {
        uint32_t holds = magazine_n(m), n = MIN(holds, most);

        if (!n)
                return 0;
        memcpy(to, m->refs, n * sizeof *to);
        memmove(m->refs, m->refs + n, (holds - n) * sizeof *m->refs);
        magazine_set_n(m, holds - n);
        return n;
}

struct wish {
        uint32_t n;     /* number of blocks that the magazine must hold */
        uint32_t floor; /* further blocks that it should hold, if the daemon has any available */
        uint32_t batch; /* minimum number of blocks to request */
};

/* Number of blocks to request from the daemon; 0 if none. */
static uint32_t shortage(const struct view *view, struct wish wish) {
        uint64_t want = (uint64_t)wish.n + wish.floor, holds = magazine_n(&view->magazine);

        if (holds >= wish.n && (holds >= want || !atomic_load(&view->page->available)))
                return 0;
        return (uint32_t)MIN(MAX(want - holds, wish.batch), FETCH_MAX);
}

/* ---- with the daemon: kvd.lock is taken first ------------------------------------------------------- */

static void lock(struct view *view) {
        pthread_mutex_lock(&view->magazine.lock);
}

static void unlock(struct view *view) {
        pthread_mutex_unlock(&view->magazine.lock);
}

static uint32_t shortage_now(struct view *view, struct wish wish) {
        uint32_t want;

        lock(view);
        want = shortage(view, wish);
        unlock(view);
        return want;
}

static bool put(struct view *view, const kvd_ref *refs, uint32_t n) {
        bool room;

        lock(view);
        room = make_room(&view->magazine, n);
        if (room)
                put_in_order(&view->magazine, refs, n);
        unlock(view);
        return room;
}

/* Under kvd.lock. Computes the shortage again: another thread may have fetched blocks. */
static int fetch_more(struct view *view, struct wish wish) {
        uint32_t want = shortage_now(view, wish);
        struct kvd_msg_allocate_reply reply;
        kvd_ref refs[FETCH_MAX];
        int r = want ? ask(view, want, &reply) : 1;

        if (r >= 0 && want)
                r = take_in(view, reply.blocks, want, refs);
        if (r < 0 || !want || put(view, refs, (uint32_t)r))
                return r;
        release(view, refs, (uint32_t)r);
        return client_fail(-ENOMEM, "out of memory");
}

/* Returns a positive number, MAGAZINE_REPLACED or an error. */
static int refill(struct view *view, struct wish wish) {
        struct kvd_space *space = view->space;
        struct view *now;
        int r = handle_lock(space->handle);

        if (r < 0)
                return r;
        r = view_attach(space, &now);
        if (r == 0)
                r = now == view ? fetch_more(view, wish) : MAGAZINE_REPLACED;
        handle_unlock(space->handle);
        return r;
}

/*
 * The reply to a seal also brings blocks, to save a request: a client that seals n blocks will
 * probably fill n more. Small spaces cannot spare blocks in advance. In an arena, cold blocks would
 * be evicted for them before the memory of a client that has exited is reclaimed.
 */
uint32_t magazine_lacks(struct view *view, uint32_t n) {
        uint32_t most = floor_of(view) + MAX(batch(view), share(view, MIN(n, FRESH_MAX))),
                 holds = magazine_n(&view->magazine),
                 want = MIN(most - MIN(holds, most), FRESH_MAX);

        if (view->ix->arena || batch(view) < FRESH_LEAST || holds >= most / 2)
                return 0;
        return want <= atomic_load(&view->page->available) ? want : 0;
}

/* Errors are ignored: if they persist, the next fetch reports them. */
void magazine_bring(struct view *view, struct kvd_slice fresh, uint32_t asked) {
        kvd_ref refs[FRESH_MAX];
        int r = fresh.size ? take_in(view, fresh, asked, refs) : 0;

        if (r > 0 && !put(view, refs, (uint32_t)r))
                release(view, refs, (uint32_t)r);
}

/* ---- in and out ------------------------------------------------------------------------------ */

/* After a timeout it is all of n or none: with a part, the caller would call and wait again. */
static bool has_all_or_did_not_wait(const struct view *view, uint32_t n, int r) {
        return r != -ETIMEDOUT || magazine_n(&view->magazine) >= n;
}

int magazine_take(struct view *view, uint32_t n, kvd_ref *to) {
        struct wish wish = {n, floor_of(view), batch(view)};
        uint32_t got = 0;
        int r = 1;

        for (;; wish.floor = 0) {
                bool enough;

                lock(view);
                enough = r <= 0 || !shortage(view, wish);
                if (enough && r != MAGAZINE_REPLACED && has_all_or_did_not_wait(view, n, r))
                        got = pop(view, n, to);
                unlock(view);
                if (enough)
                        return got ? (int)got : r;
                r = refill(view, wish);
        }
}

/* Returns unused blocks to the magazine, and to the daemon those that are over the ceiling. */
/*
 * On a GPU a teammate may have died, whose GPU work still writes the blocks. Only the daemon knows
 * when that is over.
 */
static bool may_be_written(const struct view *view) {
        return view->space->handle->joined && view->ix->semaphore_rows;
}

void magazine_put(struct view *view, const kvd_ref *blocks, uint32_t n) {
        uint32_t most = ceiling_of(view), kept = 0;

        if (view_is_current(view) && !may_be_written(view)) {
                lock(view);
                kept = MIN(n, most - MIN(magazine_n(&view->magazine), most));
                if (!make_room(&view->magazine, kept))
                        kept = 0;
                put_in_order(&view->magazine, blocks, kept);
                unlock(view);
        }
        if (kept < n)
                magazine_send_back(view, blocks + kept, n - kept);
}

/* Returns blocks over the ceiling to the daemon. */
static void shrink(struct view *view) {
        kvd_ref refs[FETCH_MAX];
        uint32_t n;

        do {
                uint32_t holds, most = ceiling_of(view);

                lock(view);
                holds = magazine_n(&view->magazine);
                n = take_highest(&view->magazine, MIN(holds - MIN(holds, most), FETCH_MAX), refs);
                unlock(view);
                if (n)
                        magazine_send_back(view, refs, n);
        } while (n == FETCH_MAX);
}

/* Fills the magazine to its floor, or shrinks it to its ceiling. Returns its size or an error. */
int magazine_keep(struct view *view) {
        uint32_t n = floor_of(view);
        int r = 1;

        while (r > 0 && magazine_n(&view->magazine) < n)
                r = refill(view, (struct wish){n, 0, 1});
        shrink(view);
        return r > 0 || r == -ENOBUFS || r == -EDQUOT ? (int)magazine_n(&view->magazine) : r;
}
