/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_RECLAIM_H
#define KVD_TESTS_KILLPOINTS_RECLAIM_H

/* How long the daemon takes until nothing is left of a process that died. */

#include <stdint.h>

struct conn;
struct daemon;

#define RECLAIM_LIMIT_MS 100

/*
 * Waits until all blocks but the observer's can be evicted and nothing is filled, in limbo or leased, and until the
 * observer is the only client. Returns the nanoseconds since then. Ends the test if that is not so after 10 s.
 */
uint64_t wait_reclaimed(struct conn *conn, uint64_t since_ns);

/* The daemon's, without those of segments: the pool may have grown. */
uint32_t fds_beside_segments(const struct daemon *d, struct conn *conn);

void evict_all(struct conn *conn); /* that nobody uses */

uint64_t now_ns(void);

#endif
