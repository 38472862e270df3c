/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_DAEMON_CHILDREN_OBJECTS_H
#define KVD_TESTS_DAEMON_CHILDREN_OBJECTS_H

/*
 * An object that is found by key and a chain of tokens, in one space of opaque blocks, as tests of
 * the tiers use them.
 */

#include <stdbool.h>

#include "client/kvd.h"

#define OBJECT_BLOCKS 3u    /* of the object, and of the chain */
#define OBJECT_BYTES 65536u /* of a block */
#define OBJECT_SALT 7u

/* sizes of blocks to test */
extern const uint32_t object_tokens[3];

kvd_space *object_space(kvd *handle, uint32_t block_tokens);
void object_seal(kvd_space *space);
/* Returns whether it is in the pool; checks its bytes. Objects of other names must not be there. */
bool object_is_there(kvd_space *space);
/* Returns n_below of a lookup that did not find it. */
uint32_t object_below(kvd_space *space);
/* Waits until the fetch has ended. Returns the number of blocks that it promised. */
int64_t object_fetch(kvd_space *space, uint64_t salt);

void beside_seal(kvd_space *space);       /* the chain */
uint32_t beside_blocks(kvd_space *space); /* that are in the pool; checks their bytes */
int64_t beside_fetch(kvd_space *space);   /* returns the number of tokens promised */

#endif
