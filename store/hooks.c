/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of the store's parts; each defines its row in its own file. Rows are called in this
 * order, also when a space ends, so that sequences end before the memory of their copies. The
 * methods' parts, in the middle, are those of methods.def.
 */

#include "store/hooks.h"

#define FIRST(ROW) ROW(semaphore) ROW(drain) ROW(relief) ROW(sequence) ROW(summaries)
#define LAST(ROW) ROW(place) ROW(below) ROW(file) ROW(remote)

#define DECLARE(part) extern const struct hooks part##_hooks;
#define KVD_PART DECLARE
FIRST(DECLARE)
#include "ipc/base/methods.def"
LAST(DECLARE)

#define ENTER(part) &part##_hooks,
#define KVD_PART ENTER
const struct hooks *const store_hooks[] = {FIRST(ENTER)
#include "ipc/base/methods.def"
                                                   LAST(ENTER) NULL};
