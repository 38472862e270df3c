/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gpu_clear.h"

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
        struct gpu_clear *w = container_of(timer, struct gpu_clear, missing);
        uint32_t n = store_make_missing(w->store);

        if (n)
                log_limited(LOG_WARNING, "%u segments of the pool have no memory: %s", n, store_why(w->store));
        exporter_look(w->exporter);
        loop_timer_set(w->loop, timer, sys_now_ns() + MISSING_NS);
}

static uint32_t failures(const struct gpu_clear *w) {
        return w->exporter ? exporter_failures(w->exporter) : work_clear_failures(w->work);
}

static void look(struct loop_timer *timer) {
        struct gpu_clear *w = container_of(timer, struct gpu_clear, look);
        struct store_clears clears;

        store_clears(w->store, &clears);
        if (clears.dirty && failures(w) < MOST_FAILURES)
                loop_timer_set(w->loop, timer, sys_now_ns() + LOOK_NS);
        else
                loop_quit(w->loop);
}

static void too_late(struct loop_timer *timer) {
        loop_quit(container_of(timer, struct gpu_clear, deadline)->loop);
}

static int run(struct gpu_clear *w) {
        int r;

        w->look.fire = look;
        w->missing.fire = look_for_missing;
        w->deadline.fire = too_late;
        loop_timer_set(w->loop, &w->look, 0);
        loop_timer_set(w->loop, &w->missing, sys_now_ns() + MISSING_NS);
        loop_timer_set(w->loop, &w->deadline, sys_now_ns() + DEADLINE_NS);
        work_look(w->work);
        exporter_look(w->exporter);
        r = loop_run(w->loop);
        loop_timer_stop(&w->look);
        loop_timer_stop(&w->deadline);
        return r;
}

int gpu_clear_wait(struct gpu_clear *w, char why[static DAEMON_WHY]) {
        int r = run(w);
        struct store_clears clears;

        store_clears(w->store, &clears);
        if (r < 0) {
                snprintf(why, DAEMON_WHY, "waiting for events failed: %s", strerror(-r));
                return r;
        }
        if (clears.dirty && !clears.clean) {
                snprintf(why, DAEMON_WHY, "the GPU's memory cannot be made and cleared: %s; see kvd(8), or set "
                         "backend = host", w->exporter ? exporter_why(w->exporter) : work_clear_why(w->work));
                return -EIO;
        }
        log_info("%u segments of GPU memory are ready, %u are not", clears.clean, clears.dirty + clears.missing);
        return 0;
}
