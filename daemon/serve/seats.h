/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_SEATS_H
#define KVD_DAEMON_SERVE_SEATS_H

/*
 * The table of clients. Each connection has a seat. All seats are allocated at the start.
 */

#include <stdint.h>

#include "daemon/base/config.h"
#include "daemon/base/loop.h"
#include "daemon/serve/turns.h"

#define SEATS_ADMIN 4u                       /* reserved for root and admins, beyond max_clients */
#define SEATS_HALF_OPEN 64u                  /* connections that have not attached yet */
#define SEATS_USER_HALF_OPEN 32u             /* of one user */
#define SEATS_ATTACH_NS UINT64_C(1000000000) /* a connection has this long to attach */

struct client;
struct server;

/* A user of clients. Its cost is remembered for a while after its last connection has ended. */
struct user {
        uint32_t uid, n_connections, n_attached;
        struct turns_user turns;
};

struct seats {
        struct client *clients; /* owned; n of them, used or not */
        uint32_t n;
        struct user *users;       /* owned; n of them */
        struct client *unused;    /* list of unused seats */
        struct client *half_open; /* list, oldest first */
        uint32_t n_half_open;
        /* including orphans, whose connection is closed but whose process may still run */
        uint32_t n_attached;
        struct loop *loop;
        struct loop_timer deadline; /* of the oldest half-open one */
};

uint32_t seats_needed(const struct config *config);
int seats_init(struct seats *seats, struct server *server, uint32_t n);
void seats_clear(struct seats *seats);

struct client *seats_take(struct seats *seats); /* never fails if the limits below are kept */
void seats_leave(struct seats *seats, struct client *client);
void seats_belong(struct seats *seats, struct client *client); /* assigns it to its peer's user */

/* ---- half-open connections ------------------------------------------------------------------- */

void seats_add_half_open(struct seats *seats, struct client *client);
void seats_remove_half_open(struct seats *seats, struct client *client);

/*
 * The oldest one, if its time to attach is over; else NULL, and the deadline timer is set to the
 * end of that time.
 */
struct client *seats_late(struct seats *seats);

/*
 * The connection to close before this user may have one more half-open connection; NULL: none.
 */
struct client *seats_too_many(const struct seats *seats, uint32_t uid);

#endif
