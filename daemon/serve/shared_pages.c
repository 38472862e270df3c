/* SPDX-License-Identifier: Apache-2.0 */

/*
 * No event tells that a stream has passed, or that a client pinned a block. Readers wait by
 * themselves, in their streams: looking only spares them that later on, and lets blocks be evicted,
 * so it is done rarely when little changes. Pins are looked at when the clock is a multiple of
 * PINS_NS, whoever has asked for it first: that must not show in when another domain's are.
 */

#include "daemon/serve/shared_pages.h"

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define SOON_NS UINT64_C(1000000) /* a round through all spaces goes on: others first */
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

/* Clients want to know what others' pins leave them. */
static void look_at_pins(struct loop_timer *timer) {
        struct shared_pages *p = container_of(timer, struct shared_pages, pins);

        enum store_again again = store_look_at_pins(p->store);

        if (again == STORE_DONE)
                return;
        loop_want_idle(p->loop);
        loop_timer_set(p->loop, timer, again == STORE_SOON ? sys_now_ns() + SOON_NS : next_look_ns());
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
                return; /* soon enough: a client that seals all the time must not put it off */
        p->pause_ns = SEMAPHORES_FIRST_NS;
        loop_timer_set(p->loop, &p->semaphores, sys_now_ns() + SEMAPHORES_FIRST_NS);
}
