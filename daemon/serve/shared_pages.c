/* SPDX-License-Identifier: Apache-2.0 */

/*
 * No event reports that a stream has passed a semaphore, or that a client has pinned a block.
 * Readers wait in their streams anyway: polling only spares later readers the wait and allows
 * eviction, so it becomes rare when little changes. Pins are polled when the clock is a multiple of
 * PINS_NS, and not relative to the first client's arrival, which would be visible to other domains.
 */

#include "daemon/serve/shared_pages.h"

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define SOON_NS UINT64_C(1000000) /* until a round through all spaces goes on; other work first */
#define PINS_NS UINT64_C(100000000)
#define SEMAPHORES_FIRST_NS UINT64_C(1000000)
#define SEMAPHORES_MOST_NS UINT64_C(64000000)

static void look_at_semaphores(struct loop_timer *timer) {
        struct shared_pages *p = container_of(timer, struct shared_pages, semaphores);

        enum store_again again = store_look_at_semaphores(p->store);

        if (again == STORE_DONE)
                return;
        if (again == STORE_LATER)
                p->pause_ns = MIN(2 * p->pause_ns, SEMAPHORES_MOST_NS);
        loop_timer_set(p->loop, timer,
                       sys_now_ns() + (again == STORE_SOON ? SOON_NS : p->pause_ns));
}

static uint64_t next_look_ns(void) {
        return (sys_now_ns() / PINS_NS + 1) * PINS_NS;
}

/* The loop then counts, as idle work, what pins leave for other clients. */
static void look_at_pins(struct loop_timer *timer) {
        struct shared_pages *p = container_of(timer, struct shared_pages, pins);

        enum store_again again = store_look_at_pins(p->store);

        if (again == STORE_DONE)
                return;
        loop_want_idle(p->loop);
        loop_timer_set(p->loop, timer,
                       again == STORE_SOON ? sys_now_ns() + SOON_NS : next_look_ns());
}

void shared_pages_init(struct shared_pages *p, struct loop *loop, struct store *store) {
        *p = (struct shared_pages){.loop = loop, .store = store};
        p->pins.fire = look_at_pins;
        p->semaphores.fire = look_at_semaphores;
}

void shared_pages_stop(struct shared_pages *p) {
        loop_timer_stop(&p->pins);
        loop_timer_stop(&p->semaphores);
}

void shared_pages_watch_pins(struct shared_pages *p) {
        if (!loop_timer_is_set(&p->pins))
                loop_timer_set(p->loop, &p->pins, next_look_ns());
}

void shared_pages_watch_semaphores(struct shared_pages *p) {
        if (loop_timer_is_set(&p->semaphores) && p->pause_ns == SEMAPHORES_FIRST_NS)
                return; /* soon enough; frequent seals must not postpone it */
        p->pause_ns = SEMAPHORES_FIRST_NS;
        loop_timer_set(p->loop, &p->semaphores, sys_now_ns() + SEMAPHORES_FIRST_NS);
}
