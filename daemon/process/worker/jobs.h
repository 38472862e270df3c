/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_JOBS_H
#define KVD_DAEMON_PROCESS_WORKER_JOBS_H

/* The kinds of jobs that the worker does (methods.def), and the function that runs a job. */

#include "daemon/process/worker/task.h"

struct job_kind {
        const char *name;
        enum task_access access;         /* to the blocks that its items name */
        int (*call)(struct task *);      /* on the processor */
        int (*on_device)(struct task *); /* on the GPU; if NULL or -ENOSYS, call is used instead */
};

#define KVD_JOB_KIND(NAME, name, number) extern const struct job_kind job_##name;
#include "ipc/base/methods.def"

/* Runs task->job, whose arguments have `bytes` bytes. 0, or a negative errno with task->why set. */
int job_run(struct task *task, struct spaces *spaces, uint64_t bytes);

#endif
