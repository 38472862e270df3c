/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_SUMMARIES_H
#define KVD_STORE_SUMMARIES_H

/* The summaries of a space's blocks (ipc/base/summary.h), which methods compare blocks by. */

#include "store/cache/cache.h"

/* The block is sealed and its data is there: it needs a summary, if a method reads summaries. */
void summary_want(struct space *space, uint32_t id);
/* bytes of the file of summaries; 0 if none yet */
uint64_t summaries_bytes(const struct space *space);

#endif
