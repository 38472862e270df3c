/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Notifies clients without a message: they sleep on a word of the index (FUTEX_WAIT in their
 * read-only mapping), and the store increments it and wakes them.
 */

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "store/cache/inside.h"

/* Partner: clients that read the word before they sleep (client/methods/sync.c, client/cache/lease.c). */
void epoch_move(shm_u32 *epoch) {
        atomic_fetch_add_explicit(epoch, 1, memory_order_release);
        syscall(SYS_futex, epoch, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void sync_news(struct space *space) {
        epoch_move(&space->ix->sync_epoch);
}

void job_news(struct space *space) {
        epoch_move(&space->ix->job_epoch);
}
