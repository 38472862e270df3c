/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_ADMIT_H
#define KVD_STORE_FILE_ADMIT_H

/* What the tiers below the pool ask of a block before they take it. */

#include "store/cache/cache.h"

bool admit_can_be_written(const struct block *b);
/* Could a fetch bring it back? Not if it lies too deep in its chain, or is not full. */
bool admit_can_return(const struct space *space, uint32_t id);
/*
 * May it be written, with all that it is behind? Of a bidirectional prefix it is the last block, and
 * the prefix is one that can come back, whole.
 */
bool admit_can_lead(const struct space *space, uint32_t id);
/*
 * depth: tokens that end with a block which is taken at its first use; what is in the file was
 * admitted already. Takes the pin pages that it reads from *reads.
 */
bool admit_block(struct space *space, uint32_t id, uint32_t depth, uint32_t *reads);

#endif
