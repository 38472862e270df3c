/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "daemon/log.h"
#include "daemon/work_internal.h"
#include "ipc/base/job.h"
#include "ipc/base/sys.h"

/*
 * One question at a time is out, so that a send never waits and an answer needs no looking up. What the worker knows
 * (spaces, segments, the sketch) is noted, and forgotten when it dies. A worker that is killed is gone when its
 * pidfd says so, not before: until then it may still write where its job told it to, and the store keeps those places.
 */

#define BACKOFF_FIRST_NS UINT64_C(10000000)
#define BACKOFF_MOST_NS UINT64_C(1000000000)

/* ---- life ------------------------------------------------------------------------------------------------------ */

static void look_now(struct loop_timer *timer);
static void start_again(struct loop_timer *timer);
static void too_late(struct loop_timer *timer);

static void job_waits(void *data) {
        work_look(data);
}

int work_new(const struct config *config, struct loop *loop, struct store *store, struct work **ret) {
        struct work *w = sys->calloc(1, sizeof *w);
        int r;

        if (!w)
                return -ENOMEM;
        *w = (struct work){.config = config, .loop = loop, .store = store, .arguments_fd = -1};
        w->on = config->worker == CONFIG_AUTO && config->worker_program[0];
        w->socket.fd = w->process.fd = -1;
        w->look.fire = look_now;
        w->retry.fire = start_again;
        w->deadline.fire = too_late;
        w->frame = sys->calloc(1, KVD_FRAME_MAX);
        w->result = sys->calloc(1, KVD_FRAME_MAX);
        r = w->frame && w->result ? kvd_decoder_new(&w->decoder) : -ENOMEM;
        if (r < 0) {
                work_free(w);
                return r;
        }
        store_on_job(store, job_waits, w);
        store_set_wakes(store, w->on && store_has_device(store));
        *ret = w;
        return 0;
}

static void close_ends(struct work *w) {
        loop_remove(&w->socket);
        loop_remove(&w->process);
        closep(&w->socket.fd);
        closep(&w->process.fd);
        w->socket.fd = w->process.fd = -1;
        loop_timer_stop(&w->deadline);
        w->asked = 0;
}

void work_stop(struct work *w) {
        if (!w || w->stopped)
                return;
        w->stopped = true;
        store_on_job(w->store, NULL, NULL);
        loop_timer_stop(&w->look);
        loop_timer_stop(&w->retry);
        close_ends(w);
        if (w->pid > 0 && kill(w->pid, SIGKILL) == 0)
                while (waitpid(w->pid, NULL, 0) < 0 && errno == EINTR)
                        ;
        w->pid = 0;
        work_forget_all(w);
}

struct work *work_free(struct work *w) {
        if (!w)
                return NULL;
        work_stop(w);
        if (w->arguments)
                munmap(w->arguments, KVD_JOB_BYTES);
        closep(&w->arguments_fd);
        kvd_decoder_free(w->decoder);
        free(w->frame);
        free(w->result);
        free(w);
        return NULL;
}

bool work_is_on(const struct work *w) {
        return w->on;
}

pid_t work_pid(const struct work *w) {
        return w->pid;
}

uint32_t work_clear_failures(const struct work *w) {
        return w->clear_failures;
}

const char *work_clear_why(const struct work *w) {
        return w->clear_why[0] ? w->clear_why : "no worker answers";
}

uint64_t work_starts(const struct work *w) {
        return w->starts;
}

uint64_t work_done(const struct work *w) {
        return w->done;
}

void work_look(struct work *w) {
        if (!w->stopped && !w->look.link)
                loop_timer_set(w->loop, &w->look, 0);
}

/* ---- start ------------------------------------------------------------------------------------------------------ */

