/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CHECK_H
#define KVD_STORE_CHECK_H

#include "store/internal.h"

struct walk {
        struct space *space;
        struct check_report *report;
        uint64_t waiting; /* blocks, while they are counted */
};

/* Counts a broken invariant, and keeps the first one in words. */
_printf_(3, 4) void expect(struct walk *w, bool holds, const char *format, ...);

void check_order(struct walk *w);     /* semaphore.c: O1 and following */
void check_sequences(struct walk *w); /* sequence/check.c: Q1 and following */

#endif
