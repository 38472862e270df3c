/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_WORKER_TEAM_H
#define KVD_DAEMON_WORKER_TEAM_H

/* Threads that share out the numbers below n: a job's blocks, or its layers and heads. */

#include <stdint.h>

struct team;

/* threads: the caller included. With fewer than wanted the team is smaller. NULL: out of memory. */
struct team *team_new(uint32_t threads);
uint32_t team_threads(const struct team *team);

/* Calls piece for each i below n, in any order and on any thread; thread is below team_threads. Returns after the last. */
typedef void team_piece(void *data, uint32_t i, uint32_t thread);
void team_run(struct team *team, uint32_t n, team_piece *piece, void *data);

#endif
