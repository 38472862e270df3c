/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_BEFORE_H
#define KVD_STORE_CACHE_BEFORE_H

/*
 * The index of the daemon before, which nobody writes any more. What it says is verified piece by
 * piece; nothing else of it is believed.
 */

#include "store/core.h"

struct before {
        struct kvd_index header; /* a copy, verified */
        const uint8_t *at;       /* owned mapping, read-only */
        uint64_t bytes;
        uint32_t n_segments, ids;
        uint8_t *fate;           /* owned; of each id */
        uint32_t *path;          /* owned; room for a chain */
};

/* -EPROTO: no index of this version, or not as a daemon wrote it. Closed by before_close in any case. */
int before_open(int fd, struct before *b);
void before_close(struct before *b);

/* Of a segment's blocks, how many had memory, from the first on; which memory that was. */
uint32_t before_ready(const struct before *b, uint32_t segment);
uint32_t before_memory(const struct before *b, uint32_t segment);

/* The space, whose segments have their memory, gets all blocks. Returns how many are sealed. */
uint64_t before_give_blocks(struct before *b, struct space *space);

#endif
