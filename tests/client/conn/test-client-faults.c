/* SPDX-License-Identifier: Apache-2.0 */

/*
 * libkvd, while its n-th system call fails. Every call of the library must return in time with an
 * error text, every byte that is found must be right, and after everything is closed the process
 * must have no more descriptors and mappings than before. The daemon, whose calls do not fail, must
 * then hold nothing of the client and serve others.
 */

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "tests/lib/daemon_process.h"
#include "tests/lib/session.h"

/* Mappings of index, pin pages and pool in this process. */
static uint32_t mappings_left(void) {
        FILE *maps = fopen("/proc/self/maps", "re");
        char line[512];
        uint32_t n = 0;

        while (maps && fgets(line, sizeof line, maps))
                n += strstr(line, "memfd:kvd-") != NULL;
        fclose(maps);
        return n;
}

static void session(struct fault_state *s, void *arg) {
        uint32_t fds = fds_of(0);

        fault_install(s);
        s->on = true;
        session_run(arg);
        s->on = false;
        if (fds_of(0) != fds)
                die("descriptors are left over in the client");
        if (mappings_left())
                die("mappings are left over in the client");
}

static void service(struct fault_state *s, void *arg) {
        session_expect_service(arg);
}

static void run(struct fault_state *s, void *arg) {
        struct daemon_process *d = arg;

        fault_fork(s, session, d->in.socket, 300);
        instance_expect_clean(&d->in);
        fault_fork(s, service, d->in.socket, 300);
}

int main(void) {
        struct fault_state *s = fault_state_new();
        struct daemon_process d = {0};

        signal(SIGPIPE, SIG_IGN);
        fault_set(s, &(struct fault){.call = N_FAULT_CALLS});
        daemon_process_start(&d, s);
        fault_sweep(s, "client", 11, run, &d);
        daemon_process_stop(&d);
        return 0;
}
