/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_ELSEWHERE_H
#define KVD_TESTS_KILLPOINTS_ELSEWHERE_H

/* What other clients of the same spaces do meanwhile. A failure ends the process with a line. */

#include "client/kvd.h"
#include "tests/client/killpoints/actor.h"

extern const struct kvd_space_options causal_options;

struct kvd *open_spaces(const char *socket, struct kvd_space **causal, struct kvd_space **whole);

/*
 * Publishes a chain's first tokens, or those of WHOLE_CHAIN, and leaves. Number of blocks, or a
 * negative errno.
 */
int publish_elsewhere(const char *socket, uint32_t chain, uint32_t n_tokens);

/*
 * Holds the lease of WHOLE_CHAIN until a while after the operation has begun; publishes it, or not.
 */
void finishes(const char *socket, struct stage *stage, int ready);
void gives_up(const char *socket, struct stage *stage, int ready);

/*
 * Writes over blocks that are free, publishes relatives of what operations look up, and ends the
 * process.
 */
_Noreturn void rewrite_all(const char *socket);

#endif
