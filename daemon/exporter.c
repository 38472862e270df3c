/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/exporter.h"

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

#define PAUSE_NS UINT64_C(1000000000) /* before another exporter is started */
#define SOON_NS UINT64_C(1000000)
#define ANSWER_NS UINT64_C(20000000000)
#define PROBE_MS 10000

struct exporter {
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
        uint64_t serial;
        uint32_t failures;
        char why[160];
};

uint32_t exporter_failures(const struct exporter *h) {
        return h->failures;
}

const char *exporter_why(const struct exporter *h) {
        return h->why[0] ? h->why : "no exporter answers";
}

void exporter_look(struct exporter *h) {
        if (h && !h->look.link)
                loop_timer_set(h->loop, &h->look, 0);
}

/* ---- end ------------------------------------------------------------------------------------------------------- */

static void close_ends(struct exporter *h) {
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

static void end_exporter(struct exporter *h, const char *why) {
        log_limited(LOG_WARNING, "exporter %d %s: it is replaced", h->pid, why);
        kill(h->pid, SIGKILL);
        loop_remove(&h->socket);
        loop_timer_stop(&h->deadline);
}

static void too_late(struct loop_timer *timer) {
        end_exporter(container_of(timer, struct exporter, deadline), "has not answered in time");
}

static void process_ended(struct loop_source *source, short revents) {
        struct exporter *h = container_of(source, struct exporter, process);
        int status = 0;

        reap(h->pid, &status);
        log_error("exporter %d has ended (%s %d), and the pool's memory with it: all spaces begin anew", h->pid,
                  WIFSIGNALED(status) ? "signal" : "status",
                  WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        if (h->asked) {
                h->failures++;
                snprintf(h->why, sizeof h->why, "the exporter ended while it was at it; see the log");
        }
        close_ends(h);
        h->pid = 0;
        store_exporter_gone(h->store);
        loop_want_idle(h->loop);
        loop_timer_set(h->loop, &h->look, sys_now_ns() + PAUSE_NS);
}

/* ---- questions --------------------------------------------------------------------------------------------------- */

static int ask(struct exporter *h, uint64_t bytes) {
        struct kvd_msg msg = {.number = KVD_MSG_export, .serial = ++h->serial,
                              .export = {{store_device(h->store), 16}, h->number, bytes}};
        ssize_t n = kvd_msg_encode(&msg, h->frame, KVD_FRAME_MAX);
        int r = n < 0 ? (int)n : kvd_frame_send(h->socket.fd, h->frame, (size_t)n, NULL, MSG_DONTWAIT);

        h->asked = r == 0;
        loop_timer_set(h->loop, &h->deadline, sys_now_ns() + ANSWER_NS);
        return r;
}

/* A worker that still has a deleted space mapped must let go of it first: it will have been asked to. */
static void go_on(struct exporter *h) {
        uint64_t bytes;

        if (h->asked || !h->socket.loop)
                return;
        if (work_forgetting(h->work)) {
                loop_timer_set(h->loop, &h->look, sys_now_ns() + SOON_NS);
                return;
        }
        if (store_next_export(h->store, &h->number, &bytes) && ask(h, bytes) < 0)
                end_exporter(h, "takes no messages");
}

static void take_answer(struct exporter *h, const struct kvd_msg *m) {
        h->asked = false;
        loop_timer_stop(&h->deadline);
        if (m->number == KVD_MSG_export_reply) {
                h->failures = 0;
                store_export_done(h->store, h->number, m->export_reply.handle.data);
                return;
        }
        h->failures++;
        kvd_slice_copy(m->error.text, h->why, sizeof h->why);
        log_limited(LOG_WARNING, "exporter %d cannot make memory: %s", h->pid, h->why);
        store_clear_failed(h->store);
}

static bool is_answer(const struct exporter *h, const struct kvd_msg *m) {
        return h->asked && m->serial == h->serial &&
               (m->number == KVD_MSG_error ||
                (m->number == KVD_MSG_export_reply && m->export_reply.handle.size == CU_IPC_HANDLE_BYTES));
}

static void answer_came(struct loop_source *source, short revents) {
        struct exporter *h = container_of(source, struct exporter, socket);
        ssize_t n = kvd_frame_receive(source->fd, h->frame, NULL, MSG_DONTWAIT);
        struct kvd_msg answer = {0};

        if (n == -EAGAIN)
                return;
        if (n <= 0) {
                end_exporter(h, "closed its connection");
        } else if (kvd_msg_decode(h->decoder, h->frame, (size_t)n, &answer) < 0 || !is_answer(h, &answer)) {
                end_exporter(h, "sent what is no answer");
        } else {
                take_answer(h, &answer);
                go_on(h);
        }
}

/* ---- start ------------------------------------------------------------------------------------------------------- */

/* fd: the exporter's, closed in any case. */
static pid_t spawn(const char *program, char *argument, int fd) {
        char *const arguments[] = {"kvd", "--exporter", argument, NULL};
        pid_t pid = sys->spawn(program, arguments, fd);
        int error = errno;

        close(fd);
        return pid < 0 ? -error : pid;
}

static int watch(struct exporter *h) {
        int r;

        h->process = (struct loop_source){.events = POLLIN, .ready = process_ended};
        h->process.fd = sys->pidfd_open(h->pid);
        if (h->process.fd < 0)
                return -errno;
        r = loop_add(h->loop, &h->process);
        return r < 0 ? r : loop_add(h->loop, &h->socket);
}

static int start(struct exporter *h) {
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

static void give_up(struct exporter *h) {
        close_ends(h);
        if (h->pid > 0 && kill(h->pid, SIGKILL) == 0)
                reap(h->pid, NULL);
        h->pid = 0;
}

static void look_now(struct loop_timer *timer) {
        struct exporter *h = container_of(timer, struct exporter, look);
        int r = h->pid ? 0 : start(h);

        if (r == 0) {
                go_on(h);
                return;
        }
        log_limited(LOG_WARNING, "the exporter cannot be started: %s; trying again", strerror(-r));
        give_up(h);
        loop_timer_set(h->loop, timer, sys_now_ns() + PAUSE_NS);
}

int exporter_new(const struct config *config, struct loop *loop, struct store *store, const struct work *work,
             struct exporter **ret) {
        struct exporter *h = sys->calloc(1, sizeof *h);
        int r;

        if (!h)
                return -ENOMEM;
        *h = (struct exporter){.config = config, .loop = loop, .store = store, .work = work};
        h->socket.fd = h->process.fd = -1;
        h->look.fire = look_now;
        h->deadline.fire = too_late;
        h->frame = sys->calloc(1, KVD_FRAME_MAX);
        r = h->frame ? kvd_decoder_new(&h->decoder) : -ENOMEM;
        if (r < 0) {
                exporter_free(h);
                return r;
        }
        *ret = h;
        return 0;
}

struct exporter *exporter_free(struct exporter *h) {
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

int exporter_probe(const char *program, const uint8_t uuid[16], char *why, size_t size) {
        char text[33];
        int ends[2], status = 0;
        pid_t pid;

        for (int i = 0; i < 16; i++)
                snprintf(text + 2 * i, 3, "%02x", uuid[i]);
        if (!program[0] || sys->socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) {
                snprintf(why, size, "an exporter cannot be started");
                return -ENOSYS;
        }
        pid = spawn(program, text, ends[1]);
        if (pid < 0) {
                snprintf(why, size, "an exporter cannot be started: %s", strerror(-pid));
                close(ends[0]);
                return pid;
        }
        hear(ends[0], why, size);
        close(ends[0]);
        kill(pid, SIGKILL); /* it has closed its end, or has taken too long */
        reap(pid, &status);
        return strcmp(why, "ok") == 0 ? 0 : -EIO;
}
