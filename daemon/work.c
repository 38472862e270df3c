/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/work.h"

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
#include "ipc/base/device.h"
#include "ipc/base/job.h"
#include "ipc/base/summary.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

/*
 * One question at a time is out, so that a send never waits and an answer needs no looking up. What the worker knows
 * (spaces, segments, the sketch) is noted here, and forgotten when it dies. A worker that is killed is gone when its
 * pidfd says so, not before: until then it may still write where its job told it to, and the store keeps those places.
 */

#define BACKOFF_FIRST_NS UINT64_C(10000000)
#define BACKOFF_MOST_NS UINT64_C(1000000000)

/* A space that the worker has mapped. */
struct known {
        struct known *next;
        uint32_t number, n_segments;
        uint32_t turns[];    /* of each segment, when it was sent; 0: not mapped */
};

struct work {
        const struct config *config;
        struct loop *loop;
        struct store *store;
        bool on, stopped;

        int arguments_fd;             /* owned; -1; read-only */
        void *arguments;              /* owned mapping of KVD_JOB_BYTES; NULL */
        struct kvd_decoder *decoder;  /* owned */
        uint8_t *frame, *result;      /* owned; KVD_FRAME_MAX bytes each; result: where it is aligned */

        pid_t pid;                    /* 0: none */
        struct loop_source socket;    /* its fd is owned; -1 */
        struct loop_source process;   /* its pidfd is owned; -1 */
        struct loop_timer look, retry, deadline;
        uint64_t backoff_ns;          /* before the next start */

        struct known *known;          /* owned */
        uint32_t sketch_space, sketch; /* that it has mapped; 0: none */
        uint32_t asked;               /* number of the message that an answer is awaited to; 0: none */
        uint64_t sequence;
        uint32_t unmapping[2];        /* space and segment that it was asked to unmap */
        uint32_t clear_failures;
        char clear_why[160];
        bool has_job, job_lost;
        uint32_t job_space;           /* number: the space itself may be deleted meanwhile */
        struct store_job job;
        uint64_t starts, done;
};

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

static void forget_known(struct work *w, uint32_t number) {
        for (struct known **link = &w->known; *link; link = &(*link)->next) {
                struct known *k = *link;

                if (k->number != number)
                        continue;
                *link = k->next;
                free(k);
                break;
        }
        if (w->sketch_space == number)
                w->sketch_space = w->sketch = 0;
}

