/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sends requests to the worker and handles its replies. The most urgent requests come first: to
 * unmap memory that others wait for, to wake streams that wait for a dead client, to clear GPU
 * memory, and then the store's jobs, each after the descriptors that it needs (worker_files.c).
 */

#include "daemon/children/worker_jobs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/degraded.h"
#include "daemon/base/log.h"
#include "daemon/children/worker_files.h"
#include "ipc/base/job.h"
#include "ipc/base/shared_file.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define MOST_PAUSE_NS UINT64_C(1000000000)
#define MOST_REST_NS UINT64_C(1000000000)

struct worker {
        struct child child;
        const struct config *config;
        struct store *store;
        bool on;
        char threads[16]; /* argument of its program */

        /* owned; KVD_JOB_BYTES of job arguments, which the worker maps read-only */
        struct shared_file arguments;
        /* owned; KVD_FRAME_MAX bytes: an aligned copy of a reply's result */
        uint8_t *result;
        struct worker_files files;

        struct loop_timer rest; /* if set: no jobs before it fires */
        bool has_job, job_lost;
        uint32_t job_space; /* number of the space, which may be deleted meanwhile */
        struct store_job job;
        uint32_t unmapping[2]; /* space and segment that it was asked to unmap */
        uint64_t jobs_done;
};

static struct worker *worker_of(const struct child *child) {
        return container_of(child, struct worker, child);
}

/* ---- jobs ------------------------------------------------------------------------------------ */

/* Needed without a worker, too: store_next_job writes to them. */
static int make_arguments(struct worker *w) {
        int r;

        if (w->arguments.at)
                return 0;
        r = shared_file_new("kvd-job", KVD_JOB_BYTES, SHARED_MAPPED | SHARED_TWIN, &w->arguments);
        closep(&w->arguments.fd); /* it is mapped, and only its read-only twin is sent */
        w->arguments.fd = -1;
        return r;
}

/* Without a worker, jobs that wait for one fail. */
static void refuse_jobs(struct worker *w) {
        uint64_t n = store_jobs_waiting(w->store);

        if (!n || make_arguments(w) < 0)
                return;
        while (n-- > 0 && store_next_job(w->store, w->arguments.at, &w->job)) {
                store_job_done(w->store, w->job.id, EOPNOTSUPP, NULL, 0);
                degraded_note(no_worker);
        }
        loop_want_idle(w->child.loop);
}

static void finish_job(struct worker *w, int error, struct kvd_slice result) {
        w->has_job = false;
        if (result.size)
                memcpy(w->result, result.data, result.size);
        store_job_done(w->store, w->job.id, error, w->result, result.size);
        /* idle work continues relief, and frees blocks without references */
        loop_want_idle(w->child.loop);
}

static void rested(struct loop_timer *timer) {
        child_look(&container_of(timer, struct worker, rest)->child);
}

/*
 * Processes get a GPU in turns, by time slices, whatever the priorities of their streams. So the
 * worker rests after its kernels, up to MOST_REST_NS, to use only its share of the time.
 */
static void rest(struct worker *w, uint64_t busy_us) {
        uint32_t share = w->config->worker_share;
        uint64_t ns = busy_us * 1000 * (100 - share) / share;

        w->rest.fire = rested;
        if (ns)
                loop_timer_set(w->child.loop, &w->rest, sys_now_ns() + MIN(ns, MOST_REST_NS));
}

static void job_done(struct worker *w, const struct kvd_msg_work_reply *m) {
        w->child.pause_ns = 0;
        rest(w, m->busy_us);
        if (m->more && !m->error) {
                w->has_job = false;
                store_job_rests(w->store, w->job.id);
                loop_want_idle(w->child.loop);
                return;
        }
        w->jobs_done++;
        finish_job(w, (int)m->error, m->result);
}

static bool take_job(struct worker *w) {
        if (!w->has_job) {
                w->has_job = store_next_job(w->store, w->arguments.at, &w->job);
                if (w->has_job)
                        w->job_space = space_number(w->job.space);
        }
        return w->has_job;
}

/* Sends files that the job needs, one message per call, and then the job. */
static int ask_for_job(struct worker *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work, .work = {w->job.id, w->job.bytes}};
        struct space *space = store_space_by_number(w->store, w->job_space);
        int r;

        if (!space)
                return -ESTALE;
        r = worker_files_send(&w->files, &w->child, space, w->job.sketch, w->arguments.fd_ro);
        return r ? r : child_ask(&w->child, &msg, NULL);
}

/* A job that cannot be sent to a working worker has failed. */
static bool do_job(struct worker *w) {
        int r;

        if (loop_timer_is_set(&w->rest) || !take_job(w))
                return false;
        r = ask_for_job(w);
        if (r == -EPIPE || r == -ECONNRESET || r == -EAGAIN)
                child_end(&w->child, "accepts no messages");
        else if (r < 0)
                finish_job(w, -r, (struct kvd_slice){0});
        return true;
}

