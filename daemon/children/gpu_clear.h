/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_GPU_CLEAR_H
#define KVD_DAEMON_CHILDREN_GPU_CLEAR_H

/*
 * Has GPU memory cleared before the first client connects, and allocates memory that comes late.
 * The worker that clears it is yet to be started, and may not get a context. The driver may not
 * supply all memory at the start, because clients of the previous daemon still have it mapped; it
 * becomes available when they have noticed.
 */

#include "daemon/base/loop.h"
#include "daemon/children/child.h"
#include "ipc/base/why.h"
#include "store/store.h"

struct gpu_clear {
        struct loop *loop;
        struct store *store;
        /* the worker, which clears memory, or the exporter, which allocates cleared memory */
        struct child *child;
        struct loop_timer look, missing, deadline;
};

/*
 * Runs the loop until the pool is clear, clearing fails, or 30 seconds have passed. Negative: no
 * memory could be cleared (why).
 */
int gpu_clear_wait(struct gpu_clear *clear, struct kvd_why *why);

#endif
