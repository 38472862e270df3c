/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Dispatches the owner's messages. A message with an unknown number ends the worker; the owner then
 * starts a new one from its own program file.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "daemon/base/log.h"
#include "daemon/process/child_end.h"
#include "daemon/process/worker/main.h"
#include "daemon/process/worker/rests.h"
#include "ipc/base/sys.h"

#define NICE 10

struct process {
        struct spaces spaces;
        struct task task; /* model: has what all tasks share */
        struct rests rests;
        uint8_t result[RESULT_BYTES];
};

/* ---- start ----------------------------------------------------------------------------------- */

/* Gives inference priority, and makes the worker a preferred victim if memory runs out. */
static void step_back(void) {
        int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

        setpriority(PRIO_PROCESS, 0, NICE);
        if (fd < 0)
                return;
        if (write(fd, "500", 3) < 0) {
                /* the inherited OOM score stays */
        }
        close(fd);
}

static struct process *worker; /* lives as long as the process */

static int worker_new(uint32_t threads) {
        worker = sys->calloc(1, sizeof *worker);
        if (!worker)
                return -ENOMEM;
        worker->task = (struct task){.ops = kvd_ops_pick(NULL), .result = worker->result};
        return threads_new(threads, &worker->task.threads);
}

/* ---- messages -------------------------------------------------------------------------------- */

static void do_job(struct process *w, const struct kvd_msg *m, struct kvd_msg *reply) {
        int r = rests_do(&w->rests, &w->task, &w->spaces, m->work.bytes);

        reply->work_reply.id = m->work.id;
        reply->work_reply.more = r == RESTS_MORE;
        reply->work_reply.busy_us = device_take_busy_us(&w->spaces.device);
        reply->work_reply.error = (uint32_t)(r < 0 ? -r : 0);
        if (r == RESTS_MORE)
                return;
        if (r == 0)
                reply->work_reply.result = (struct kvd_slice){w->result, w->task.result_size};
        else
                log_limited(LOG_WARNING, "worker %d: a job was refused: %s", getpid(),
                            w->task.why.line);
}

/* 0, a negative errno with spaces.why set, or -ENOSYS: no message for a worker. */
static int handle(struct process *w, const struct kvd_msg *m, const struct kvd_fds *fds,
                  struct kvd_msg *reply) {
        switch (m->number) {
        case KVD_MSG_work_space: return spaces_map(&w->spaces, &m->work_space, fds);
        case KVD_MSG_work_segments: return spaces_map_segments(&w->spaces, &m->work_segments, fds);
        case KVD_MSG_work_sketch: return spaces_map_sketch(&w->spaces, &m->work_sketch, fds);
        case KVD_MSG_work_unmap: return spaces_unmap_segment(&w->spaces, &m->work_unmap);
        case KVD_MSG_work_clear: return spaces_clear(&w->spaces, &m->work_clear, fds);
        case KVD_MSG_work_wake: return spaces_wake(&w->spaces, &m->work_wake, fds);
        case KVD_MSG_work_forget:
                rests_forget(&w->rests, m->work_forget.space);
                return spaces_forget(&w->spaces, m->work_forget.space);
        case KVD_MSG_work: do_job(w, m, reply); return 0;
        default: return -ENOSYS;
        }
}

static int answer(const struct kvd_msg *question, struct kvd_fds *fds, struct kvd_msg *reply,
                  struct kvd_why *why) {
        int r = handle(worker, question, fds, reply);
        const struct worker_device *broken = spaces_broken(&worker->spaces);

        if (r == -ENOSYS)
                return ENOSYS;
        if (broken) { /* for good: the next worker makes a new context */
                log_error("worker %d: the GPU fails: %s", getpid(), broken->why.line);
                return EIO;
        }
        if (r < 0)
                *why = worker->spaces.why;
        return r;
}

int worker_main(int argc, char **argv) {
        int r = asked_begin("kvd-worker", "--worker", "worker process");

        if (r)
                return r;
        step_back();
        r = worker_new(argc > 2 ? (uint32_t)atoi(argv[2]) : 1);
        if (r == 0)
                return asked_serve(answer);
        log_error("worker %d ends: %s", getpid(), strerror(-r));
        return 2;
}
