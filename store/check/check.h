/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CHECK_CHECK_H
#define KVD_STORE_CHECK_CHECK_H

#include "store/cache/cache.h"

/* One call of space_check: a piece of a walk through a space. */
struct walk {
        struct space *space;
        struct check_report *report;
        struct audit *audit;
        uint64_t spent; /* estimated time so far, in nanoseconds */
};

#define CHECK_SPENDS 400000u /* nanoseconds in one call, about */

/* Counts a broken invariant, and keeps the first one in words. */
_printf_(3, 4) void expect(struct walk *w, bool holds, const char *format, ...);

/* A hash. Sums of these are equal if, and almost certainly only if, the sets of numbers are. */
static inline uint64_t check_mixed(uint64_t number) {
        number = (number + 1) * UINT64_C(0x9e3779b97f4a7c15);
        return (number ^ number >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
}

static inline bool check_may_go_on(const struct walk *w) {
        return w->spent < CHECK_SPENDS;
}

/* Each checks a piece from *at on, and moves *at. True: it was the last piece. */
bool check_totals(struct walk *w, uint64_t *at);    /* S2 and others; G1 */
bool check_blocks(struct walk *w, uint64_t *at);    /* B1 and following, and those of lists */
bool check_table(struct walk *w, uint64_t *at);     /* S3 */
bool check_run_table(struct walk *w, uint64_t *at); /* S4 */
bool check_sequences(struct walk *w, uint64_t *at); /* Q9 and following */
bool check_records(struct walk *w, uint64_t *at);   /* file.c */
bool check_places(struct walk *w, uint64_t *at);    /* Q21 */

/* At the end: compare what was counted on the way, if nothing has changed since the beginning. */
void check_cache_sums(struct walk *w);
void check_sequence_sums(struct walk *w);
void check_pending_sums(struct walk *w);
void check_charges(struct walk *w); /* S16 */

void check_chunks(struct walk *w);               /* GPU memory: G1 */
void check_pending(struct walk *w, uint32_t id); /* a pending or poisoned block: F1 to F3 */
void check_private(struct walk *w, uint32_t id); /* a private block, or one being revived */

#endif
