/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_ADMIT_H
#define KVD_STORE_FILE_ADMIT_H

/* The conditions under which a block is written to a tier below the pool. */

#include "store/cache/cache.h"

bool admit_can_be_written(const struct space *space, uint32_t id);
/* Could a fetch bring the block back? Not if it is too deep in its chain, or not full. */
bool admit_can_return(const struct space *space, uint32_t id);
/*
 * Can the block be picked, to be written together with all blocks before it? In a bidirectional
 * prefix only the last block can, provided that the whole prefix can be fetched back.
 */
bool admit_can_lead(const struct space *space, uint32_t id);
/* The mark (struct block_record) of a block whose record was evicted. */
uint32_t admit_evicted(const struct space *space, uint32_t id);
/* The block was not written, for lack of room: it is admitted at its next use. */
void admit_give_up(struct space *space, uint32_t id);
/*
 * depth: a block that ends at or beyond this many tokens is admitted at its first use. A block that
 * has a record was admitted before. evicts: one whose record was evicted is admitted at its next
 * use. Subtracts the number of pin pages that it reads from *reads.
 */
bool admit_block(struct space *space, uint32_t id, uint32_t depth, bool evicts, uint32_t *reads);

#endif
