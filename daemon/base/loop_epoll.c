/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Waits with epoll, where io_uring is forbidden. On Linux, the POLL and EPOLL constants for the
 * events in use are equal, so a source's events are passed on unchanged.
 */

#include <errno.h>
#include <limits.h>
#include <sys/epoll.h>

#include "daemon/base/loop_backend.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

struct waiter {
        int fd;
};

static int waiter_open(uint32_t max_sources, void **ret) {
        struct waiter *w = sys->calloc(1, sizeof *w);

        if (!w)
                return -ENOMEM;
        w->fd = sys->epoll_create();
        if (w->fd < 0) {
                free(w);
                return negative_errno();
        }
        *ret = w;
        return 0;
}

static void waiter_close(void *self) {
        struct waiter *w = self;

        close(w->fd);
        free(w);
}

static int arm(void *self, int fd, short events, loop_token token) {
        struct waiter *w = self;
        struct epoll_event event = {.events = (uint32_t)events, .data.u64 = token};

        return sys->epoll_ctl(w->fd, EPOLL_CTL_ADD, fd, &event) < 0 ? negative_errno() : 0;
}

static void disarm(void *self, int fd, loop_token token) {
        struct waiter *w = self;
        struct epoll_event event = {0};

        /* an error does not matter: a removed source is closed next, which has the same effect */
        sys->epoll_ctl(w->fd, EPOLL_CTL_DEL, fd, &event);
}

/* Rounded up: waking before the timer is due would make the loop spin. */
static int milliseconds(int64_t ns) {
        return ns < 0 ? -1 : (int)MIN(DIV_UP(ns, 1000000), (int64_t)INT_MAX);
}

static int wait_events(void *self, struct loop *loop, int64_t timeout_ns) {
        struct waiter *w = self;
        struct epoll_event events[64];
        int n;

        n = sys->epoll_wait(w->fd, events, ARRAY_SIZE(events), milliseconds(timeout_ns));
        if (n < 0)
                return errno == EINTR ? 0 : negative_errno();
        if (n > 0)
                loop_woke(loop);
        for (int i = 0; i < n; i++)
                loop_ready(loop, events[i].data.u64, (short)events[i].events);
        return n;
}

const struct loop_backend loop_backend_epoll = {
        .name = "epoll",
        .open = waiter_open,
        .close = waiter_close,
        .arm = arm,
        .disarm = disarm,
        .wait = wait_events,
};
