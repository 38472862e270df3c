/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_SUMMARISE_H
#define KVD_DAEMON_PROCESS_WORKER_SUMMARISE_H

/*
 * Both ways to SUMMARISE share the channels of a space's labels, which are chosen once
 * (job_summarise.c).
 */

#include "daemon/process/worker/task.h"

/* Have all heads theirs? */
bool summary_has_channels(const struct task *task);

/*
 * Chooses for the heads that have none, by the processor, from what task_block finds of the job's
 * blocks. 0 or -ENOMEM.
 */
int summary_choose_channels(struct task *task);

/* SUMMARISE by the GPU. -ENOSYS: not in this way, and nothing was done. */
int summarise_on_device(struct task *task);

#endif
