/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Start-time fair queueing: each user has a virtual clock that advances by the cost of its
 * requests, and the user whose clock is furthest behind is served. A user that was idle starts at
 * the current virtual time, so no user can save up time for a burst, or pays for the time when it
 * was alone.
 *
 * The monotonic clock is cheap to read, but advances while another process uses our processor, such
 * as the client that a reply has woken. So if users contend, the cost of work that seems to have
 * taken long is measured by the thread's CPU clock, which takes a system call.
 */

#include "daemon/serve/turns.h"

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define DOUBT_NS UINT64_C(20000)

static struct turns_user *user_of(struct kvd_list_node *node) {
        return container_of(node, struct turns_user, node);
}

/* Inserts the user behind those with the same cost, who came first. */
static void queue_user(struct turns *t, struct turns_user *u) {
        struct kvd_list_node *before = NULL, *last = t->users.last;

        kvd_list_remove(&u->node);
        while (last && user_of(last)->cost_ns > u->cost_ns) {
                before = last;
                last = last->prev;
        }
        kvd_list_insert(&t->users, before, &u->node);
}

void turns_add(struct turns *t, struct turns_place *place) {
        struct turns_user *u = place->user;

        if (place->node.in)
                return;
        kvd_list_insert(&u->waiting, NULL, &place->node);
        if (u->node.in)
                return;
        u->cost_ns = MAX(u->cost_ns, t->now_ns);
        queue_user(t, u);
}

void turns_remove(struct turns *t, struct turns_place *place) {
        if (kvd_list_remove(&place->node) && !place->user->waiting.first)
                kvd_list_remove(&place->user->node);
}

void turns_charge(struct turns *t, struct turns_user *u, uint64_t ns) {
        u->cost_ns = MAX(u->cost_ns, t->now_ns) + MIN(ns, TURNS_MOST_NS);
        if (u->node.in)
                queue_user(t, u);
}

static bool users_contend(const struct turns *t) {
        return t->users.first != t->users.last;
}

static uint64_t worked_of(struct turns *t, uint64_t elapsed_ns) {
        uint64_t before = t->cpu_ns;

        if (!before)
                return elapsed_ns;
        t->cpu_ns = elapsed_ns < DOUBT_NS ? before + elapsed_ns : sys_cpu_ns();
        return MIN(elapsed_ns, t->cpu_ns - MIN(before, t->cpu_ns));
}

bool turns_wanted(const struct turns *t) {
        return t->users.first;
}

bool turns_run(struct turns *t) {
        uint64_t began = sys_now_ns(), before = began, now = began;

        t->cpu_ns = users_contend(t) ? sys_cpu_ns() : 0;
        while (t->users.first && now - began < TURNS_SLICE_NS) {
                struct turns_user *u = user_of(t->users.first);
                struct turns_place *place = kvd_list_first(&u->waiting, struct turns_place, node);

                t->now_ns = u->cost_ns;
                turns_remove(t, place);
                if (t->serve(place))
                        turns_add(t, place);
                now = sys_now_ns();
                turns_charge(t, u, worked_of(t, now - before));
                before = now;
        }
        return turns_wanted(t);
}
