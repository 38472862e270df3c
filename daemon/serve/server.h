/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_SERVER_H
#define KVD_DAEMON_SERVE_SERVER_H

/* The server: takes connections, and has everything that their requests need. */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/config.h"
#include "daemon/base/loop.h"
#include "daemon/handlers/scratch.h"
#include "daemon/serve/rounds.h"
#include "daemon/serve/seats.h"
#include "daemon/serve/shared_pages.h"
#include "daemon/serve/turns.h"

struct backend;
struct child;
struct closer;
struct exporter;
struct keep;
struct worker;

struct server {
        const struct config *config; /* changes on reload */
        struct loop *loop;
        struct store *store;
        const struct backend *backend;       /* NULL: host memory */
        const struct keep *keep;             /* NULL: nothing outlives the daemon */
        struct kvd_decoder *decoder; /* owned */
        struct scratch *scratch;     /* owned */
        struct worker *worker;       /* owned */
        struct exporter *exporter;   /* owned; NULL: the pool has no exporter */

        struct closer *closer;       /* owned */
        struct loop_source listening;
        struct loop_timer retry;     /* accept failed: try again then */
        /* owned; given up to refuse a connection when there are no descriptors left */
        int spare;

        struct seats seats;
        struct turns turns;
        struct rounds rounds;
        struct shared_pages pages;

        uid_t overflow_uid;          /* see peer.h */
        uint64_t started_ns, instance;
        uint64_t requests, request_errors, bad_frames;
};

/* Descriptors that the clients of such a server may have the loop watch. */
uint32_t server_max_sources(const struct config *config);

int server_new(const struct config *config, struct loop *loop, struct store *store,
               struct server **ret);
struct server *server_free(struct server *server);
void server_freep(struct server **server);

/* Starts to accept. The socket stays the caller's. */
int server_listen(struct server *server, int fd);

/* Closes it where that harms nobody; -1 is fine. */
void server_close_connection(struct server *server, int fd, bool may_bring_fds);

/* The process that clears GPU memory, or makes it clear. */
struct child *server_memory_maker(struct server *server);

/* Stops accepting and ends all clients. */
void server_shut(struct server *server);

#endif
