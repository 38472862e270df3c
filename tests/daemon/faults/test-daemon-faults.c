/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemon, while its n-th system call from its start on fails. The daemon has a process of its
 * own, so that its clients' calls do not fail. A session makes every kind of request; each must end
 * in time. Once the session's process has ended and calls succeed again, the daemon must hold
 * nothing of the session, be sound, and serve.
 */

#include <signal.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "tests/lib/fault.h"
#include "tests/lib/session.h"
#include "tests/lib/daemon_process.h"

/* ---- clients, in their own processes --------------------------------------------------------- */

static void session(struct fault_state *s, void *arg) {
        session_run(arg);
}

static void service(struct fault_state *s, void *arg) {
        session_expect_service(arg);
}

/* ---- one run --------------------------------------------------------------------------------- */

/* Deleted spaces are freed only when the daemon is idle. */
static bool pool_is_empty(const struct instance *in) {
        struct kvd_msg_daemon_info_reply info = {.pool_used = 1};
        struct conn *conn = instance_connect(in);

        if (conn_call(conn, KVD_MSG_daemon_info, NULL, &info) < 0)
                die("daemon_info: %s", kvd_error());
        conn_close(conn);
        return info.pool_used == 0;
}

static void expect_nothing_held(struct fault_state *s, struct daemon_process *d, uint32_t fds) {
        instance_expect_clean(&d->in);
        fault_fork(s, service, d->in.socket, 300);
        WAIT_UNTIL(pool_is_empty(&d->in));
        WAIT_UNTIL(instance_fds(&d->in) == fds);
}

static void run(struct fault_state *s, void *arg) {
        struct daemon_process d = {0};
        uint32_t fds;

        if (!daemon_process_start(&d, s)) { /* it reported why, and ended cleanly */
                instance_sweep(&d.in);
                return;
        }
        fds = instance_fds(&d.in);
        fault_fork(s, session, d.in.socket, 300);
        s->on = false;
        expect_nothing_held(s, &d, fds);
        daemon_process_stop(&d);
}

int main(void) {
        struct fault_state *s = fault_state_new();

        signal(SIGPIPE, SIG_IGN);
        fault_sweep(s, "daemon", 11, run, NULL);
        return 0;
}
