/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_SHARED_PAGES_H
#define KVD_DAEMON_SERVE_SHARED_PAGES_H

/*
 * Clients and their GPU streams write to pages that they share with the daemon, and send no
 * message. So the daemon polls these pages.
 */

#include "daemon/base/loop.h"
#include "store/store.h"

struct shared_pages {
        struct loop *loop;
        struct store *store;
        struct loop_timer pins, semaphores; /* set only while there is something to poll */
        uint64_t pause_ns;                  /* between polls of semaphores */
};

void shared_pages_init(struct shared_pages *pages, struct loop *loop, struct store *store);
void shared_pages_stop(struct shared_pages *pages);

void shared_pages_watch_pins(struct shared_pages *pages); /* a space got a client */

/*
 * A block waits for its data, or for its readers to end: polls soon, and then less and less often.
 */
void shared_pages_watch_semaphores(struct shared_pages *pages);

#endif
