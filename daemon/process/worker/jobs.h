/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_JOBS_H
#define KVD_DAEMON_PROCESS_WORKER_JOBS_H

/* The kinds of jobs that the worker does (jobs.def), and doing one. */

#include "daemon/process/worker/task.h"

struct job_kind {
        const char *name;
        enum task_access access;          /* to the blocks that its items name */
        int (*call)(struct task *);       /* by the processor */
        int (*on_device)(struct task *);  /* by the GPU; -ENOSYS, and NULL: by the processor */
};

#define KVD_JOB_KIND(number, name) extern const struct job_kind job_##name;
#include "daemon/process/worker/jobs.def"
#undef KVD_JOB_KIND

/* Does task->job, of so many bytes. 0, or a negative errno and one line in task->why. */
int job_run(struct task *task, struct spaces *spaces, uint64_t bytes);

#endif
