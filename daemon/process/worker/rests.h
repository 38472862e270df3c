/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_RESTS_H
#define KVD_DAEMON_PROCESS_WORKER_RESTS_H

/*
 * Long jobs pause, so that others get their turns (task_spend, task_share). This holds the jobs
 * that were begun, and begins, resumes and cancels them.
 */

#include "daemon/process/worker/task.h"

struct rests {
        struct resting *first; /* owned; jobs that were begun and are not done */
};

/*
 * Begins, resumes or cancels the job in the arguments (job->turn), and returns when it ends or
 * pauses. model: has what all tasks share; it gets the result, or why. RESTS_MORE if the job
 * pauses, 0, or a negative errno.
 */
#define RESTS_MORE 1
int rests_do(struct rests *rests, struct task *model, struct spaces *spaces, uint64_t bytes);
void rests_forget(struct rests *rests, uint32_t space); /* cancels all jobs of that space */

#endif
