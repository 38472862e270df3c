/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The loop of a process that works for the daemon. Requests arrive as messages on the descriptor
 * that it was started with, and replies are sent there.
 */

#include "daemon/process/child_end.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "ipc/base/sys.h"

static struct asked {
        const char *what;
        struct kvd_decoder *decoder;
        asked_answer *answer;
        struct kvd_why why;
        uint8_t in[KVD_FRAME_MAX], out[KVD_FRAME_MAX];
} asked; /* lives as long as the process */

static int answer(size_t size, struct kvd_fds *fds) {
        struct kvd_msg question, reply;
        ssize_t n;
        int r;

        if (kvd_msg_decode(asked.decoder, asked.in, size, &question) < 0)
                return -EPROTO;
        reply = (struct kvd_msg){.number = question.number + KVD_REPLY, .serial = question.serial};
        asked.why.line[0] = 0;
        r = asked.answer(&question, fds, &reply, &asked.why);
        if (r > 0)
                return -r;
        if (r < 0) {
                const char *why = asked.why.line[0] ? asked.why.line : strerror(-r);

                reply.number = KVD_MSG_error;
                reply.error.code = (uint32_t)-r;
                reply.error.text = kvd_slice_cut(why, KVD_MOST_error_text);
        }
        n = kvd_msg_encode(&reply, asked.out, sizeof asked.out);
        return n < 0 ? (int)n : kvd_frame_send(SYS_SPAWN_FD, asked.out, (size_t)n, NULL, 0);
}

static int serve(void) {
        int r = kvd_decoder_new(&asked.decoder);

        while (r == 0) {
                struct kvd_fds fds;
                ssize_t n = kvd_frame_receive(SYS_SPAWN_FD, asked.in, &fds, 0);

                if (n <= 0)
                        return n == 0 || n == -ECONNRESET ? 0 : (int)n;
                r = answer((size_t)n, &fds);
                kvd_fds_close(&fds);
        }
        return r == -EPIPE || r == -ECONNRESET ? 0 : r;
}

/*
 * False: the owner died before its death was a signal, so the process that made the connection is
 * not our parent. Its requests must not be served, since another owner may have reused the memory.
 */
static bool has_owner(void) {
        unsigned size = sizeof(struct ucred);
        struct ucred made_by;

        return getsockopt(SYS_SPAWN_FD, SOL_SOCKET, SO_PEERCRED, &made_by, &size) == 0 &&
               made_by.pid == getppid();
}

int asked_begin(const char *name, const char *option, const char *what) {
        unsigned size = sizeof(int);
        int type;

        asked.what = what;
        if (getsockopt(SYS_SPAWN_FD, SOL_SOCKET, SO_TYPE, &type, &size) < 0) {
                fprintf(stderr,
                        "kvd: %s is how the daemon starts its %s; it is not for manual use\n",
                        option, what);
                return 1;
        }
        fcntl(SYS_SPAWN_FD, F_SETFD, FD_CLOEXEC);
        signal(SIGINT, SIG_IGN);
        signal(SIGHUP, SIG_IGN);
        prctl(PR_SET_NAME, name);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        return has_owner() ? 0 : 1;
}

int asked_serve(asked_answer *answers) {
        int r;

        asked.answer = answers;
        r = serve();
        if (r < 0)
                log_error("%s %d ends: %s", asked.what, getpid(), strerror(-r));
        return r < 0 ? 2 : 0;
}
