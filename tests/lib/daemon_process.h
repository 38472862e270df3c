/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_PROCESS_H
#define KVD_TESTS_DAEMON_PROCESS_H

/* A daemon in a process of its own whose system fails, or does not: where s->fault.call is N_FAULT_CALLS. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "ipc/msg.h"
#include "tests/lib/fault.h"

struct conn;

struct daemon_process {
        pid_t pid;
        char dir[64], socket[96];
        const char *worker; /* the kvd that is its worker; NULL: it has none */
        bool later;         /* its system fails from when the test sets on, not from its start */
};

/* False: it could not start, said so, and ended without leaving anything. */
bool daemon_process_start(struct daemon_process *d, struct fault_state *s);
void daemon_process_stop(struct daemon_process *d, struct fault_state *s);
void daemon_process_sweep(struct daemon_process *d);

/* Says under which failure something is wrong, and ends the test. */
_Noreturn void daemon_process_wrong(const struct fault_state *s, const char *what);

bool daemon_is_quiet(struct conn *conn, uint32_t ms); /* nobody fills or holds anything */
void daemon_expect_sound(const struct fault_state *s, struct conn *conn);

uint32_t process_fds(pid_t pid);

#endif
