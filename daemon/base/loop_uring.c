/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Waits with io_uring: a one-shot poll per source. All sources are armed by the system call that
 * waits; only cancelling takes a call of its own. io_uring is not called through sys: tests disable
 * it with loop = epoll or a seccomp filter.
 */

#include <errno.h>
#include <liburing.h>
#include <poll.h>

#include "daemon/base/loop_backend.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define TOKEN_IGNORED UINT64_MAX /* of requests whose result is ignored */
#define MAX_ENTRIES 1024u        /* a full queue is submitted early */

struct waiter {
        struct io_uring ring;
};

/* COOP_TASKRUN (Linux 5.19): completions wait for our next system call, without an interrupt. */
static int waiter_open(uint32_t max_sources, void **ret) {
        _cleanup_(freep) struct waiter *w = NULL;
        unsigned entries = (unsigned)MIN(pow2_up(max_sources), MAX_ENTRIES);
        int r;

        w = sys->calloc(1, sizeof *w);
        if (!w)
                return -ENOMEM;
        r = io_uring_queue_init(entries, &w->ring, IORING_SETUP_COOP_TASKRUN);
        if (r == -EINVAL)
                r = io_uring_queue_init(entries, &w->ring, 0);
        if (r < 0)
                return r;
        *ret = STEAL(w);
        return 0;
}

static void waiter_close(void *self) {
        struct waiter *w = self;

        io_uring_queue_exit(&w->ring);
        free(w);
}

static struct io_uring_sqe *next_entry(struct waiter *w) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&w->ring);

        if (sqe || io_uring_submit(&w->ring) < 0)
                return sqe;
        return io_uring_get_sqe(&w->ring);
}

static int arm(void *self, int fd, short events, loop_token token) {
        struct io_uring_sqe *sqe = next_entry(self);

        if (!sqe)
                return -EBUSY;
        io_uring_prep_poll_add(sqe, fd, (unsigned)events);
        io_uring_sqe_set_data64(sqe, token);
        return 0;
}

/*
 * A pending poll keeps the file open, and the peer would not see the connection end. So cancel it
 * at once: then the close that follows, in whichever thread, is the last one.
 */
static void disarm(void *self, int fd, loop_token token) {
        struct waiter *w = self;
        struct io_uring_sqe *sqe = next_entry(w);

        if (!sqe)
                return;
        io_uring_prep_poll_remove(sqe, token);
        io_uring_sqe_set_data64(sqe, TOKEN_IGNORED);
        io_uring_submit(&w->ring);
}

/*
 * Copies a batch of completions before it handles them: callbacks may arm sources, and the
 * completions of these belong to the next turn.
 */
static int deliver(struct waiter *w, struct loop *loop) {
        struct io_uring_cqe *cqes[64];
        struct {
                loop_token token;
                int result;
        } events[ARRAY_SIZE(cqes)];
        unsigned n = io_uring_peek_batch_cqe(&w->ring, cqes, ARRAY_SIZE(cqes));
        int delivered = 0;

        for (unsigned i = 0; i < n; i++) {
                events[i].token = cqes[i]->user_data;
                events[i].result = cqes[i]->res;
        }
        io_uring_cq_advance(&w->ring, n);
        if (n > 0)
                loop_woke(loop);
        for (unsigned i = 0; i < n; i++) {
                if (events[i].token == TOKEN_IGNORED || events[i].result == -ECANCELED)
                        continue;
                loop_ready(loop, events[i].token,
                           events[i].result < 0 ? POLLERR : (short)events[i].result);
                delivered++;
        }
        return delivered;
}

static int wait_events(void *self, struct loop *loop, int64_t timeout_ns) {
        struct waiter *w = self;
        struct __kernel_timespec ts = {.tv_sec = timeout_ns / 1000000000,
                                       .tv_nsec = timeout_ns % 1000000000};
        struct io_uring_cqe *first;
        int r;

        if (timeout_ns == 0)
                r = io_uring_submit_and_get_events(&w->ring);
        else
                r = io_uring_submit_and_wait_timeout(&w->ring, &first, 1,
                                                     timeout_ns < 0 ? NULL : &ts, NULL);
        if (r < 0 && r != -ETIME && r != -EINTR && r != -EAGAIN && r != -EBUSY)
                return r;
        return deliver(w, loop);
}

const struct loop_backend loop_backend_io_uring = {
        .name = "io_uring",
        .one_shot = true,
        .open = waiter_open,
        .close = waiter_close,
        .arm = arm,
        .disarm = disarm,
        .wait = wait_events,
};
