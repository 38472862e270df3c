/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_LIFELINE_H
#define KVD_BASE_LIFELINE_H

/*
 * How the daemon learns that a process is gone where the kernel does not say so: the process is in a
 * pid namespace that the daemon does not see, and Linux is older than 6.5 (no SO_PEERPIDFD). The
 * daemon makes a pipe and sends its writing end to the client, which keeps it until its process
 * ends. The reading end is then used like a pidfd: it is readable when no process has the other end.
 *
 * Such an end is as good as a pidfd for memory of the host: the kernel closes a process' files after
 * its last thread has lost its memory. But it may close the GPU's files after the lifeline.
 *
 * Nothing is received from the client, so nothing can be forged. A client that closes its end too
 * early gains what it gains by forking and exiting: the child has all mappings, and the kernel says
 * that the client is gone. A client that gives its end to another process gains what that process
 * would have as a client. A child that it forks has the end, too, and so counts as the client until
 * it ends, or executes another program.
 */

#include <stdint.h>

/* Both ends are the caller's. */
int lifeline_new(int *reading, int *writing);
/* Another open file of the reading end, the caller's. */
int lifeline_reopen(int reading);
/* For so long after a lifeline was cut, its process' GPU work may not have been stopped; 0: a pidfd. */
uint64_t lifeline_delay_ns(int lifeline_or_pidfd);

#endif
