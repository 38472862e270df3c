/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each job has a thread of its own, which hands control to the caller when the job pauses, and gets
 * it back when the job is resumed. Only one of all these threads runs at a time. A cancelled job
 * jumps back to where it began; this leaks nothing, since its rooms are all that it owns.
 */

#include "daemon/process/worker/rests.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/process/worker/jobs.h"
#include "ipc/base/sys.h"

struct resting {
        struct resting *next;
        struct task task;
        struct spaces *spaces;
        struct worker_device *device;  /* that the job uses; NULL if none */
        struct device_buffers buffers; /* while it is paused */
        uint64_t bytes;
        pthread_t thread;
        pthread_mutex_t lock;
        pthread_cond_t changed;
        bool theirs; /* the job's thread runs, not the caller's */
        bool done, stop;
        int r;
        jmp_buf end;
        uint8_t result[RESULT_BYTES];
        _Alignas(struct kvd_job) uint8_t arguments[]; /* a copy: the owner reuses the original */
};

/* ---- turns ----------------------------------------------------------------------------------- */

static void wait_for(struct resting *j, bool theirs) {
        while (!j->done && j->theirs != theirs)
                pthread_cond_wait(&j->changed, &j->lock);
}

/* Lets the other thread run. Returns when it has handed control back, or the job is done. */
static void hand_over(struct resting *j, bool theirs) {
        pthread_mutex_lock(&j->lock);
        j->theirs = theirs;
        pthread_cond_signal(&j->changed);
        wait_for(j, !theirs);
        pthread_mutex_unlock(&j->lock);
}

static void finish(struct resting *j) {
        pthread_mutex_lock(&j->lock);
        j->done = true;
        pthread_cond_signal(&j->changed);
        pthread_mutex_unlock(&j->lock);
}

static int do_job(struct resting *j) {
        int r = j->device ? device_enter(j->device) : 0;

        if (r < 0)
                return task_refuse(&j->task, r, "%s", j->device->why.line);
        if (setjmp(j->end) == 0)
                j->r = job_run(&j->task, j->spaces, j->bytes);
        if (j->device)
                device_leave(j->device);
        return j->r;
}

static void *run(void *data) {
        struct resting *j = data;

        pthread_mutex_lock(&j->lock);
        wait_for(j, true);
        pthread_mutex_unlock(&j->lock);
        j->r = do_job(j);
        task_leave(&j->task);
        finish(j);
        return NULL;
}

static void rest(struct resting *j) {
        if (j->device && !device_put_aside(j->device, &j->buffers))
                return;
        hand_over(j, false);
        if (j->device)
                device_take_back(j->device, &j->buffers);
        if (j->stop)
                longjmp(j->end, 1);
}

void task_spend(struct task *task, uint64_t bytes) {
        struct resting *j = container_of(task, struct resting, task);

        task->spent += MIN(bytes, UINT64_MAX - task->spent);
        if (!task->job->piece || task->spent < task->job->piece)
                return;
        task->spent = 0;
        rest(j);
}

#define LAUNCH_MOST (UINT64_C(1) << 30)
#define LAUNCH_PIECES 16u /* a GPU does so many in the time that a processor needs for one */

uint64_t task_launch_bytes(const struct task *task) {
        uint64_t piece = task->job->piece;

        return piece ? MIN(piece, LAUNCH_MOST / LAUNCH_PIECES) * LAUNCH_PIECES : LAUNCH_MOST;
}

struct slice {
        threads_piece *piece;
        void *data;
        uint32_t first;
};

static void do_slice(void *data, uint32_t i, uint32_t thread) {
        struct slice *s = data;

        s->piece(s->data, s->first + i, thread);
}

