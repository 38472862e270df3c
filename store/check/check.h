/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CHECK_CHECK_H
#define KVD_STORE_CHECK_CHECK_H

#include "store/cache/cache.h"

/* One piece of a walk through a space: space_check calls these, and nothing else does. */
struct walk {
        struct space *space;
        struct check_report *report;
        uint64_t waiting; /* blocks, while they are counted */
};

/* Counts a broken invariant, and keeps the first one in words. */
_printf_(3, 4) void expect(struct walk *w, bool holds, const char *format, ...);

void check_cache(struct walk *w);              /* sums over the space: S1 and following */
void check_block(struct walk *w, uint32_t id); /* one block: B1 and following */
void check_sequences(struct walk *w);          /* Q1 and following */
void check_chunks(struct walk *w);             /* GPU memory: G1 */
/* blocks whose data is not there: F1 and following */
void check_pending(struct walk *w);

#endif
