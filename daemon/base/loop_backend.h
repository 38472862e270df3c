/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_LOOP_BACKEND_H
#define KVD_DAEMON_BASE_LOOP_BACKEND_H

/* How loop.c waits for events: implemented by loop_uring.c and loop_epoll.c. */

#include <stdbool.h>
#include <stdint.h>

struct loop;

/*
 * Low half: number of the watch. High half: its generation, which identifies events of a source
 * that was removed meanwhile.
 */
typedef uint64_t loop_token;

struct loop_backend {
        const char *name;
        bool one_shot; /* an event disarms its source, which is armed again after its callback */
        int (*open)(uint32_t max_sources, void **ret);
        void (*close)(void *self);
        int (*arm)(void *self, int fd, short events, loop_token token);
        void (*disarm)(void *self, int fd, loop_token token);
        /*
         * Calls loop_ready for each event. timeout_ns < 0: no limit. Returns the number of events,
         * or a negative errno.
         */
        int (*wait)(void *self, struct loop *loop, int64_t timeout_ns);
};

extern const struct loop_backend loop_backend_io_uring;
extern const struct loop_backend loop_backend_epoll;

/* Called by wait when there are events, before the first loop_ready. */
void loop_woke(struct loop *loop);
void loop_ready(struct loop *loop, loop_token token, short revents);

#endif