void task_share(struct task *task, uint32_t n, uint64_t bytes, threads_piece *piece, void *data) {
        struct slice s = {piece, data, 0};

        while (s.first < n) {
                uint64_t left = task->job->piece - MIN(task->spent, task->job->piece);
                uint32_t most = n - s.first;

                if (task->job->piece)
                        most = (uint32_t)MIN(most, MAX(left / MAX(bytes, 1), 1));
                threads_share(task->threads, most, do_slice, &s);
                s.first += most;
                task_spend(task, most * bytes);
        }
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static struct resting *find(const struct rests *rests, uint64_t id) {
        struct resting *j = rests->first;

        while (j && j->task.job->id != id)
                j = j->next;
        return j;
}

/* Its thread has ended, or was never started. */
static void job_free(struct resting *j) {
        pthread_mutex_destroy(&j->lock);
        pthread_cond_destroy(&j->changed);
        free(j);
}

static struct worker_device *device_of(struct spaces *spaces) {
        const struct worker_space *w = spaces_find(spaces, spaces->arguments->space);

        return w && w->ix->backend != KVD_BACKEND_HOST ? &spaces->device : NULL;
}

static struct resting *job_new(const struct task *model, struct spaces *spaces, uint64_t bytes) {
        struct resting *j = sys->calloc(1, sizeof *j + bytes);

        if (!j)
                return NULL;
        j->task = *model;
        j->task.result = j->result;
        j->task.job = memcpy(j->arguments, spaces->arguments, bytes);
        j->spaces = spaces;
        j->device = device_of(spaces);
        j->bytes = bytes;
        pthread_mutex_init(&j->lock, NULL);
        pthread_cond_init(&j->changed, NULL);
        return j;
}

static void take_out(struct rests *rests, struct resting *j) {
        struct resting **link = &rests->first;

        while (*link != j)
                link = &(*link)->next;
        *link = j->next;
}

static void stop(struct rests *rests, struct resting *j) {
        take_out(rests, j);
        j->stop = true;
        hand_over(j, true);
        pthread_join(j->thread, NULL);
        job_free(j);
}

void rests_forget(struct rests *rests, uint32_t space) {
        struct resting *next;

        for (struct resting *j = rests->first; j; j = next) {
                next = j->next;
                if (j->task.job->space == space)
                        stop(rests, j);
        }
}

/* Moves the result of a job that has ended to model. */
static int tell(struct resting *j, struct task *model) {
        int r = j->r;

        model->why = j->task.why;
        model->result_size = j->task.result_size;
        memcpy(model->result, j->result, model->result_size);
        job_free(j);
        return r;
}

/* Runs the job until it pauses (RESTS_MORE) or ends (its result). */
static int go_on(struct rests *rests, struct resting *j, struct task *model) {
        hand_over(j, true);
        if (!j->done)
                return RESTS_MORE;
        pthread_join(j->thread, NULL);
        take_out(rests, j);
        return tell(j, model);
}

static int begin(struct rests *rests, struct task *model, struct spaces *spaces, uint64_t bytes) {
        struct resting *j = job_new(model, spaces, bytes);

        if (!j)
                return task_refuse(model, -ENOMEM, "out of memory for a job");
        if (pthread_create(&j->thread, NULL, run, j) != 0) {
                job_free(j);
                return task_refuse(model, -EAGAIN, "no thread for a job");
        }
        j->next = rests->first;
        rests->first = j;
        return go_on(rests, j, model);
}

int rests_do(struct rests *rests, struct task *model, struct spaces *spaces, uint64_t bytes) {
        const struct kvd_job *job = spaces->arguments;
        struct resting *j;

        if (!job || bytes < sizeof *job || bytes > KVD_JOB_BYTES)
                return task_refuse(model, -EPROTO, "a job of %llu bytes",
                                   (unsigned long long)bytes);
        if (job->turn == KVD_JOB_BEGIN)
                return begin(rests, model, spaces, bytes);
        j = find(rests, job->id);
        if (!j)
                return task_refuse(model, -ESTALE, "a job that was not begun");
        if (job->turn == KVD_JOB_GO_ON)
                return go_on(rests, j, model);
        stop(rests, j);
        return task_refuse(model, -ECANCELED, "the job was cancelled");
}
