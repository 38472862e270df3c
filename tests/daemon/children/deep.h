/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_CHILDREN_DEEP_H
#define KVD_TESTS_DAEMON_CHILDREN_DEEP_H

/* A chain that is longer than a request to fetch it, in a space of its own, named "deep". */

#include <stdbool.h>

#include "client/kvd.h"

#define DEEP_TOKENS 131072u
#define DEEP_BYTES 8388608u
#define DEEP_BLOCKS (DEEP_TOKENS / deep_block_tokens)
#define DEEP_BLOCK_BYTES (DEEP_BYTES / DEEP_BLOCKS)

extern uint32_t
        deep_block_tokens; /* 64, or 16: as many blocks as a bidirectional prefix may have */

const uint32_t *deep_tokens(void);                   /* DEEP_TOKENS of them */
kvd_space *deep_space(kvd *handle, uint32_t kind);   /* kind: enum kvd_kind; 0: causal */
void deep_seal(kvd_space *space, uint32_t n_blocks); /* the first n blocks */
/* Returns the number of resident tokens; checks their bytes. *below: as a lookup reports it. */
uint32_t deep_resident(kvd_space *space, uint32_t *below);
/* Fetches once, and waits for the end. False: there was nothing to wait for. */
bool deep_fetch(kvd_space *space);

#endif