/* Something that the job needs could not be mapped. The job fails; the next one sends it again. */
static void job_has_no_room(struct worker *w, uint32_t asked, const struct kvd_msg_error *error) {
        log_limited(LOG_WARNING, "worker %d has no room for a job: %.*s", w->child.pid,
                    (int)error->text.size, (const char *)error->text.data);
        if (asked == KVD_MSG_work_sketch)
                worker_files_forget_sketch(&w->files);
        if (asked == KVD_MSG_work_space || asked == KVD_MSG_work_segments)
                worker_files_forget(&w->files, w->job_space);
        if (w->has_job)
                finish_job(w, (int)error->code ?: EIO, (struct kvd_slice){0});
}

/* ---- memory to unmap ------------------------------------------------------------------------- */

static bool forget_space(struct worker *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_forget};

        if (!worker_files_deleted(&w->files, w->store, &msg.work_forget.space))
                return false;
        worker_files_forget(&w->files, msg.work_forget.space);
        return child_ask_or_end(&w->child, &msg, NULL);
}

/* GPU memory that no client has mapped any more, and host memory that is given up. */
static bool unmap_segment(struct worker *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_unmap};
        struct space *space;
        uint32_t segment;

        while (store_next_unmap(w->store, &space, &segment)) {
                if (!worker_files_unmap(&w->files, space_number(space), segment)) {
                        space_worker_unmapped(space, segment); /* this worker never had it */
                        continue;
                }
                w->unmapping[0] = msg.work_unmap.space = space_number(space);
                w->unmapping[1] = msg.work_unmap.segment = segment;
                return child_ask_or_end(&w->child, &msg, NULL);
        }
        return false;
}

static void unmapped(struct worker *w) {
        struct space *space = store_space_by_number(w->store, w->unmapping[0]);

        if (space)
                space_worker_unmapped(space, w->unmapping[1]);
}

/* ---- GPU memory of no space ------------------------------------------------------------------ */

static bool clear_memory(struct worker *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_clear};
        struct store_clear clear;
        struct kvd_fds fds = {.n = 0};

        if (!store_next_clear(w->store, &clear))
                return false;
        fds.n = clear.n;
        memcpy(fds.fd, clear.fds, clear.n * sizeof *clear.fds);
        msg.work_clear.count = clear.n;
        msg.work_clear.bytes = clear.bytes;
        msg.work_clear.device = (struct kvd_slice){clear.device, 16};
        return child_ask_or_end(&w->child, &msg, &fds);
}

/*
 * The worker may have no context, or no memory of its own. Clearing is retried later
 * (store_make_missing).
 */
static void memory_cleared(struct worker *w, const struct kvd_msg *m) {
        struct child *child = &w->child;

        if (m->number == KVD_MSG_error) {
                child_failed(child, m->error.text);
                log_limited(LOG_WARNING, "worker %d cannot clear GPU memory: %s", child->pid,
                            child_why(child));
                store_clear_failed(w->store);
                return;
        }
        child_worked(child);
        child->pause_ns = 0;
        store_clear_done(w->store, true);
        loop_want_idle(child->loop);
}

/* ---- streams that wait for a dead client ----------------------------------------------------- */

static bool wake_streams(struct worker *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_wake};
        struct store_wake wake;
        struct kvd_fds fds;

        if (!store_next_wake(w->store, &wake))
                return false;
        fds.fd[0] = wake.fd;
        fds.n = 1;
        msg.work_wake.device = (struct kvd_slice){wake.device, sizeof wake.device};
        msg.work_wake.bytes = wake.bytes;
        msg.work_wake.words = (struct kvd_slice){wake.words,
                                                 2 * wake.n * (uint32_t)sizeof *wake.words};
        return child_ask_or_end(&w->child, &msg, &fds);
}

/* If the worker cannot do it, the store's own write must do. */
static void streams_woken(struct worker *w, const struct kvd_msg *m) {
        if (m->number == KVD_MSG_error)
                log_limited(LOG_WARNING,
                            "worker %d cannot wake streams that wait for a dead client: %.*s",
                            w->child.pid, (int)m->error.text.size,
                            (const char *)m->error.text.data);
        store_wake_done(w->store, true);
        loop_want_idle(w->child.loop);
}

/* ---- its process ----------------------------------------------------------------------------- */

static bool wanted(struct child *child) {
        struct worker *w = worker_of(child);

        if (!w->on) {
                refuse_jobs(w);
                return false;
        }
        return store_jobs_waiting(w->store) || store_wants_clearing(w->store) ||
               store_wants_wake(w->store);
}

/* Frees all that the last worker used: its work on a GPU has run, or never will. */
static void lose_all(struct worker *w) {
        store_job_lost(w->store, w->job_lost ? w->job.id : 0);
        w->has_job = w->job_lost = false;
        store_wake_done(w->store, false);
        store_worker_gone(w->store);
        loop_want_idle(w->child.loop);
}

