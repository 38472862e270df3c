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
struct semaphore_page { /* of a daemon before, while one of its clients is there */
        struct semaphore_page *next;
        struct shared_file file; /* owned */
        uint32_t life;
};

struct semaphores { /* of a space */
        struct shared_file page; /* owned */
        struct semaphore_page *before; /* owned; list */
        bool settled;            /* ... of which all clients have been taken over that were kept */
};

int semaphores_new(struct space *space); /* if the space has any */
uint64_t semaphores_bytes(const struct space *space); /* of all pages, for its account */
uint32_t semaphores_before(const struct space *space); /* how many are of before */

#endif
