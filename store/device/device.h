/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_DEVICE_DEVICE_H
#define KVD_STORE_DEVICE_DEVICE_H

/* Interface of spaces on a GPU for the rest of the store, in addition to their hooks. */

#include "store/cache/cache.h"
#include "store/cache/memory.h"

extern const struct memory_ops memory_device; /* memory.c */

/* chunk.c */
int device_open(struct store *store);
void chunks_lost(struct store *store); /* legacy handles: the exporter is gone */

/* semaphore.c */
struct semaphore_page { /* of a previous daemon, while one of its clients exists */
        struct semaphore_page *next;
        struct shared_file file; /* owned */
        uint32_t life;
};

struct semaphores { /* of a space */
        struct shared_file page; /* owned */
        struct semaphore_page *before; /* owned; list */
        bool settled;            /* all kept clients of these pages have been taken over */
};

int semaphores_new(struct space *space); /* creates the page, if the space is on a GPU */
uint64_t semaphores_bytes(const struct space *space); /* bytes of all its pages, for its account */
uint32_t semaphores_before(const struct space *space); /* number of pages of previous daemons */

#endif
