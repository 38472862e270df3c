/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/hold.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/work.h"
#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "ipc/frame.h"
#include "ipc/msg.h"

/* One question at a time is out, as with the worker (work.c); there is one kind of them. */

#define PAUSE_NS UINT64_C(1000000000) /* before another holder is started */
#define SOON_NS UINT64_C(1000000)
#define ANSWER_NS UINT64_C(20000000000)
#define PROBE_MS 10000

struct hold {
        const struct config *config;
        struct loop *loop;
        struct store *store;
        const struct work *work;
        struct kvd_decoder *decoder;  /* owned */
        uint8_t *frame;               /* owned; KVD_FRAME_MAX bytes */
        pid_t pid;                    /* 0: none */
        struct loop_source socket;    /* its fd is owned; -1 */
        struct loop_source process;   /* its pidfd is owned; -1 */
        struct loop_timer look, deadline;
        bool asked;
        uint32_t number;              /* what was asked for */
        uint64_t sequence;
        uint32_t failures;
        char why[160];
};

uint32_t hold_failures(const struct hold *h) {
        return h->failures;
}

const char *hold_why(const struct hold *h) {
        return h->why[0] ? h->why : "no holder answers";
}

void hold_look(struct hold *h) {
        if (h && !h->look.link)
                loop_timer_set(h->loop, &h->look, 0);
}

/* ---- end ------------------------------------------------------------------------------------------------------- */

static void close_ends(struct hold *h) {
        loop_remove(&h->socket);
        loop_remove(&h->process);
        closep(&h->socket.fd);
        closep(&h->process.fd);
        h->socket.fd = h->process.fd = -1;
        loop_timer_stop(&h->deadline);
        h->asked = false;
}

static void reap(pid_t pid, int *status) {
        while (waitpid(pid, status, 0) < 0 && errno == EINTR)
                ;
}

static void end_holder(struct hold *h, const char *why) {
        log_limited(LOG_WARNING, "holder %d %s: it is replaced", h->pid, why);
        kill(h->pid, SIGKILL);
        loop_remove(&h->socket);
        loop_timer_stop(&h->deadline);
}

static void too_late(struct loop_timer *timer) {
        end_holder(container_of(timer, struct hold, deadline), "has not answered in time");
}

