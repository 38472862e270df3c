/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_SERVER_H
#define KVD_DAEMON_SERVE_SERVER_H

/* The server accepts connections and has everything that their requests need. */

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
struct large_pages;
struct exporter;
struct keep;
struct worker;

struct server {
        const struct config *config; /* its contents change on reload */
        struct loop *loop;
        struct store *store;
        const struct backend *backend; /* NULL: host memory */
        const struct keep *keep;       /* NULL: no keeper of descriptors */
        struct kvd_decoder *decoder;   /* owned */
        struct scratch *scratch;       /* owned */
        struct worker *worker;         /* owned */
        struct exporter *exporter;     /* owned; NULL: the pool has no exporter */

        struct closer *closer;     /* owned */
        struct large_pages *large; /* owned */
        struct loop_source listening;
        struct loop_timer retry; /* next attempt after accept failed */
        /* owned; closed to accept and refuse a connection when no descriptors are left */
        int spare;

        struct seats seats;
        struct turns turns;
        struct rounds rounds;
        struct shared_pages pages;

        uid_t overflow_uid; /* see ipc/base/user.h */
        uint64_t started_ns, instance;
        uint64_t requests, request_errors, bad_frames;
};

/* Maximum number of descriptors that the loop watches for clients, socket and child processes. */
uint32_t server_max_sources(const struct config *config);

int server_new(const struct config *config, struct loop *loop, struct store *store,
               struct server **ret);
struct server *server_free(struct server *server);
void server_freep(struct server **server);

/* Starts to accept connections. The socket stays the caller's. */
int server_listen(struct server *server, int fd);

/* Closes a connection; a thread does it if that may take long (closer.h). fd may be -1. */
void server_close_connection(struct server *server, int fd, bool may_bring_fds);

/* The child process that clears GPU memory, or that makes cleared memory (the exporter). */
struct child *server_memory_maker(struct server *server);

/* Stops accepting and ends all clients. */
void server_shut(struct server *server);

#endif
