/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The worker takes one message after the other, does what it says and answers, until its owner is
 * gone: then the socket ends, or the kernel sends the signal that was asked for, whichever is
 * first. A message that it does not understand ends it, and the owner starts another one of its own
 * program.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "daemon/log.h"
#include "daemon/worker/main.h"
#include "daemon/worker/rests.h"
#include "ipc/base/sys.h"

#define NICE 10

struct process {
        int socket;
        struct kvd_decoder *decoder;
        struct spaces spaces;
        struct task task; /* what every task has */
        struct rests rests;
        uint8_t in[KVD_FRAME_MAX], out[KVD_FRAME_MAX], result[RESULT_BYTES];
};

/* ---- start ----------------------------------------------------------------------------------- */

static int is_our_socket(int fd) {
        unsigned n = sizeof(int);
        int type;

        return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) == 0 && type == SOCK_SEQPACKET;
}

/* Inference comes first, and if there is not enough memory for both, the worker goes. */
static void step_back(void) {
        int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

        setpriority(PRIO_PROCESS, 0, NICE);
        if (fd < 0)
                return;
        if (write(fd, "500", 3) < 0) {
                /* then it goes when its turn comes */
        }
        close(fd);
}

/* A terminal's signals are for the owner. */
static void bind_to_owner(void) {
        signal(SIGINT, SIG_IGN);
        signal(SIGHUP, SIG_IGN);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        prctl(PR_SET_NAME, "kvd-worker");
}

static struct process *worker; /* lives as long as the process */

static int worker_new(int socket, uint32_t threads, struct process **ret) {
        struct process *w = sys->calloc(1, sizeof *w);
        int r;

        if (!w)
                return -ENOMEM;
        w->socket = socket;
        w->task = (struct task){.ops = kvd_ops_pick(NULL), .result = w->result};
        *ret = w;
        r = threads_new(threads, &w->task.threads);
        return r < 0 ? r : kvd_decoder_new(&w->decoder);
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

/* 0, a negative errno with a line in spaces.why, or -ENOSYS: this is not for a worker. */
static int handle(struct process *w, const struct kvd_msg *m, const struct kvd_fds *fds,
                  struct kvd_msg *reply) {
        switch (m->number) {
        case KVD_MSG_work_space:
                return spaces_map(&w->spaces, &m->work_space, fds);
        case KVD_MSG_work_segments:
                return spaces_map_segments(&w->spaces, &m->work_segments, fds);
        case KVD_MSG_work_sketch:
                return spaces_map_sketch(&w->spaces, &m->work_sketch, fds);
        case KVD_MSG_work_unmap:
                return spaces_unmap_segment(&w->spaces, &m->work_unmap);
        case KVD_MSG_work_clear:
                return spaces_clear(&w->spaces, &m->work_clear, fds);
        case KVD_MSG_work_wake:
                return spaces_wake(&w->spaces, &m->work_wake, fds);
        case KVD_MSG_work_forget:
                rests_forget(&w->rests, m->work_forget.space);
                return spaces_forget(&w->spaces, m->work_forget.space);
        case KVD_MSG_work:
                do_job(w, m, reply);
                return 0;
        default:
                return -ENOSYS;
        }
}

static int answer(struct process *w, ssize_t size, struct kvd_fds *fds) {
        struct kvd_msg request, reply;
        ssize_t n;
        int r;

        if (kvd_msg_decode(w->decoder, w->in, (size_t)size, &request) < 0)
                return -EPROTO;
        reply = (struct kvd_msg){.number = request.number + KVD_REPLY, .serial = request.serial};
        r = handle(w, &request, fds, &reply);
        kvd_fds_close(fds);
        if (r == -ENOSYS)
                return r;
        if (w->spaces.device.broken) { /* and stays so: the next worker has another context */
                log_error("worker %d: the GPU fails: %s", getpid(), w->spaces.device.why.line);
                return -EIO;
        }
        if (r < 0) {
                reply.number = KVD_MSG_error;
                reply.error.code = (uint32_t)-r;
                reply.error.text = kvd_slice_cut(w->spaces.why.line, KVD_MOST_error_text);
        }
        n = kvd_msg_encode(&reply, w->out, sizeof w->out);
        return n < 0 ? (int)n : kvd_frame_send(w->socket, w->out, (size_t)n, NULL, 0);
}

static int serve(struct process *w) {
        struct kvd_fds fds;
        ssize_t n;
        int r = 0;

        while (r == 0) {
                n = kvd_frame_receive(w->socket, w->in, &fds, 0);
                if (n <= 0)
                        return n == 0 || n == -ECONNRESET ? 0 : (int)n;
                r = answer(w, n, &fds);
        }
        return r == -EPIPE || r == -ECONNRESET ? 0 : r;
}

int worker_main(int argc, char **argv) {
        int fd = argc > 2 ? atoi(argv[2]) : -1;
        int r;

        if (fd < 0 || !is_our_socket(fd)) {
                fprintf(stderr, "kvd: --worker is how the daemon starts its worker process; it is "
                                "not for people\n");
                return 1;
        }
        fcntl(fd, F_SETFD, FD_CLOEXEC);
        bind_to_owner();
        step_back();
        r = worker_new(fd, argc > 3 ? (uint32_t)atoi(argv[3]) : 1, &worker);
        if (r == 0)
                r = serve(worker);
        if (r < 0)
                log_error("worker %d ends: %s", getpid(), strerror(-r));
        return r < 0 ? 2 : 0;
}
