/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_DEVICE_DEVICE_H
#define KVD_STORE_DEVICE_DEVICE_H

/* Spaces on a GPU, from outside. What their parts are told of stands in hooks.c. */

#include "store/cache/cache.h"
#include "store/cache/memory.h"

extern const struct memory_ops memory_device; /* memory.c */

/* chunk.c */
int device_open(struct store *store);
void chunks_lost(struct store *store); /* legacy handles: whoever made the memory is gone */

/* semaphore.c */
struct semaphores { /* of a space */
        struct shared_file page; /* owned */
};

static inline shm_u64 *semaphore_words(const struct space *space) {
        return space->parts.semaphores->page.at;
}

int semaphores_new(struct space *space); /* if the space has any */

#endif
