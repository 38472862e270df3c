/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVER_H
#define KVD_DAEMON_SERVER_H

/*
 * The server: takes connections and knows its clients. Everything that a request needs is here and was allocated
 * before the first client came.
 */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/config.h"
#include "daemon/loop.h"
#include "ipc/frame.h"
#include "ipc/msg.h"
#include "store/store.h"

#define SERVER_HALF_OPEN 64u       /* connections that have not attached yet */
#define SERVER_USER_HALF_OPEN 32u  /* of one user */
#define SERVER_ATTACH_NS UINT64_C(1000000000) /* a connection has this long to attach */

struct client;
struct backend;
struct child;
struct exporter;
struct worker;

/* Room for what one request carries, copied from its frame to where it is aligned, and for its answer. */
struct scratch {
        uint8_t in[KVD_FRAME_MAX], out[KVD_FRAME_MAX];
        kvd_ref blocks[4096], sealed[4096];
        uint32_t tokens[15360];
        uint8_t states[32768];
        uint32_t parents[12288];     /* a frame has room for so many, and their states */
        uint32_t ids[8192];
        uint64_t counters[64];
        struct check_report report;
        struct chain_info chain;
        uint32_t numbers[8192];
        struct kvd_change changes[KVD_SYNC_CHANGES];
        uint8_t layers[1024], heads[32768];
        double settings[KVD_N_SETTINGS];
        struct profile_report profile;
        char why[256];
};

struct server {
        const struct config *config; /* changes on reload */
        struct loop *loop;
        struct store *store;
        const struct backend *backend;       /* NULL: host memory */
        struct kvd_decoder *decoder; /* owned */
        struct scratch *scratch;     /* owned */
        struct worker *worker;       /* owned */
        struct exporter *exporter;   /* owned; NULL: the pool has no exporter */

        struct loop_source listening;
        struct loop_timer retry;     /* accept failed: try again then */
        int spare;                   /* owned; given up to refuse a connection when there are no descriptors left */

        struct client *clients;      /* owned; n_seats of them, used or not */
        uint32_t n_seats;
        struct client *unused;       /* list */
        struct client *half_open;    /* list, oldest first */
        uint32_t n_half_open;
        uint32_t n_attached;         /* those whose process still runs behind a closed socket included */
        struct loop_timer deadline;  /* of the oldest half-open one */

        struct loop_timer order;     /* to see what streams have done */
        uint64_t order_pause_ns;

        struct loop_timer pins;      /* to see what clients hold; only while there are any */

        uint64_t started_ns, instance;
        uint64_t requests, request_errors, bad_frames;
};

/* Descriptors that the clients of such a server may have the loop watch. */
uint32_t server_max_sources(const struct config *config);

int server_new(const struct config *config, struct loop *loop, struct store *store, struct server **ret);
struct server *server_free(struct server *server);
void server_freep(struct server **server);

/* Starts to accept. The socket stays the caller's. */
int server_listen(struct server *server, int fd);

/* The process that clears GPU memory, or makes it clear. */
struct child *server_memory_maker(struct server *server);

/* Stops accepting and ends all clients. */
void server_shut(struct server *server);

/* ---- for client.c ---------------------------------------------------------------------------------------------- */

uint32_t server_user_clients(const struct server *server, uint32_t uid); /* attached */
void server_half_open_remove(struct server *server, struct client *client);
void server_watch_pins(struct server *server); /* there is a client */
void server_watch_order(struct server *server); /* a block waits for its data: look whether it has come, soon */
void server_client_unused(struct server *server, struct client *client);

#endif
