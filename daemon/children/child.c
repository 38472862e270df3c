/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Starts a process that works for the daemon, sends it requests, watches and replaces it. Its kind
 * (child_ops) supplies the requests. Only one request is in flight, so that a send never waits and
 * a reply needs no lookup.
 *
 * A killed child is gone only when its pidfd becomes readable. Until then it may still write to the
 * memory of its request, so the store does not reuse that memory.
 */

#include "daemon/children/child.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "daemon/base/degraded.h"
#include "daemon/base/log.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define FIRST_PAUSE_NS UINT64_C(10000000)

/* ---- life ------------------------------------------------------------------------------------ */

static void look_now(struct loop_timer *timer);
static void start_again(struct loop_timer *timer);
static void too_late(struct loop_timer *timer);
static void too_slow(struct loop_timer *timer);

int child_init(struct child *c, const struct child_ops *ops, const char *program,
               struct loop *loop) {
        *c = (struct child){.ops = ops, .program = program, .loop = loop};
        c->socket.fd = c->process.fd = -1;
        c->look.fire = look_now;
        c->retry.fire = start_again;
        c->deadline.fire = too_late;
        c->doubt.fire = too_slow;
        c->frame = sys->calloc(1, KVD_FRAME_MAX);
        return c->frame ? kvd_decoder_new(&c->decoder) : -ENOMEM;
}

static void stop_waiting(struct child *c) {
        loop_timer_stop(&c->deadline);
        loop_timer_stop(&c->doubt);
}

static void close_ends(struct child *c) {
        loop_remove(&c->socket);
        loop_remove(&c->process);
        closep(&c->socket.fd);
        closep(&c->process.fd);
        c->socket.fd = c->process.fd = -1;
        stop_waiting(c);
        c->asked = 0;
}

/* Nothing watches a half-started or stopped child, so wait for its end here. */
static void give_up(struct child *c) {
        close_ends(c);
        if (c->pid > 0)
                child_kill(c->pid);
        c->pid = 0;
}

void child_stop(struct child *c) {
        c->stopped = true;
        loop_timer_stop(&c->look);
        loop_timer_stop(&c->retry);
        give_up(c);
}

void child_clear(struct child *c) {
        child_stop(c);
        kvd_decoder_free(c->decoder);
        free(c->frame);
        c->decoder = NULL;
        c->frame = NULL;
}

void child_failed(struct child *c, struct kvd_slice why) {
        degraded_set(gpu_memory, ++c->failures);
        kvd_slice_copy(why, c->why, sizeof c->why);
}

void child_worked(struct child *c) {
        c->failures = 0;
        degraded_set(gpu_memory, 0);
}

const char *child_why(const struct child *c) {
        return c->why[0] ? c->why : "the process that does it does not answer";
}

/* ---- start ----------------------------------------------------------------------------------- */

pid_t child_spawn(const char *program, char *const arguments[], int end) {
        pid_t pid = sys->spawn(program, arguments, end);
        int error = errno;

        close(end);
        return pid < 0 ? -error : pid;
}

void child_kill(pid_t pid) {
        if (kill(pid, SIGKILL) == 0)
                while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
                        ;
}

static void process_ended(struct loop_source *source, short revents);
static void answer_came(struct loop_source *source, short revents);

static int watch(struct child *c) {
        int r;

        c->process = (struct loop_source){.events = POLLIN, .ready = process_ended};
        /* it was not waited for yet, so its pid cannot have been reused */
        c->process.fd = sys->pidfd_open(c->pid);
        if (c->process.fd < 0)
                return negative_errno();
        r = loop_add(c->loop, &c->process);
        return r < 0 ? r : loop_add(c->loop, &c->socket);
}

