/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_RECLAIM_H
#define KVD_TESTS_KILLPOINTS_RECLAIM_H

/* How soon nothing is left of a process that died. */

#include <stdint.h>

struct conn;
struct instance;

/*
 * A look is a few requests that the daemon answers, and cleaning up has its share of the time beside
 * them: some looks where nothing else runs, and hundreds where the daemon loses the processor in
 * the middle of it. After so many something is held for ever.
 */
#define RECLAIM_LOOKS 4000

/*
 * Waits until all blocks but the observer's can be evicted and nothing is filled, in limbo or
 * leased, and until the observer is the only client. Returns the nanoseconds since then. Ends the
 * test if that is not so after RECLAIM_LOOKS.
 */
uint64_t wait_reclaimed(struct conn *conn, uint64_t since_ns);

/* The daemon's, without those of segments: the pool may have grown. */
uint32_t fds_beside_segments(const struct instance *d);

void evict_all(struct conn *conn); /* that nobody uses */

uint64_t now_ns(void);

#endif
