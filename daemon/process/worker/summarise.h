/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_SUMMARISE_H
#define KVD_DAEMON_PROCESS_WORKER_SUMMARISE_H

/*
 * SUMMARISE on the processor and on the GPU share the channels of a space's labels, which are
 * chosen once (job_summarise.c).
 */

#include "daemon/process/worker/task.h"

/* Are the channels of all heads chosen? */
bool summary_has_channels(const struct task *task);

/*
 * Chooses channels for the heads that have none, on the processor, from the job's blocks
 * (task_block). 0 or -ENOMEM.
 */
int summary_choose_channels(struct task *task);

/* SUMMARISE on the GPU. -ENOSYS: the GPU cannot do it, and no row was touched. */
int summarise_on_device(struct task *task);

#endif
