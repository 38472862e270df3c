/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_GPU_CLEAR_H
#define KVD_DAEMON_CHILDREN_GPU_CLEAR_H

/*
 * GPU memory before the first client comes, and memory that comes late. All memory is cleared
 * before a client is let in, by a worker that has yet to start and may find no context to do it
 * with. The driver may not give all of it at the start, because clients of the daemon before this
 * one still have it mapped: it comes when they have noticed.
 */

#include "daemon/base/loop.h"
#include "daemon/children/child.h"
#include "ipc/base/why.h"
#include "store/store.h"

struct gpu_clear {
        struct loop *loop;
        struct store *store;
        /* the worker, which clears memory, or the exporter, which makes it clear */
        struct child *child;
        struct loop_timer look, missing, deadline;
};

/* Runs the loop until the pool is clear, or loop_quit. Negative: it cannot be cleared (why). */
int gpu_clear_wait(struct gpu_clear *clear, struct kvd_why *why);

#endif
