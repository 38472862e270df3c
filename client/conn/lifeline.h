/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_CONN_LIFELINE_H
#define KVD_CLIENT_CONN_LIFELINE_H

/* This process' ends of lifelines: see ipc/base/lifeline.h. */

#include <stdint.h>

/* A number of this process, the same at each call; a forked child has another. */
int lifeline_process(uint64_t *ret);

/*
 * Keeps the descriptor open until the process ends, or the daemon has lost interest in it. On failure
 * it is closed.
 */
int lifeline_hold(int fd);

#endif