static void forget_all(struct work *w) {
        while (w->known) {
                struct known *k = w->known;

                w->known = k->next;
                free(k);
        }
        w->sketch_space = w->sketch = 0;
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
        forget_all(w);
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

static void answer_came(struct loop_source *source, short revents);
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
        w->socket = (struct loop_source){.fd = ends[0], .events = POLLIN, .ready = answer_came};
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
static void end_worker(struct work *w, const char *why) {
        log_limited(LOG_WARNING, "worker %d %s: it is replaced", w->pid, why);
        kill(w->pid, SIGKILL);
        loop_remove(&w->socket);
        loop_timer_stop(&w->deadline);
}

static void too_late(struct loop_timer *timer) {
        end_worker(container_of(timer, struct work, deadline), "has not answered in time");
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
        forget_all(w);
        w->job_lost = w->has_job;
        if (store_has_device(w->store))
                w->backoff_ns = MAX(w->backoff_ns, w->config->quarantine_ms * UINT64_C(1000000));
        else
                lose_all(w);
        wait_and_start(w);
}

/* ---- questions --------------------------------------------------------------------------------------------------- */

static int ask(struct work *w, struct kvd_msg *msg, const struct kvd_fds *fds) {
        ssize_t n;
        int r;

        msg->sequence = ++w->sequence;
        n = kvd_msg_encode(msg, w->frame, KVD_FRAME_MAX);
        r = n < 0 ? (int)n : kvd_frame_send(w->socket.fd, w->frame, (size_t)n, fds, MSG_DONTWAIT);
        if (r < 0)
                return r;
        w->asked = msg->number;
        loop_timer_set(w->loop, &w->deadline, sys_now_ns() + w->config->worker_deadline * UINT64_C(1000000000));
        return 0;
}

static struct space *find_space(const struct work *w, uint32_t number) {
        struct space *space = store_next_space(w->store, number);

        return space && space_number(space) == number ? space : NULL;
}

static struct known *find_known(const struct work *w, uint32_t number) {
        struct known *k = w->known;

        while (k && k->number != number)
                k = k->next;
        return k;
}

static int tell_space(struct work *w, struct space *space) {
        const struct kvd_index *ix = space_index(space);
        struct kvd_msg msg = {.number = KVD_MSG_work_space};
        struct kvd_fds fds = {.n = 4};
        struct known *k;

        msg.work_space.space = space_number(space);
        msg.work_space.index_bytes = ix->size;
        msg.work_space.summary_bytes = kvd_summary_of(ix).size;
        fds.fd[0] = space_index_fd_for_worker(space);
        fds.fd[1] = space_summary_fd(space, true);
        fds.fd[2] = space_spill_fd(space, &msg.work_space.spill_bytes);
        fds.fd[3] = w->arguments_fd;
        for (uint32_t i = 0; i < fds.n; i++)
                if (fds.fd[i] < 0)
                        return fds.fd[i];
        k = sys->calloc(1, sizeof *k + ix->max_segments * sizeof *k->turns);
        if (!k)
                return -ENOMEM;
        k->next = w->known;
        k->number = space_number(space);
        k->n_segments = ix->max_segments;
        w->known = k;
        return ask(w, &msg, &fds);
}

/* The first segment with other memory than the worker has mapped; n: there is none. */
static uint32_t stale_segment(const struct known *k, const struct space *space, uint32_t from, uint32_t n) {
        for (; from < n; from++) {
                uint32_t turn = space_segment_turn(space, from);

                if (turn && turn != k->turns[from])
                        break;
        }
        return from;
}

static int tell_handle(struct work *w, struct space *space, struct known *k) {
        const uint8_t *handle = space_segment_handle(space, 0);
        struct kvd_msg msg = {.number = KVD_MSG_work_segments,
                              .work_segments = {k->number, 0, 1, {handle, handle ? CU_IPC_HANDLE_BYTES : 0}}};

        if (!handle)
                return -ENODATA;
        k->turns[0] = space_segment_turn(space, 0);
        return ask(w, &msg, NULL);
}

/* A run of such segments. */
static int tell_segments(struct work *w, struct space *space, struct known *k, uint32_t first, uint32_t n) {
        struct kvd_msg msg = {.number = KVD_MSG_work_segments, .work_segments = {k->number, first, 0, {0}}};
        struct kvd_fds fds = {.n = 0};

        if (space_index(space)->backend == KVD_BACKEND_LEGACY)
                return tell_handle(w, space, k);
        for (uint32_t i = first; fds.n < KVD_FRAME_FDS && stale_segment(k, space, i, n) == i && i < n; i++) {
                int fd = space_worker_segment_fd(space, i);

                if (fd < 0)
                        return fd;
                k->turns[i] = space_segment_turn(space, i);
                fds.fd[fds.n++] = fd;
        }
        msg.work_segments.count = fds.n;
        return ask(w, &msg, &fds);
}

static int tell_sketch(struct work *w, struct space *space) {
        struct kvd_msg msg = {.number = KVD_MSG_work_sketch, .work_sketch = {w->job_space, w->job.sketch, 0}};
        struct kvd_fds fds = {.n = 1};

        fds.fd[0] = space_sketch_fd(space, w->job.sketch, &msg.work_sketch.bytes);
        if (fds.fd[0] < 0)
                return fds.fd[0];
        w->sketch_space = w->job_space;
        w->sketch = w->job.sketch;
        return ask(w, &msg, &fds);
}

static int tell_job(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work, .work = {w->job.id, w->job.bytes}};

        return ask(w, &msg, NULL);
}

