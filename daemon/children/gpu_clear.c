/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs the loop for the first time, before there is a listening socket, until the pool is clear or
 * cannot be cleared. Afterwards one timer keeps running: once a second it tries again to allocate
 * memory that the driver did not supply.
 */

#include "daemon/children/gpu_clear.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/log.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define DEADLINE_NS UINT64_C(30000000000)
#define LOOK_NS UINT64_C(2000000)
#define MISSING_NS UINT64_C(1000000000)
#define MOST_FAILURES 3u

/* Fires once a second for as long as the daemon lives. */
static void look_for_missing(struct loop_timer *timer) {
        struct gpu_clear *g = container_of(timer, struct gpu_clear, missing);
        uint32_t n = store_make_missing(g->store);

        if (n)
                log_limited(LOG_WARNING, "%u segments of the pool have no memory: %s", n,
                            store_why(g->store));
        child_look(g->child);
        loop_timer_set(g->loop, timer, sys_now_ns() + MISSING_NS);
}

static void look(struct loop_timer *timer) {
        struct gpu_clear *g = container_of(timer, struct gpu_clear, look);
        struct store_clears clears;

        store_clears(g->store, &clears);
        if (clears.dirty && g->child->failures < MOST_FAILURES)
                loop_timer_set(g->loop, timer, sys_now_ns() + LOOK_NS);
        else
                loop_quit(g->loop);
}

static void too_late(struct loop_timer *timer) {
        loop_quit(container_of(timer, struct gpu_clear, deadline)->loop);
}

static int run(struct gpu_clear *g) {
        int r;

        g->look.fire = look;
        g->missing.fire = look_for_missing;
        g->deadline.fire = too_late;
        loop_timer_set(g->loop, &g->look, 0);
        loop_timer_set(g->loop, &g->missing, sys_now_ns() + MISSING_NS);
        loop_timer_set(g->loop, &g->deadline, sys_now_ns() + DEADLINE_NS);
        child_look(g->child);
        r = loop_run(g->loop);
        loop_timer_stop(&g->look);
        loop_timer_stop(&g->deadline);
        return r;
}

int gpu_clear_wait(struct gpu_clear *g, struct kvd_why *why) {
        int r = run(g);
        struct store_clears clears;

        store_clears(g->store, &clears);
        if (r < 0)
                return kvd_refuse(why, r, "waiting for events failed: %s", strerror(-r));
        if (clears.dirty && !clears.clean)
                return kvd_refuse(why, -EIO,
                                  "the GPU's memory cannot be allocated and cleared: %s; see "
                                  "kvd(8), or set backend = host",
                                  child_why(g->child));
        log_info("%u segments of GPU memory are ready, %u are not", clears.clean,
                 clears.dirty + clears.missing);
        return 0;
}
