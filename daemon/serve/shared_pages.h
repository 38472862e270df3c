/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_SHARED_PAGES_H
#define KVD_DAEMON_SERVE_SHARED_PAGES_H

/*
 * Clients and their streams write into pages that they share with us, without a word. So we look at
 * them, now and then.
 */

#include "daemon/base/loop.h"
#include "store/store.h"

struct shared_pages {
        struct loop *loop;
        struct store *store;
        struct loop_timer pins, semaphores; /* set only while there is something to see */
        uint64_t pause_ns;                  /* of the semaphores */
};

void shared_pages_init(struct shared_pages *pages, struct loop *loop, struct store *store);
void shared_pages_stop(struct shared_pages *pages);

void shared_pages_watch_pins(struct shared_pages *pages); /* there is a client */

/*
 * A block waits for its data, or for its readers: look soon whether the data has come, or they are
 * gone.
 */
void shared_pages_watch_semaphores(struct shared_pages *pages);

#endif
