/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_RECLAIM_H
#define KVD_TESTS_KILLPOINTS_RECLAIM_H

/* How soon nothing is left of a process that died. */

#include <stdint.h>

struct conn;
struct instance;
struct stage;

/*
 * A look is a few requests that the daemon answers: where nothing else runs, 400 of them are a
 * tenth of a second. On a busy machine they take longer, as everything does. One counts if the
 * observer has looked, too, since the one before: what it has pinned while it has no processor is no
 * dead process's. Where a hundred times as many do not count, it has ended.
 */
#define RECLAIM_LOOKS 400

/*
 * Waits until all blocks but the observer's can be evicted and nothing is filled, in limbo or
 * leased, and until the observer is the only client. Returns the nanoseconds since then. Ends the
 * test if that is not so after RECLAIM_LOOKS.
 */
uint64_t wait_reclaimed(struct conn *conn, const struct stage *stage, uint64_t since_ns);

/* The daemon's, without those of segments: the pool may have grown. */
uint32_t fds_beside_segments(const struct instance *d);

void evict_all(struct conn *conn); /* that nobody uses */

uint64_t now_ns(void);

#endif
