/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The daemon, while the n-th call into the system fails from its start on. It runs in a process of its own, so that
 * its clients' system is well; a session goes through everything, every request ends in time, the process of the
 * session goes, and then, with the system well again, the daemon must hold nothing of it, be sound, and serve.
 */

#include <signal.h>
#include <unistd.h>

#include "client/conn.h"
#include "client/kvd.h"
#include "tests/lib/fault.h"
#include "tests/lib/session.h"
#include "tests/lib/daemon_process.h"

/* ---- clients, in processes of their own ---------------------------------------------------------------------- */

static void session(struct fault_state *s, void *arg) {
        session_run(arg);
}

static void service(struct fault_state *s, void *arg) {
        session_expect_service(arg);
}

/* ---- one run ------------------------------------------------------------------------------------------------ */

/* Deleted spaces are taken apart when there is nothing else to do. */
static bool pool_is_empty(struct conn *conn, uint32_t ms) {
        struct kvd_msg_daemon_info_reply info = {.pool_used = 1};

        for (uint32_t i = 0; i < ms && info.pool_used; i++) {
                if (conn_call(conn, KVD_MSG_daemon_info, NULL, &info) < 0)
                        return false;
                usleep(i ? 1000 : 0);
        }
        return info.pool_used == 0;
}

static void expect_nothing_held(struct fault_state *s, struct daemon_process *d, uint32_t fds) {
        struct conn *conn;

        if (conn_open(d->socket, "check", &conn) < 0)
                daemon_process_wrong(s, kvd_error());
        if (!daemon_is_quiet(conn, 1000))
                daemon_process_wrong(s, "it holds what belonged to processes that are gone");
        daemon_expect_sound(s, conn);
        conn_close(conn);
        fault_fork(s, service, d->socket, 20);
        if (conn_open(d->socket, "check", &conn) < 0)
                daemon_process_wrong(s, kvd_error());
        if (!pool_is_empty(conn, 1000))
                daemon_process_wrong(s, "bytes of the pool are left over");
        conn_close(conn);
        for (int i = 0; i < 200 && process_fds(d->pid) != fds; i++)
                usleep(2000);
        if (process_fds(d->pid) != fds)
                daemon_process_wrong(s, "descriptors are left over");
}

static void run(struct fault_state *s, void *arg) {
        struct daemon_process d = {0};
        uint32_t fds;

        if (!daemon_process_start(&d, s)) { /* it said that it cannot start, and ended well */
                daemon_process_sweep(&d);
                return;
        }
        fds = process_fds(d.pid);
        fault_fork(s, session, d.socket, 30);
        s->on = false;
        expect_nothing_held(s, &d, fds);
        daemon_process_stop(&d, s);
        daemon_process_sweep(&d);
}

int main(void) {
        struct fault_state *s = fault_state_new();

        signal(SIGPIPE, SIG_IGN);
        fault_sweep(s, "daemon", run, NULL);
        return 0;
}