/* What the job needs first, then the job. */
static int ask_next(struct work *w, struct space *space) {
        uint32_t n_segments = atomic_load(&space_index(space)->n_segments);
        struct known *k = find_known(w, w->job_space);
        uint32_t stale;

        if (!k)
                return tell_space(w, space);
        stale = stale_segment(k, space, 0, n_segments);
        if (stale < n_segments)
                return tell_segments(w, space, k, stale, n_segments);
        if (w->job.sketch && (w->sketch != w->job.sketch || w->sketch_space != w->job_space))
                return tell_sketch(w, space);
        return tell_job(w);
}

/* ---- what there is to do ----------------------------------------------------------------------------------------- */

static void finish_job(struct work *w, int error, struct kvd_slice result) {
        w->has_job = false;
        if (result.size)
                memcpy(w->result, result.data, result.size);
        store_job_done(w->store, w->job.id, error, w->result, result.size);
        loop_want_idle(w->loop); /* relief goes on, and what nobody holds any more is freed */
}

/* True: asked. */
static bool forget_one(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_forget};
        struct known *k = w->known;

        while (k && find_space(w, k->number))
                k = k->next;
        if (!k)
                return false;
        msg.work_forget.space = k->number;
        forget_known(w, k->number);
        if (ask(w, &msg, NULL) < 0)
                end_worker(w, "takes no messages");
        return true;
}

/* GPU memory that nobody else has mapped any more. True: asked. */
static bool unmap_one(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_unmap};
        struct known *k = NULL;
        struct space *space;
        uint32_t segment;

        while (!k && store_next_unmap(w->store, &space, &segment)) {
                k = find_known(w, space_number(space));
                if (!k) /* it was told to forget the space, or is another worker */
                        space_worker_unmapped(space, segment);
        }
        if (!k)
                return false;
        k->turns[segment] = 0;
        w->unmapping[0] = msg.work_unmap.space = k->number;
        w->unmapping[1] = msg.work_unmap.segment = segment;
        if (ask(w, &msg, NULL) < 0)
                end_worker(w, "takes no messages");
        return true;
}

static void unmapped(struct work *w) {
        struct space *space = find_space(w, w->unmapping[0]);

        if (space)
                space_worker_unmapped(space, w->unmapping[1]);
}

/* True: asked. */
static bool clear_some(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_clear};
        struct kvd_fds fds = {.n = 0};

        fds.n = store_next_clear(w->store, fds.fd, &msg.work_clear.bytes);
        if (!fds.n)
                return false;
        msg.work_clear.count = fds.n;
        msg.work_clear.device = (struct kvd_slice){store_device(w->store), 16};
        if (ask(w, &msg, &fds) < 0)
                end_worker(w, "takes no messages");
        return true;
}

static void cleared(struct work *w) {
        w->clear_failures = 0;
        w->backoff_ns = 0;
        store_clear_done(w->store, true);
        loop_want_idle(w->loop);
}

/* It has no context, or no memory of its own: somebody tries again later (store_make_missing). */
static void not_cleared(struct work *w, const struct kvd_msg_error *error) {
        w->clear_failures++;
        kvd_slice_copy(error->text, w->clear_why, sizeof w->clear_why);
        log_limited(LOG_WARNING, "worker %d cannot clear GPU memory: %s", w->pid, w->clear_why);
        store_clear_failed(w->store);
}

/* True: asked. */
static bool wake_some(struct work *w) {
        struct kvd_msg msg = {.number = KVD_MSG_work_wake};
        struct store_wake wake;
        struct kvd_fds fds;

        if (!store_next_wake(w->store, &wake))
                return false;
        fds.fd[0] = wake.fd;
        fds.n = 1;
        msg.work_wake.device = (struct kvd_slice){wake.device, sizeof wake.device};
        msg.work_wake.bytes = wake.bytes;
        msg.work_wake.words = (struct kvd_slice){wake.words, 2 * wake.n * (uint32_t)sizeof *wake.words};
        if (ask(w, &msg, &fds) < 0)
                end_worker(w, "takes no messages");
        return true;
}

/* Where a stream cannot, the store's own write has to do. */
static void woken(struct work *w, const struct kvd_msg *m) {
        char why[160];

        if (m->number == KVD_MSG_error)
                log_limited(LOG_WARNING, "worker %d cannot wake streams that wait for a dead client: %s", w->pid,
                            kvd_slice_copy(m->error.text, why, sizeof why));
        store_wake_done(w->store, true);
        loop_want_idle(w->loop);
}

