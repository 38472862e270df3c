/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pins and blocks that are released behind a stream. For the daemon they stay pinned, or being
 * filled, until the stream has passed. Then the next call that finds the semaphore at its value
 * releases them. A stream that is being captured cannot make a promise: its entries wait here until
 * it can.
 */

#include <string.h>

#include "client/gpu/gpu_view.h"
#include "ipc/base/sys.h"

static void let_go(struct view *view, const struct deferred *deferred, uint32_t n) {
        for (uint32_t i = 0; i < n; i++) {
                if (deferred[i].is_pin)
                        unpin_moved(view, kvd_ref_id(deferred[i].ref));
                else
                        magazine_put(view, &deferred[i].ref, 1);
                view_put(view);
        }
}

/* Under d->lock. */
static bool make_room(struct device *d) {
        uint32_t n = atomic_load(&d->n_deferred), room = d->room ? 2 * d->room : 64;
        struct deferred *more;

        if (n < d->room)
                return true;
        more = sys->calloc(room, sizeof *more);
        if (!more)
                return false;
        if (n)
                memcpy(more, d->deferred, n * sizeof *more);
        free(d->deferred);
        d->deferred = more;
        d->room = room;
        return true;
}

static bool is_promised(const struct deferred *deferred) {
        return deferred->until.at != SEMAPHORES;
}

static bool list(struct view *view, struct deferred deferred) {
        struct device *d = view->device;
        bool listed;

        atomic_fetch_add(&view->refs, 1);
        pthread_mutex_lock(&d->lock);
        listed = make_room(d);
        if (listed) {
                d->deferred[atomic_load(&d->n_deferred)] = deferred;
                atomic_fetch_add(&d->n_deferred, 1);
                atomic_fetch_add(&d->n_unpromised, !is_promised(&deferred));
        }
        pthread_mutex_unlock(&d->lock);
        return listed;
}

/* Without memory for the list, waits until all streams have passed. */
void deferred_add(struct view *view, struct promise until, kvd_ref ref, bool is_pin) {
        struct deferred deferred = {until, NULL, ref, is_pin};

        if (list(view, deferred))
                return;
        semaphore_quiet(view);
        let_go(view, &deferred, 1);
}

/* Without memory for the list, a block behind a capture stays pinned until the space is closed. */
void deferred_unpin(struct view *view, kvd_ref ref, void *stream) {
        struct deferred deferred = {{SEMAPHORES, 0}, stream, ref, true};
        int r = semaphore_promise(view, stream, &deferred.until);

        if (r == 0)
                deferred_add(view, deferred.until, ref, true);
        else if (r == -EBUSY)
                list(view, deferred);
        else
                unpin_moved(view, kvd_ref_id(ref));
}

#define SETTLE_PIECE 64u

static bool passed(const struct view *view, const struct deferred *one) {
        return is_promised(one) && semaphore_passed(view, one->until);
}

static bool unpromised(const struct view *view, const struct deferred *one) {
        return !is_promised(one);
}

/* Moves entries for which is_one holds into ret, SETTLE_PIECE at most. */
static uint32_t take(struct view *view,
                     bool (*is_one)(const struct view *, const struct deferred *),
                     struct deferred *ret) {
        struct device *d = view->device;
        uint32_t taken = 0, kept = 0, n;

        pthread_mutex_lock(&d->lock);
        n = atomic_load(&d->n_deferred);
        for (uint32_t i = 0; i < n; i++) {
                if (taken < SETTLE_PIECE && is_one(view, &d->deferred[i]))
                        ret[taken++] = d->deferred[i];
                else
                        d->deferred[kept++] = d->deferred[i];
        }
        atomic_store(&d->n_deferred, kept);
        if (is_one == unpromised)
                atomic_fetch_sub(&d->n_unpromised, taken);
        pthread_mutex_unlock(&d->lock);
        return taken;
}

/* The captures may have ended: tries again. */
static void ask_again(struct view *view) {
        struct deferred pieces[SETTLE_PIECE];
        uint32_t n = take(view, unpromised, pieces);

        for (uint32_t i = 0; i < n; i++) {
                deferred_unpin(view, pieces[i].ref, pieces[i].stream);
                view_put(view);
        }
}

uint32_t deferred_settle(struct view *view) {
        struct deferred pieces[SETTLE_PIECE];
        uint32_t n = SETTLE_PIECE;

        if (unlikely(atomic_load(&view->device->n_unpromised)))
                ask_again(view);
        while (n == SETTLE_PIECE && atomic_load(&view->device->n_deferred)) {
                n = take(view, passed, pieces);
                let_go(view, pieces, n);
        }
        return atomic_load(&view->device->n_deferred);
}

bool deferred_quiet(struct view *view) {
        deferred_settle(view);
        return atomic_load(&view->device->n_unpromised) == 0 && semaphore_quiet(view);
}
