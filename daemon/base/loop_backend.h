/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_LOOP_BACKEND_H
#define KVD_DAEMON_BASE_LOOP_BACKEND_H

/* A way of waiting, as loop.c needs it: loop_uring.c and loop_epoll.c are two. */

#include <stdbool.h>
#include <stdint.h>

struct loop;

/*
 * A watch's number in the low, its generation in the high half: an event of a source removed since
 * is recognised.
 */
typedef uint64_t loop_token;

struct loop_backend {
        const char *name;
        bool one_shot; /* an event disarms its source: arm again after it was handled */
        int (*open)(uint32_t max_sources, void **ret);
        void (*close)(void *self);
        int (*arm)(void *self, int fd, short events, loop_token token);
        void (*disarm)(void *self, int fd, loop_token token);
        /*
         * Calls loop_ready for each event; timeout_ns < 0: no limit. Returns how many, or a
         * negative errno.
         */
        int (*wait)(void *self, struct loop *loop, int64_t timeout_ns);
};

extern const struct loop_backend loop_backend_io_uring;
extern const struct loop_backend loop_backend_epoll;

/* waiting is over and something has happened: called before the first event */
void loop_woke(struct loop *loop);
void loop_ready(struct loop *loop, loop_token token, short revents);

#endif