bool work_forgetting(const struct work *w) {
        struct known *k = w->known;

        while (k && find_space(w, k->number))
                k = k->next;
        return k || w->asked == KVD_MSG_work_forget;
}

static bool take_job(struct work *w) {
        if (!w->has_job) {
                w->has_job = store_next_job(w->store, w->arguments, &w->job);
                if (w->has_job)
                        w->job_space = space_number(w->job.space);
        }
        return w->has_job;
}

/* Asks the next question; a job that nothing can be asked about has failed. */
static void go_on(struct work *w) {
        while (!w->asked && w->socket.loop && !forget_one(w) && !unmap_one(w) && !wake_some(w) && !clear_some(w) &&
               take_job(w)) {
                struct space *space = find_space(w, w->job_space);
                int r = space ? ask_next(w, space) : -ESTALE;

                if (r == -EPIPE || r == -ECONNRESET || r == -EAGAIN) {
                        end_worker(w, "takes no messages");
                        return;
                }
                if (r < 0)
                        finish_job(w, -r, (struct kvd_slice){0});
        }
}

static void look_now(struct loop_timer *timer) {
        struct work *w = container_of(timer, struct work, look);

        if (!w->on)
                refuse_jobs(w);
        else if (w->pid)
                go_on(w);
        else if ((store_jobs_waiting(w->store) || store_wants_clearing(w->store) || store_wants_wake(w->store)) &&
                 !w->retry.link)
                loop_timer_set(w->loop, &w->retry, 0);
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

/* What a job needs cannot be had: the job fails, and the next one tries from the beginning. */
static void cannot_map(struct work *w, uint32_t asked, const struct kvd_msg *m) {
        log_limited(LOG_WARNING, "worker %d has no room for a job: %.*s", w->pid, (int)m->error.text.size,
                    (const char *)m->error.text.data);
        if (asked == KVD_MSG_work_sketch)
                w->sketch_space = w->sketch = 0;
        if (asked == KVD_MSG_work_space || asked == KVD_MSG_work_segments)
                forget_known(w, w->job_space);
        if (w->has_job)
                finish_job(w, (int)m->error.code ?: EIO, (struct kvd_slice){0});
}

static void take_answer(struct work *w, const struct kvd_msg *m) {
        uint32_t asked = w->asked;

        w->asked = 0;
        loop_timer_stop(&w->deadline);
        if (m->number == KVD_MSG_error && asked == KVD_MSG_work_clear)
                not_cleared(w, &m->error);
        else if (asked == KVD_MSG_work_wake)
                woken(w, m);
        else if (m->number == KVD_MSG_error)
                cannot_map(w, asked, m);
        else if (asked == KVD_MSG_work_clear)
                cleared(w);
        else if (asked == KVD_MSG_work_unmap)
                unmapped(w);
        if (m->number == KVD_MSG_error || asked != KVD_MSG_work)
                return;
        w->done++;
        w->backoff_ns = 0;
        finish_job(w, (int)m->work_reply.error, m->work_reply.result);
}

static bool is_answer(const struct work *w, const struct kvd_msg *m) {
        if (!w->asked || m->sequence != w->sequence)
                return false;
        if (m->number == KVD_MSG_error)
                return true;
        return m->number == w->asked + KVD_REPLY && (w->asked != KVD_MSG_work || m->work_reply.id == w->job.id);
}

static void answer_came(struct loop_source *source, short revents) {
        struct work *w = container_of(source, struct work, socket);
        ssize_t n = kvd_frame_receive(source->fd, w->frame, NULL, MSG_DONTWAIT);
        struct kvd_msg answer = {0};

        if (n == -EAGAIN)
                return;
        if (n <= 0) {
                end_worker(w, "closed its connection");
                return;
        }
        if (kvd_msg_decode(w->decoder, w->frame, (size_t)n, &answer) < 0 || !is_answer(w, &answer)) {
                end_worker(w, "sent what is no answer");
                return;
        }
        take_answer(w, &answer);
        go_on(w);
}
