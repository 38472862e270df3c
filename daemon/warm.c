/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/warm.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/log.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define DEADLINE_NS UINT64_C(30000000000)
#define LOOK_NS UINT64_C(2000000)
#define MISSING_NS UINT64_C(1000000000)
#define MOST_FAILURES 3u

/* For as long as the daemon lives. */
static void look_for_missing(struct loop_timer *timer) {
        struct warm *w = container_of(timer, struct warm, missing);
        uint32_t n = store_make_missing(w->store);

        if (n)
                log_limited(LOG_WARNING, "%u segments of the pool have no memory: %s", n, store_why(w->store));
        hold_look(w->hold);
        loop_timer_set(w->loop, timer, sys_now_ns() + MISSING_NS);
}

static uint32_t failures(const struct warm *w) {
        return w->hold ? hold_failures(w->hold) : work_clear_failures(w->work);
}

static void look(struct loop_timer *timer) {
        struct warm *w = container_of(timer, struct warm, look);
        struct store_clears clears;

        store_clears(w->store, &clears);
        if (clears.dirty && failures(w) < MOST_FAILURES)
                loop_timer_set(w->loop, timer, sys_now_ns() + LOOK_NS);
        else
                loop_quit(w->loop);
}

static void too_late(struct loop_timer *timer) {
        loop_quit(container_of(timer, struct warm, deadline)->loop);
}

static int run(struct warm *w) {
        int r;

        w->look.fire = look;
        w->missing.fire = look_for_missing;
        w->deadline.fire = too_late;
        loop_timer_set(w->loop, &w->look, 0);
        loop_timer_set(w->loop, &w->missing, sys_now_ns() + MISSING_NS);
        loop_timer_set(w->loop, &w->deadline, sys_now_ns() + DEADLINE_NS);
        work_look(w->work);
        hold_look(w->hold);
        r = loop_run(w->loop);
        loop_timer_stop(&w->look);
        loop_timer_stop(&w->deadline);
        return r;
}

int warm_up(struct warm *w, char why[static DAEMON_WHY]) {
        int r = run(w);
        struct store_clears clears;

        store_clears(w->store, &clears);
        if (r < 0) {
                snprintf(why, DAEMON_WHY, "waiting for events failed: %s", strerror(-r));
                return r;
        }
        if (clears.dirty && !clears.clean) {
                snprintf(why, DAEMON_WHY, "the GPU's memory cannot be made and cleared: %s; see kvd(8), or set "
                         "backend = host", w->hold ? hold_why(w->hold) : work_clear_why(w->work));
                return -EIO;
        }
        log_info("%u segments of GPU memory are ready, %u are not", clears.clean, clears.dirty + clears.missing);
        return 0;
}
