/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of the store's parts; each defines its row in its own file. Rows are called in this
 * order, also when a space ends, so that sequences end before the memory of their copies.
 */

#include "store/hooks.h"

#define PARTS(ROW) \
        ROW(semaphore) \
        ROW(drain) \
        ROW(relief) \
        ROW(keydiff_priority) \
        ROW(keydiff_compact) \
        ROW(sequence) \
        ROW(summaries) \
        ROW(bicache) \
        ROW(hshare) \
        ROW(memshare) \
        ROW(memshare_calibrate) \
        ROW(kvreviver_cool) \
        ROW(kvreviver_revive) \
        ROW(kvreviver_sketch) \
        ROW(tier) \
        ROW(file) \
        ROW(remote)

#define DECLARE(part) extern const struct hooks part##_hooks;
PARTS(DECLARE)

#define ENTER(part) &part##_hooks,
const struct hooks *const store_hooks[] = {PARTS(ENTER) NULL};
