/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_RESTS_H
#define KVD_DAEMON_PROCESS_WORKER_RESTS_H

/*
 * Jobs that take long rest, so that others have their turns (task_spend, task_share): those that
 * were begun, and doing one, or the next piece of one.
 */

#include "daemon/process/worker/task.h"

struct rests {
        struct resting *first; /* owned; jobs that were begun and are not done */
};

/*
 * A piece of the job that lies in the arguments. model: what every task has; it gets the result, or
 * the line that says why there is none. RESTS_MORE: it rests. 0, or a negative errno.
 */
#define RESTS_MORE 1
int rests_do(struct rests *rests, struct task *model, struct spaces *spaces, uint64_t bytes);
void rests_forget(struct rests *rests, uint32_t space); /* all that were begun of that space */

#endif
