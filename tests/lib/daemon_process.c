/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/daemon_process.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "daemon/base/identity.h"
#include "daemon/main/activation.h"
#include "daemon/main/daemon.h"
#include "tests/lib/inproc.h"

enum { EXIT_REFUSED = 3, EXIT_LOOP = 4, EXIT_LEAK = 5 };

/* ---- in the process -------------------------------------------------------------------------- */

static int serve(struct config *config, int ready) {
        const struct identity same = {.stays = true};
        struct daemon *daemon;
        struct kvd_why why;
        int r;

        if (daemon_new(config, &daemon, &why) < 0)
                return EXIT_REFUSED;
        if (daemon_handle_signals(daemon, NULL) < 0 ||
            daemon_listen(daemon, &ACTIVATION_NONE, &same, &why) < 0) {
                daemon_free(daemon);
                return EXIT_REFUSED;
        }
        if (write(ready, "r", 1) != 1)
                exit(EXIT_FAILURE);
        r = daemon_run(daemon);
        daemon_free(daemon);
        return r < 0 ? EXIT_LOOP : EXIT_SUCCESS;
}

static _Noreturn void be_daemon(const struct daemon_process *d, struct fault_state *s, int ready) {
        struct config config;
        uint32_t fds;
        sigset_t set;
        int r;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(600);
        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigprocmask(SIG_BLOCK, &set, NULL);
        inproc_configure(&config, d->in.socket, d->settings ?: SETTINGS("daemon.max_clients=16"));
        if (d->worker)
                snprintf(config.worker_program, sizeof config.worker_program, "%s", d->worker);
        fds = fds_of(0);
        if (s->fault.call < N_FAULT_CALLS) { /* otherwise no call fails */
                fault_install(s);
                s->on = !d->later;
        }
        r = serve(&config, ready);
        s->on = false;
        exit(fds_of(0) != fds ? EXIT_LEAK : r);
}

/* ---- from outside ---------------------------------------------------------------------------- */

/*
 * Checks the exit status. Descriptors that are left over, leaks that a sanitizer finds, and a loop
 * that ends with an error each give another status.
 */
static void expect_end(struct daemon_process *d, int expected) {
        int status = wait_status(d->in.pid);

        d->in.pid = 0;
        if (status != expected)
                die("the daemon ended with status %d%s", status,
                    status == EXIT_LEAK ? ": descriptors are left over" : "");
}

bool daemon_process_start(struct daemon_process *d, struct fault_state *s) {
        int ready[2];
        bool well;
        char byte;

        instance_make_dir(&d->in);
        if (pipe(ready) < 0)
                die("pipe: %s", strerror(errno));
        fflush(stdout);
        d->in.pid = fork();
        if (d->in.pid == 0) {
                close(ready[0]);
                be_daemon(d, s, ready[1]);
        }
        close(ready[1]);
        well = read(ready[0], &byte, 1) == 1;
        close(ready[0]);
        if (!well)
                expect_end(d, EXIT_REFUSED);
        return well;
}

void daemon_process_stop(struct daemon_process *d) {
        kill(d->in.pid, SIGTERM);
        expect_end(d, EXIT_SUCCESS);
        instance_sweep(&d->in);
}
