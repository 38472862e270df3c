/* SPDX-License-Identifier: Apache-2.0 */

/* The worker's part of the sixth method: its kind of jobs, and whether the worker knows it. */

#include <string.h>

#include "daemon/process/worker/jobs.h"
#include "tests/store/sixth/sixth.h"

static int look(struct task *task) {
        return task_results(task, task->job->n_results, sizeof(uint32_t)) ? 0 : -1;
}

const struct job_kind job_sixth = {.name = "sixth", .access = TASK_READ, .call = look};

/* A kind that it knows is refused only because its space was not sent. */
bool sixth_is_known(uint32_t kind) {
        static const struct spaces none;
        struct spaces spaces = none;
        struct kvd_job job = {.kind = kind};
        struct task task = {.job = &job};

        return job_run(&task, &spaces, sizeof job) < 0 && strstr(task.why.line, "was not sent");
}
