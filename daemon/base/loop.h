/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_LOOP_H
#define KVD_DAEMON_BASE_LOOP_H

/*
 * One thread waits for descriptors and timers. Sources and timers are embedded in their owners; the
 * loop allocates memory only in loop_new.
 */

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/list.h"

struct loop;

enum loop_kind { LOOP_AUTO, LOOP_IO_URING, LOOP_EPOLL };

/*
 * LOOP_AUTO: io_uring, or epoll where io_uring is not available. max_sources: maximum number of
 * sources at the same time.
 */
int loop_new(enum loop_kind kind, uint32_t max_sources, struct loop **ret);
struct loop *loop_free(struct loop *loop);
void loop_freep(struct loop **loop);
const char *loop_name(const struct loop *loop);

/* Runs until loop_quit; 0, or a negative errno when waiting itself fails. */
int loop_run(struct loop *loop);
void loop_quit(struct loop *loop);

/* ---- descriptors ----------------------------------------------------------------------------- */

struct loop_source {
        int fd;
        short events; /* POLLIN, POLLOUT */
        void (*ready)(struct loop_source *source, short revents);
        struct loop *loop; /* the loop's fields from here on; NULL: not added */
        uint32_t watch;
};

/*
 * ready is called once a turn as long as the descriptor is ready. It may remove any source,
 * including its own.
 */
int loop_add(struct loop *loop, struct loop_source *source);
int loop_change(struct loop_source *source, short events);
/* Call it before closing the descriptor. A source that was not added is fine. */
void loop_remove(struct loop_source *source);

/*
 * Stops calls of ready until loop_release, for a source that must wait for its turn.
 */
void loop_hold(struct loop_source *source);
int loop_release(struct loop_source *source);

/* ---- time ------------------------------------------------------------------------------------ */

struct loop_timer {
        void (*fire)(struct loop_timer *timer);
        uint64_t at_ns;
        struct kvd_list_node node; /* in the loop's list */
};

/* fire is called once, at at_ns (CLOCK_MONOTONIC) or soon after. Setting it again moves it. */
void loop_timer_set(struct loop *loop, struct loop_timer *timer, uint64_t at_ns);
void loop_timer_stop(struct loop_timer *timer);

static inline bool loop_timer_is_set(const struct loop_timer *timer) {
        return timer->node.in;
}

/* ---- work ------------------------------------------------------------------------------------ */

/*
 * work is called in every turn, after ready sources and due timers. If it returns true, the next
 * turn does not wait.
 */
void loop_set_work(struct loop *loop, bool (*work)(void *data), void *data);

/*
 * After loop_want_idle, idle is called whenever there is nothing else to do, until it returns
 * false. If the loop is always busy, idle gets a fifth of the time.
 */
void loop_set_idle(struct loop *loop, bool (*idle)(void *data), void *data);
void loop_want_idle(struct loop *loop);

/* The longest time that the loop took from one wait to the next: ever, and in the last minute. */
uint64_t loop_turn_max_ns(const struct loop *loop);
uint64_t loop_turn_recent_ns(const struct loop *loop);

#endif
