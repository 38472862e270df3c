/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What is let go of behind a stream stays pinned, or being filled, as far as the daemon knows,
 * until the stream has come that far. It is let go of by whichever call finds that the semaphore
 * has reached its value.
 */

#include <string.h>

#include "client/device.h"
#include "ipc/base/sys.h"

static void let_go(struct view *view, const struct deferred *deferred, uint32_t n) {
        for (uint32_t i = 0; i < n; i++) {
                if (deferred[i].is_pin)
                        unpin_block(view, kvd_ref_id(deferred[i].ref));
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

/* Without memory for a list, everything is waited for. */
void deferred_add(struct view *view, struct promise until, kvd_ref ref, bool is_pin) {
        struct deferred deferred = {until, ref, is_pin};
        struct device *d = view->device;
        bool listed;

        atomic_fetch_add(&view->refs, 1);
        pthread_mutex_lock(&d->lock);
        listed = make_room(d);
        if (listed) {
                d->deferred[atomic_load(&d->n_deferred)] = deferred;
                atomic_fetch_add(&d->n_deferred, 1);
        }
        pthread_mutex_unlock(&d->lock);
        if (listed)
                return;
        semaphore_quiet(view);
        let_go(view, &deferred, 1);
}

#define SETTLE_PIECE 64u

/* Takes out what can be let go of, up to a piece. */
static uint32_t take_passed(struct view *view, struct deferred *ret) {
        struct device *d = view->device;
        uint32_t taken = 0, kept = 0, n;

        pthread_mutex_lock(&d->lock);
        n = atomic_load(&d->n_deferred);
        for (uint32_t i = 0; i < n; i++) {
                if (taken < SETTLE_PIECE && semaphore_passed(view, d->deferred[i].until))
                        ret[taken++] = d->deferred[i];
                else
                        d->deferred[kept++] = d->deferred[i];
        }
        atomic_store(&d->n_deferred, kept);
        pthread_mutex_unlock(&d->lock);
        return taken;
}

uint32_t deferred_settle(struct view *view) {
        struct deferred passed[SETTLE_PIECE];
        uint32_t n = SETTLE_PIECE;

        while (n == SETTLE_PIECE && atomic_load(&view->device->n_deferred)) {
                n = take_passed(view, passed);
                let_go(view, passed, n);
        }
        return view->unmapped ? 0 : atomic_load(&view->device->n_deferred);
}
