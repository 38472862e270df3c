/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This table lists the parts of the store; each has its row in its own file. Rows are called in this order. A space ends
 * in it, too, so that sequences are gone before the memory of their copies.
 */

#include "store/hooks.h"

extern const struct hooks semaphore_hooks, drain_hooks, sequence_hooks, tier_hooks;
extern const struct hooks relief_hooks, summaries_hooks, bicache_hooks, hshare_hooks, memshare_hooks;
extern const struct hooks memshare_calibrate_hooks, keydiff_priority_hooks, keydiff_compact_hooks;
extern const struct hooks kvreviver_cool_hooks, kvreviver_revive_hooks, kvreviver_sketch_hooks;

const struct hooks *const store_hooks[] = {
        &semaphore_hooks, &drain_hooks,
        &relief_hooks, &keydiff_priority_hooks, &keydiff_compact_hooks,
        &sequence_hooks,
        &summaries_hooks, &bicache_hooks, &hshare_hooks, &memshare_hooks, &memshare_calibrate_hooks,
        &kvreviver_cool_hooks, &kvreviver_revive_hooks, &kvreviver_sketch_hooks,
        &tier_hooks, NULL};
