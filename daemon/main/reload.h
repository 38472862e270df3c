/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_MAIN_RELOAD_H
#define KVD_DAEMON_MAIN_RELOAD_H

/*
 * Reads the configuration again, in a thread: the loop must not wait for a disk that sleeps, or for
 * a server that resolves the names of users.
 */

#include <pthread.h>
#include <stdbool.h>

#include "daemon/base/config.h"
#include "daemon/base/loop.h"

struct options;

struct reload {
        const struct options *options;
        /* Called in the loop, with what options_load returned. It takes over *next. */
        void (*loaded)(struct reload *reload, int r, struct config *next, struct kvd_why *why);

        struct loop_source done; /* its fd is owned; -1 */
        pthread_t thread;
        bool runs, again;   /* again: requested once more since it began */
        struct config next; /* belongs to the thread until it is done */
        struct kvd_why why;
        int r;
};

#define RELOAD_NONE ((struct reload){.done.fd = -1})

int reload_init(struct reload *reload, struct loop *loop);
void reload_close(struct reload *reload); /* cancels the thread */

/* False: no thread could be started. */
bool reload_begin(struct reload *reload);

#endif
