/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_GPU_CLEAR_H
#define KVD_DAEMON_GPU_CLEAR_H

/*
 * GPU memory before the first client comes, and memory that comes late. Nobody is let in before there is memory for
 * him: all of it is cleared first, by a worker that has yet to start, and that may find no context to do it with. What
 * the driver does not give at the start, because clients of the daemon before this one still have it mapped, comes when
 * they have noticed.
 */

#include "daemon/daemon.h"
#include "daemon/exporter.h"
#include "daemon/loop.h"
#include "daemon/work.h"

struct gpu_clear {
        struct loop *loop;
        struct store *store;
        struct work *work;
        struct exporter *exporter; /* NULL: the driver gives descriptors, and the worker clears */
        struct loop_timer look, missing, deadline;
};

/* Runs the loop until the pool is clear, or loop_quit. Negative: it cannot be cleared (why). */
int gpu_clear_wait(struct gpu_clear *clear, char why[static DAEMON_WHY]);

#endif