static uint32_t n_threads(const struct worker *w) {
        long processors = sysconf(_SC_NPROCESSORS_ONLN);

        return w->config->worker_threads ?: (uint32_t)MAX(processors / 2, 1);
}

/* With a GPU, a start ends the quarantine of a dead worker. */
static int prepare(struct child *child) {
        struct worker *w = worker_of(child);

        if (store_has_device(w->store))
                lose_all(w);
        snprintf(w->threads, sizeof w->threads, "%u", n_threads(w));
        memcpy(child->arguments, (char *[]){"kvd", "--worker", w->threads, NULL},
               4 * sizeof *child->arguments);
        return make_arguments(w);
}

/* The pause is at its longest after eight failed starts: jobs should not wait for more of them. */
static void not_started(struct child *child) {
        if (child->pause_ns == MOST_PAUSE_NS)
                refuse_jobs(worker_of(child));
}

static void ended(struct child *child, uint32_t asked) {
        struct worker *w = worker_of(child);

        if (asked == KVD_MSG_work_clear)
                child_failed(child,
                             kvd_slice_of("the worker ended while clearing memory; see the log"));
        worker_files_forget_all(&w->files);
        w->job_lost = w->has_job;
        if (store_has_device(w->store))
                child->pause_ns = MAX(child->pause_ns,
                                      w->config->quarantine_ms * UINT64_C(1000000));
        else
                lose_all(w);
}

static bool next(struct child *child) {
        struct worker *w = worker_of(child);

        child->patience_ns = w->config->worker_deadline * UINT64_C(1000000000);
        return forget_space(w) || unmap_segment(w) || wake_streams(w) || clear_memory(w) ||
               do_job(w);
}

static bool fits(const struct child *child, const struct kvd_msg *m) {
        return m->number != KVD_MSG_work_reply || m->work_reply.id == worker_of(child)->job.id;
}

static void answered(struct child *child, uint32_t asked, const struct kvd_msg *m) {
        struct worker *w = worker_of(child);

        if (asked == KVD_MSG_work_clear)
                memory_cleared(w, m);
        else if (asked == KVD_MSG_work_wake)
                streams_woken(w, m);
        else if (m->number == KVD_MSG_error)
                job_has_no_room(w, asked, &m->error);
        else if (asked == KVD_MSG_work_unmap)
                unmapped(w);
        else if (asked == KVD_MSG_work)
                job_done(w, &m->work_reply);
}

static const struct child_ops ops = {
        .name = "worker",
        .degraded = KVD_DEGRADED_worker,
        .wanted = wanted,
        .prepare = prepare,
        .not_started = not_started,
        .ended = ended,
        .next = next,
        .fits = fits,
        .answered = answered,
};

/* ---- life ------------------------------------------------------------------------------------ */

static void job_waits(void *data) {
        worker_look(data);
}

int worker_new(const struct config *config, struct loop *loop, struct store *store,
               struct worker **ret) {
        struct worker *w = sys->calloc(1, sizeof *w);
        int r;

        if (!w)
                return -ENOMEM;
        *w = (struct worker){.config = config, .store = store, .arguments = SHARED_FILE_NONE};
        w->on = config->worker == CONFIG_AUTO && config->worker_program[0];
        r = child_init(&w->child, &ops, config->worker_program, loop);
        w->child.most_pause_ns = MOST_PAUSE_NS;
        w->result = sys->calloc(1, KVD_FRAME_MAX);
        if (r < 0 || !w->result) {
                worker_free(w);
                return r < 0 ? r : -ENOMEM;
        }
        store_on_job(store, job_waits, w);
        store_set_wakes(store, w->on && store_has_device(store));
        *ret = w;
        return 0;
}

void worker_stop(struct worker *w) {
        if (!w || w->child.stopped)
                return;
        store_on_job(w->store, NULL, NULL);
        loop_timer_stop(&w->rest);
        child_stop(&w->child);
        worker_files_forget_all(&w->files);
}

struct worker *worker_free(struct worker *w) {
        if (!w)
                return NULL;
        worker_stop(w);
        child_clear(&w->child);
        shared_file_close(&w->arguments);
        free(w->result);
        free(w);
        return NULL;
}

void worker_look(struct worker *w) {
        child_look(&w->child);
}

bool worker_is_on(const struct worker *w) {
        return w->on;
}

bool worker_is_forgetting(const struct worker *w) {
        uint32_t deleted;

        return worker_files_deleted(&w->files, w->store, &deleted) ||
               w->child.asked == KVD_MSG_work_forget;
}

struct child *worker_child(struct worker *w) {
        return &w->child;
}

uint64_t worker_jobs_done(const struct worker *w) {
        return w->jobs_done;
}