/* A second descriptor for who may only read. */
static int make_shared(struct work *w, void **ret) {
        int fd = sys->memfd_create("kvd-job", MFD_CLOEXEC), error = 0;
        char path[64];

        if (fd < 0)
                return -errno;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        *ret = MAP_FAILED;
        if (sys->ftruncate(fd, (off_t)KVD_JOB_BYTES) == 0)
                *ret = sys->mmap(NULL, KVD_JOB_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (*ret != MAP_FAILED)
                w->arguments_fd = sys->open(path, O_RDONLY | O_CLOEXEC);
        if (w->arguments_fd < 0)
                error = -errno;
        close(fd);
        if (error && *ret != MAP_FAILED)
                munmap(*ret, KVD_JOB_BYTES);
        return error;
}

/* The owner writes arguments, the worker maps them read-only. Without a worker nobody reads them. */
static int make_arguments(struct work *w) {
        void *at = MAP_FAILED;
        int r = 0;

        if (w->arguments)
                return 0;
        if (w->on)
                r = make_shared(w, &at);
        else
                at = sys->mmap(NULL, KVD_JOB_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (r == 0 && at == MAP_FAILED)
                r = -errno;
        if (r == 0)
                w->arguments = at;
        return r;
}

static uint32_t n_threads(const struct work *w) {
        long processors = sysconf(_SC_NPROCESSORS_ONLN);

        return w->config->worker_threads ?: (uint32_t)MAX(processors / 2, 1);
}

/* end: the worker's, closed in any case. */
static int spawn(struct work *w, int end) {
        char fd[16], threads[16];
        char *const arguments[] = {"kvd", "--worker", fd, threads, NULL};
        pid_t pid;

        snprintf(fd, sizeof fd, "%d", SYS_SPAWN_FD);
        snprintf(threads, sizeof threads, "%u", n_threads(w));
        pid = sys->spawn(w->config->worker_program, arguments, end);
        if (pid < 0) {
                int error = errno;

                close(end);
                return -error;
        }
        close(end);
        w->pid = pid;
        w->starts++;
        return 0;
}

static void process_ended(struct loop_source *source, short revents);

static int watch(struct work *w) {
        int r;

        w->process = (struct loop_source){.events = POLLIN, .ready = process_ended};
        w->process.fd = sys->pidfd_open(w->pid); /* our child, and not waited for yet: the number is its own */
        if (w->process.fd < 0)
                return -errno;
        r = loop_add(w->loop, &w->process);
        return r < 0 ? r : loop_add(w->loop, &w->socket);
}

static int start(struct work *w) {
        int ends[2], r;

        r = make_arguments(w);
        if (r < 0)
                return r;
        if (sys->socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
                return -errno;
        w->socket = (struct loop_source){.fd = ends[0], .events = POLLIN, .ready = work_answer_came};
        r = spawn(w, ends[1]);
        return r < 0 ? r : watch(w);
}

static void wait_and_start(struct work *w) {
        loop_timer_set(w->loop, &w->retry, sys_now_ns() + w->backoff_ns);
        w->backoff_ns = w->backoff_ns ? MIN(w->backoff_ns * 2, BACKOFF_MOST_NS) : BACKOFF_FIRST_NS;
}

/* Nothing watches a half-started worker, so it is waited for here; it has nothing to hold it up. */
static void give_up(struct work *w) {
        close_ends(w);
        if (w->pid > 0 && kill(w->pid, SIGKILL) == 0)
                while (waitpid(w->pid, NULL, 0) < 0 && errno == EINTR)
                        ;
        w->pid = 0;
}

/* Without a worker, what waits for one fails. */
static void refuse_jobs(struct work *w) {
        uint64_t n = store_jobs_waiting(w->store);

        if (!n || make_arguments(w) < 0)
                return;
        while (n-- > 0 && store_next_job(w->store, w->arguments, &w->job))
                store_job_done(w->store, w->job.id, EOPNOTSUPP, NULL, 0);
        loop_want_idle(w->loop);
}

/* What it had is free: the process is gone, and what it has asked of a GPU has run or never will. */
static void lose_all(struct work *w) {
        if (w->job_lost)
                store_job_lost(w->store, w->job.id);
        w->has_job = w->job_lost = false;
        store_wake_done(w->store, false);
        store_worker_gone(w->store);
        loop_want_idle(w->loop);
}

static void start_again(struct loop_timer *timer) {
        struct work *w = container_of(timer, struct work, retry);
        int r;

        if (store_has_device(w->store)) /* a quarantine is over */
                lose_all(w);
        r = start(w);
        if (r >= 0) {
                log_info("worker %d runs the methods' kernels", w->pid);
                work_look(w);
                return;
        }
        log_limited(LOG_WARNING, "the worker cannot be started: %s; trying again", strerror(-r));
        give_up(w);
        if (w->backoff_ns == BACKOFF_MOST_NS) /* that is eight times: nobody should wait for it */
                refuse_jobs(w);
        wait_and_start(w);
}

/* ---- end -------------------------------------------------------------------------------------------------------- */

/* Not lost yet: what it does until the kernel has ended it is done to places that its job still holds. */
void work_end(struct work *w, const char *why) {
        log_limited(LOG_WARNING, "worker %d %s: it is replaced", w->pid, why);
        kill(w->pid, SIGKILL);
        loop_remove(&w->socket);
        loop_timer_stop(&w->deadline);
}

static void too_late(struct loop_timer *timer) {
        work_end(container_of(timer, struct work, deadline), "has not answered in time");
}

static void log_end(pid_t pid, int status) {
        if (WIFSIGNALED(status))
                log_limited(LOG_WARNING, "worker %d was ended by signal %d: another is started", pid, WTERMSIG(status));
        else
                log_limited(LOG_WARNING, "worker %d ended with status %d: another is started",
                            pid, WEXITSTATUS(status));
}

static void process_ended(struct loop_source *source, short revents) {
        struct work *w = container_of(source, struct work, process);
        int status = 0;

        if (waitpid(w->pid, &status, WNOHANG) == 0)
                return;
        log_end(w->pid, status);
        if (w->asked == KVD_MSG_work_clear) {
                w->clear_failures++;
                snprintf(w->clear_why, sizeof w->clear_why, "the worker ended while it was at it; see the log");
        }
        close_ends(w);
        w->pid = 0;
        work_forget_all(w);
        w->job_lost = w->has_job;
        if (store_has_device(w->store))
                w->backoff_ns = MAX(w->backoff_ns, w->config->quarantine_ms * UINT64_C(1000000));
        else
                lose_all(w);
        wait_and_start(w);
}

/* ---- looking ----------------------------------------------------------------------------------------------------- */

static void look_now(struct loop_timer *timer) {
        struct work *w = container_of(timer, struct work, look);

        if (!w->on)
                refuse_jobs(w);
        else if (w->pid)
                work_go_on(w);
        else if ((store_jobs_waiting(w->store) || store_wants_clearing(w->store) || store_wants_wake(w->store)) &&
                 !w->retry.link)
                loop_timer_set(w->loop, &w->retry, 0);
}
