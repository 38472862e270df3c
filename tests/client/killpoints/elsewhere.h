/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_ELSEWHERE_H
#define KVD_TESTS_KILLPOINTS_ELSEWHERE_H

/* What other clients of the same spaces do meanwhile. A failure ends the process with a message. */

#include "client/kvd.h"
#include "tests/client/killpoints/actor.h"

extern const struct kvd_space_options causal_options;

struct kvd *open_spaces(const char *socket, struct kvd_space **causal, struct kvd_space **whole);

/*
 * Publishes the first tokens of a chain, or of WHOLE_CHAIN, and disconnects. Returns the number of
 * blocks, or a negative errno.
 */
int publish_elsewhere(const char *socket, uint32_t chain, uint32_t n_tokens);

/*
 * Partners that hold the lease of WHOLE_CHAIN until a while after the operation has begun. The
 * first publishes the prefix, the second does not.
 */
void finishes(const char *socket, struct stage *stage, int ready);
void gives_up(const char *socket, struct stage *stage, int ready);

/*
 * Overwrites all free blocks, publishes chains with the same beginning as those that operations
 * look up, and ends the process.
 */
_Noreturn void rewrite_all(const char *socket);

#endif
