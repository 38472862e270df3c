/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_LIFELINE_H
#define KVD_CLIENT_CONN_LIFELINE_H

/* This process' ends of lifelines: see ipc/base/lifeline.h. */

#include <stdint.h>

/* Gets the random number that identifies this process; a forked child has another. */
int lifeline_process(uint64_t *ret);

/*
 * Takes the descriptor, and keeps it open until the process ends or the daemon no longer watches
 * the other end. On failure it is closed.
 */
int lifeline_hold(int fd);

#endif
