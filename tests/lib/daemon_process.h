/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_PROCESS_H
#define KVD_TESTS_DAEMON_PROCESS_H

/*
 * A daemon in a process of its own whose system fails, or does not: where s->fault.call is
 * N_FAULT_CALLS.
 */

#include "tests/lib/fault.h"
#include "tests/lib/instance.h"

struct daemon_process {
        struct instance in;
        const char *worker; /* the kvd that is its worker; NULL: it has none */
        const char *const *settings; /* NULL: few clients */
        bool later;         /* its system fails from when the test sets on, not from its start */
};

/* False: it could not start, said so, and ended without leaving anything but its directory. */
bool daemon_process_start(struct daemon_process *d, struct fault_state *s);
void daemon_process_stop(struct daemon_process *d); /* and sweeps up */

#endif
