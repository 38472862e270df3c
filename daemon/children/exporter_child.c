/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The exporter gets one kind of request: to allocate the memory of a space. Before the pool is
 * opened, another exporter is started to find out whether the driver supplies handles
 * (exporter_probe).
 */

#include "daemon/children/exporter_child.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/children/worker_jobs.h"
#include "ipc/base/device.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define PAUSE_NS UINT64_C(1000000000) /* before another exporter is started */
#define SOON_NS UINT64_C(1000000)
#define PATIENCE_NS UINT64_C(20000000000)
#define PROBE_MS 10000

struct exporter {
        struct child child;
        struct store *store;
        const struct worker *worker;
        uint32_t number; /* of the memory requested last */
};

static struct exporter *exporter_of(const struct child *child) {
        return container_of(child, struct exporter, child);
}

/* ---- requests and replies -------------------------------------------------------------------- */

/* A worker that still has a deleted space mapped must unmap it first; it is asked to elsewhere. */
static bool next(struct child *child) {
        struct kvd_msg msg = {.number = KVD_MSG_export};
        struct exporter *e = exporter_of(child);
        struct store_export export;

        if (worker_is_forgetting(e->worker)) {
                child_look_after(child, SOON_NS);
                return false;
        }
        if (!store_next_export(e->store, &export))
                return false;
        e->number = msg.export.number = export.number;
        msg.export.bytes = export.bytes;
        msg.export.device = (struct kvd_slice){export.device, 16};
        return child_ask_or_end(child, &msg, NULL);
}

static bool fits(const struct child *child, const struct kvd_msg *m) {
        return m->export_reply.handle.size == CU_IPC_HANDLE_BYTES;
}

static void answered(struct child *child, uint32_t asked, const struct kvd_msg *m) {
        struct exporter *e = exporter_of(child);

        if (m->number == KVD_MSG_export_reply) {
                child_worked(child);
                store_export_done(e->store, e->number, m->export_reply.handle.data);
                return;
        }
        child_failed(child, m->error.text);
        log_limited(LOG_WARNING, "exporter %d cannot allocate memory: %s", child->pid,
                    child_why(child));
        store_clear_failed(e->store);
}

/* ---- its process ----------------------------------------------------------------------------- */

static int prepare(struct child *child) {
        memcpy(child->arguments, (char *[]){"kvd", "--exporter", NULL},
               3 * sizeof *child->arguments);
        return 0;
}

static void ended(struct child *child, uint32_t asked) {
        struct exporter *e = exporter_of(child);

        log_error("the pool's memory was lost with the exporter: all spaces start empty");
        if (asked)
                child_failed(child,
                             kvd_slice_of("the exporter ended while allocating; see the log"));
        store_exporter_gone(e->store);
        loop_want_idle(child->loop);
}

static const struct child_ops ops = {
        .name = "exporter",
        .degraded = KVD_DEGRADED_exporter,
        .prepare = prepare,
        .ended = ended,
        .next = next,
        .fits = fits,
        .answered = answered,
};

int exporter_new(const struct config *config, struct loop *loop, struct store *store,
                 const struct worker *worker, struct exporter **ret) {
        struct exporter *e = sys->calloc(1, sizeof *e);
        int r;

        if (!e)
                return -ENOMEM;
        *e = (struct exporter){.store = store, .worker = worker};
        r = child_init(&e->child, &ops, config->worker_program, loop);
        e->child.patience_ns = PATIENCE_NS;
        e->child.pause_ns = e->child.most_pause_ns = PAUSE_NS;
        if (r < 0) {
                exporter_free(e);
                return r;
        }
        *ret = e;
        return 0;
}

struct exporter *exporter_free(struct exporter *e) {
        if (!e)
                return NULL;
        child_clear(&e->child);
        free(e);
        return NULL;
}

struct child *exporter_child(struct exporter *e) {
        return &e->child;
}

/* ---- probe ----------------------------------------------------------------------------------- */

/* Reads all that the process writes, until it closes its end or is silent for PROBE_MS. */
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

static pid_t start_probe(const char *program, const uint8_t uuid[16], int end) {
        char text[33];

        for (int i = 0; i < 16; i++)
                snprintf(text + 2 * i, 3, "%02x", uuid[i]);
        return child_spawn(program, (char *const[]){"kvd", "--exporter", text, NULL}, end);
}

int exporter_probe(const char *program, const uint8_t uuid[16], char *why, size_t size) {
        int ends[2];
        pid_t pid;

        if (!program[0] || sys->socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) {
                snprintf(why, size, "an exporter cannot be started");
                return -ENOSYS;
        }
        pid = start_probe(program, uuid, ends[1]);
        if (pid < 0) {
                snprintf(why, size, "an exporter cannot be started: %s", strerror(-pid));
                close(ends[0]);
                return pid;
        }
        hear(ends[0], why, size);
        close(ends[0]);
        child_kill(pid); /* it has closed its end, or has taken too long */
        return strcmp(why, "ok") == 0 ? 0 : -EIO;
}
