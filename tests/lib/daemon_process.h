/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_PROCESS_H
#define KVD_TESTS_DAEMON_PROCESS_H

/*
 * A daemon in a process of its own, whose system calls fail as s->fault says. None fails if
 * s->fault.call is N_FAULT_CALLS.
 */

#include "tests/lib/fault.h"
#include "tests/lib/instance.h"

struct daemon_process {
        struct instance in;
        const char *worker;          /* path of the kvd that runs as its worker; NULL: no worker */
        const char *const *settings; /* NULL: only max_clients=16 */
        bool later;                  /* calls fail once the test sets s->on, not from the start */
};

/* False: it could not start, reported that, and left nothing but its directory. */
bool daemon_process_start(struct daemon_process *d, struct fault_state *s);
void daemon_process_stop(struct daemon_process *d); /* and removes its directory */

#endif
