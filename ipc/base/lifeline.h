/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_LIFELINE_H
#define KVD_BASE_LIFELINE_H

/*
 * Tells the daemon that a process is gone if there is no pidfd for it: the process is in a pid
 * namespace that the daemon does not see, and Linux is older than 6.5 (no SO_PEERPIDFD). The daemon
 * makes a pipe and sends its writing end to the client, which keeps it open until its process ends.
 * The daemon uses the reading end like a pidfd: it becomes readable when no process has the writing
 * end open.
 *
 * For host memory a lifeline is as good as a pidfd: the kernel closes the files of a process after
 * its last thread has lost its memory. But it may close the GPU's files after the lifeline.
 *
 * The daemon receives nothing from the client, so nothing can be forged. A client that closes its
 * end too early gains only what it could gain by forking and exiting: the child has all mappings,
 * and the kernel reports that the client is gone. A client that gives its end to another process
 * gains only what that process would have as a client. A forked child inherits the end, and so
 * counts as the client until it exits or executes another program.
 */

#include <stdint.h>

/* Both ends are the caller's. */
int lifeline_new(int *reading, int *writing);
/* Opens the reading end again, as another open file; the descriptor is the caller's. */
int lifeline_reopen(int reading);
/* How long the GPU work of a process may continue after its lifeline was cut; 0 for a pidfd. */
uint64_t lifeline_delay_ns(int lifeline_or_pidfd);

#endif
