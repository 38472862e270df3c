/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_RECLAIM_H
#define KVD_TESTS_KILLPOINTS_RECLAIM_H

/* How soon the daemon has reclaimed everything that a dead process held. */

#include <stdint.h>

struct conn;
struct instance;
struct stage;

/*
 * One look is a few requests that the daemon answers. On an idle machine, 400 looks take a tenth of
 * a second. The observer rests meanwhile, so that its pins are not taken for a dead process's.
 */
#define RECLAIM_LOOKS 400

/*
 * Lets the observer check once more what is left. Then waits until the observer is the only client,
 * all blocks but its own can be evicted, and no block is being filled, in limbo or leased. Returns
 * the nanoseconds since since_ns. Ends the test if this takes more than RECLAIM_LOOKS looks.
 */
uint64_t wait_reclaimed(struct conn *conn, struct stage *stage, uint64_t since_ns);

/* Number of the daemon's descriptors without those of segments, since the pool may have grown. */
uint32_t fds_beside_segments(const struct instance *d);

void evict_all(struct conn *conn); /* that no client uses */

uint64_t now_ns(void);

#endif