static void process_ended(struct loop_source *source, short revents) {
        struct hold *h = container_of(source, struct hold, process);
        int status = 0;

        reap(h->pid, &status);
        log_error("holder %d has ended (%s %d), and the pool's memory with it: all spaces begin anew", h->pid,
                  WIFSIGNALED(status) ? "signal" : "status",
                  WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        if (h->asked) {
                h->failures++;
                snprintf(h->why, sizeof h->why, "the holder ended while it was at it; see the log");
        }
        close_ends(h);
        h->pid = 0;
        store_holder_gone(h->store);
        loop_want_idle(h->loop);
        loop_timer_set(h->loop, &h->look, sys_now_ns() + PAUSE_NS);
}

/* ---- questions --------------------------------------------------------------------------------------------------- */

static int ask(struct hold *h, uint64_t bytes) {
        struct kvd_msg msg = {.number = KVD_MSG_hold, .sequence = ++h->sequence,
                              .hold = {{store_device(h->store), 16}, h->number, bytes}};
        ssize_t n = kvd_msg_encode(&msg, h->frame, KVD_FRAME_MAX);
        int r = n < 0 ? (int)n : kvd_frame_send(h->socket.fd, h->frame, (size_t)n, NULL, MSG_DONTWAIT);

        h->asked = r == 0;
        loop_timer_set(h->loop, &h->deadline, sys_now_ns() + ANSWER_NS);
        return r;
}

/* A worker that still has a deleted space mapped must let go of it first: it will have been asked to. */
static void go_on(struct hold *h) {
        uint64_t bytes;

        if (h->asked || !h->socket.loop)
                return;
        if (work_forgetting(h->work)) {
                loop_timer_set(h->loop, &h->look, sys_now_ns() + SOON_NS);
                return;
        }
        if (store_next_hold(h->store, &h->number, &bytes) && ask(h, bytes) < 0)
                end_holder(h, "takes no messages");
}

static void take_answer(struct hold *h, const struct kvd_msg *m) {
        h->asked = false;
        loop_timer_stop(&h->deadline);
        if (m->number == KVD_MSG_hold_reply) {
                h->failures = 0;
                store_hold_done(h->store, h->number, m->hold_reply.handle.data);
                return;
        }
        h->failures++;
        kvd_slice_copy(m->error.text, h->why, sizeof h->why);
        log_limited(LOG_WARNING, "holder %d cannot make memory: %s", h->pid, h->why);
        store_clear_failed(h->store);
}

static bool is_answer(const struct hold *h, const struct kvd_msg *m) {
        return h->asked && m->sequence == h->sequence &&
               (m->number == KVD_MSG_error ||
                (m->number == KVD_MSG_hold_reply && m->hold_reply.handle.size == CU_IPC_HANDLE_BYTES));
}

static void answer_came(struct loop_source *source, short revents) {
        struct hold *h = container_of(source, struct hold, socket);
        ssize_t n = kvd_frame_receive(source->fd, h->frame, NULL, MSG_DONTWAIT);
        struct kvd_msg answer = {0};

        if (n == -EAGAIN)
                return;
        if (n <= 0) {
                end_holder(h, "closed its connection");
        } else if (kvd_msg_decode(h->decoder, h->frame, (size_t)n, &answer) < 0 || !is_answer(h, &answer)) {
                end_holder(h, "sent what is no answer");
        } else {
                take_answer(h, &answer);
                go_on(h);
        }
}

/* ---- start ------------------------------------------------------------------------------------------------------- */

/* fd: the holder's, closed in any case. */
static pid_t spawn(const char *program, char *argument, int fd) {
        char *const arguments[] = {"kvd", "--holder", argument, NULL};
        pid_t pid = sys->spawn(program, arguments, fd);
        int error = errno;

        close(fd);
        return pid < 0 ? -error : pid;
}

static int watch(struct hold *h) {
        int r;

        h->process = (struct loop_source){.events = POLLIN, .ready = process_ended};
        h->process.fd = sys->pidfd_open(h->pid);
        if (h->process.fd < 0)
                return -errno;
        r = loop_add(h->loop, &h->process);
        return r < 0 ? r : loop_add(h->loop, &h->socket);
}

static int start(struct hold *h) {
        int ends[2], r;

        if (sys->socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
                return -errno;
        h->socket = (struct loop_source){.fd = ends[0], .events = POLLIN, .ready = answer_came};
        r = spawn(h->config->worker_program, NULL, ends[1]);
        if (r < 0)
                return r;
        h->pid = r;
        return watch(h);
}

static void give_up(struct hold *h) {
        close_ends(h);
        if (h->pid > 0 && kill(h->pid, SIGKILL) == 0)
                reap(h->pid, NULL);
        h->pid = 0;
}

static void look_now(struct loop_timer *timer) {
        struct hold *h = container_of(timer, struct hold, look);
        int r = h->pid ? 0 : start(h);

        if (r == 0) {
                go_on(h);
                return;
        }
        log_limited(LOG_WARNING, "the holder cannot be started: %s; trying again", strerror(-r));
        give_up(h);
        loop_timer_set(h->loop, timer, sys_now_ns() + PAUSE_NS);
}

int hold_new(const struct config *config, struct loop *loop, struct store *store, const struct work *work,
             struct hold **ret) {
        struct hold *h = sys->calloc(1, sizeof *h);
        int r;

        if (!h)
                return -ENOMEM;
        *h = (struct hold){.config = config, .loop = loop, .store = store, .work = work};
        h->socket.fd = h->process.fd = -1;
        h->look.fire = look_now;
        h->deadline.fire = too_late;
        h->frame = sys->calloc(1, KVD_FRAME_MAX);
        r = h->frame ? kvd_decoder_new(&h->decoder) : -ENOMEM;
        if (r < 0) {
                hold_free(h);
                return r;
        }
        *ret = h;
        return 0;
}

struct hold *hold_free(struct hold *h) {
        if (!h)
                return NULL;
        loop_timer_stop(&h->look);
        give_up(h);
        kvd_decoder_free(h->decoder);
        free(h->frame);
        free(h);
        return NULL;
}

/* ---- probe ------------------------------------------------------------------------------------------------------- */

/* What it says until it ends, as one line; nothing if all is well. */
static void hear(int fd, char *why, size_t size) {
        size_t at = 0;
        ssize_t n = 1;

        while (n > 0 && at < size - 1) {
                struct pollfd p = {fd, POLLIN, 0};

                n = sys->poll(&p, 1, PROBE_MS) == 1 ? read(fd, why + at, size - 1 - at) : -1;
                at += n > 0 ? (size_t)n : 0;
        }
        why[at] = 0;
}

int hold_probe(const char *program, const uint8_t uuid[16], char *why, size_t size) {
        char text[33];
        int ends[2], status = 0;
        pid_t pid;

        for (int i = 0; i < 16; i++)
                snprintf(text + 2 * i, 3, "%02x", uuid[i]);
        if (!program[0] || sys->socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) {
                snprintf(why, size, "a holder cannot be started");
                return -ENOSYS;
        }
        pid = spawn(program, text, ends[1]);
        if (pid < 0) {
                snprintf(why, size, "a holder cannot be started: %s", strerror(-pid));
                close(ends[0]);
                return pid;
        }
        hear(ends[0], why, size);
        close(ends[0]);
        kill(pid, SIGKILL); /* it has closed its end, or has taken too long */
        reap(pid, &status);
        return strcmp(why, "ok") == 0 ? 0 : -EIO;
}