static int start(struct child *c) {
        int ends[2], r;

        r = c->ops->prepare(c);
        if (r < 0)
                return r;
        if (sys->socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
                return negative_errno();
        c->socket = (struct loop_source){.fd = ends[0], .events = POLLIN, .ready = answer_came};
        r = child_spawn(c->program, c->arguments, ends[1]);
        if (r < 0)
                return r;
        c->pid = r;
        c->starts++;
        return watch(c);
}

static void pause_and_start(struct child *c) {
        loop_timer_set(c->loop, &c->retry, sys_now_ns() + c->pause_ns);
        c->pause_ns = c->pause_ns ? MIN(c->pause_ns * 2, c->most_pause_ns) : FIRST_PAUSE_NS;
}

static void start_again(struct loop_timer *timer) {
        struct child *c = container_of(timer, struct child, retry);
        int r = start(c);

        if (r >= 0) {
                log_info("%s %d was started", c->ops->name, c->pid);
                child_look(c);
                return;
        }
        if (r == -ECANCELED)
                return;
        log_limited(LOG_WARNING, "the %s cannot be started: %s; trying again", c->ops->name,
                    strerror(-r));
        give_up(c);
        degraded_note_one(c->ops->degraded);
        if (c->ops->not_started)
                c->ops->not_started(c);
        pause_and_start(c);
}

/* ---- end ------------------------------------------------------------------------------------- */

void child_end(struct child *c, const char *why) {
        log_limited(LOG_WARNING, "%s %d %s: it is replaced", c->ops->name, c->pid, why);
        kill(c->pid, SIGKILL);
        loop_remove(&c->socket);
        stop_waiting(c);
}

static void too_late(struct loop_timer *timer) {
        struct child *c = container_of(timer, struct child, deadline);

        child_end(c, "has not answered in time");
        if (c->ops->late)
                c->ops->late(c);
}

static void too_slow(struct loop_timer *timer) {
        struct child *c = container_of(timer, struct child, doubt);

        c->ops->slow(c);
}

static void log_end(const struct child *c, int status) {
        bool killed = WIFSIGNALED(status);

        log_limited(LOG_WARNING, "%s %d %s %d: another is started", c->ops->name, c->pid,
                    killed ? "was ended by signal" : "ended with status",
                    killed ? WTERMSIG(status) : WEXITSTATUS(status));
}

static void process_ended(struct loop_source *source, short revents) {
        struct child *c = container_of(source, struct child, process);
        uint32_t asked = c->asked;
        int status = 0;

        if (waitpid(c->pid, &status, WNOHANG) == 0)
                return;
        log_end(c, status);
        degraded_note_one(c->ops->degraded);
        close_ends(c);
        c->pid = 0;
        c->ops->ended(c, asked);
        pause_and_start(c);
}

/* ---- requests -------------------------------------------------------------------------------- */

int child_ask(struct child *c, struct kvd_msg *msg, const struct kvd_fds *fds) {
        ssize_t n;
        int r;

        msg->serial = ++c->serial;
        n = kvd_msg_encode(msg, c->frame, KVD_FRAME_MAX);
        r = n < 0 ? (int)n : kvd_frame_send(c->socket.fd, c->frame, (size_t)n, fds, MSG_DONTWAIT);
        if (r < 0)
                return r;
        c->asked = msg->number;
        loop_timer_set(c->loop, &c->deadline, sys_now_ns() + c->patience_ns);
        if (c->slow_ns)
                loop_timer_set(c->loop, &c->doubt, sys_now_ns() + c->slow_ns);
        return 0;
}

bool child_ask_or_end(struct child *c, struct kvd_msg *msg, const struct kvd_fds *fds) {
        if (child_ask(c, msg, fds) < 0)
                child_end(c, "accepts no messages");
        return true;
}

uint32_t child_add_fd(struct kvd_fds *fds, int fd) {
        for (uint32_t i = 0; i < fds->n; i++)
                if (fds->fd[i] == fd)
                        return i;
        fds->fd[fds->n++] = fd;
        return fds->n - 1;
}

uint32_t child_array(void *to, size_t size, uint32_t most, struct kvd_slice from) {
        uint32_t n = (uint32_t)MIN(from.size / size, most);

        if (n)
                memcpy(to, from.data, n * size);
        return n;
}

static void go_on(struct child *c) {
        while (!c->asked && c->socket.loop && c->ops->next(c))
                ;
}

void child_look_after(struct child *c, uint64_t ns) {
        if (!c->stopped)
                loop_timer_set(c->loop, &c->look, sys_now_ns() + ns);
}

void child_look(struct child *c) {
        if (!c->stopped && !loop_timer_is_set(&c->look))
                loop_timer_set(c->loop, &c->look, 0);
}

static bool is_wanted(struct child *c) {
        return !c->ops->wanted || c->ops->wanted(c);
}

static void look_now(struct loop_timer *timer) {
        struct child *c = container_of(timer, struct child, look);

        if (c->pid)
                go_on(c);
        else if (!loop_timer_is_set(&c->retry) && is_wanted(c))
                loop_timer_set(c->loop, &c->retry, 0);
}

/* ---- replies --------------------------------------------------------------------------------- */

static bool is_answer(const struct child *c, const struct kvd_msg *m) {
        if (!c->asked || m->serial != c->serial)
                return false;
        return m->number == KVD_MSG_error ||
               (m->number == c->asked + KVD_REPLY && (!c->ops->fits || c->ops->fits(c, m)));
}

static void take_answer(struct child *c, const struct kvd_msg *answer) {
        uint32_t asked = c->asked;

        c->asked = 0;
        stop_waiting(c);
        c->ops->answered(c, asked, answer);
        go_on(c);
}

static void answer_came(struct loop_source *source, short revents) {
        struct child *c = container_of(source, struct child, socket);
        ssize_t n = kvd_frame_receive(source->fd, c->frame, NULL, MSG_DONTWAIT);
        struct kvd_msg answer = {0};

        if (n == -EAGAIN)
                return;
        if (n <= 0)
                child_end(c, "closed its connection");
        else if (kvd_msg_decode(c->decoder, c->frame, (size_t)n, &answer) < 0 ||
                 !is_answer(c, &answer))
                child_end(c, "sent an invalid reply");
        else
                take_answer(c, &answer);
}
