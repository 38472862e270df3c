/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_CLIENT_H
#define KVD_DAEMON_SERVE_CLIENT_H

/*
 * A client: one connection, the process behind it, and the spaces it uses.
 *
 *      HALF_OPEN ──attach──▶ ATTACHED ──socket closed, spaces in use──▶ ORPHANED
 *          │                    │ socket closed, no spaces                 │
 *          └──────────▶ UNUSED ◀┴────────── process gone (pidfd) ──────────┘
 *
 * If it used a GPU's memory, it stays ORPHANED for a while longer: see process_ended in client.c.
 * If other processes of its team live, it stays until they are gone, too: see mates.h.
 */

#include "daemon/serve/peer.h"
#include "daemon/serve/server.h"

#define CLIENT_SPACES 64u
#define TEAM_BYTES 16u

enum client_state { CLIENT_UNUSED, CLIENT_HALF_OPEN, CLIENT_ATTACHED, CLIENT_ORPHANED };

/*
 * handle % CLIENT_SPACES is the place in the table. A space that was deleted under the client
 * leaves its handle.
 */
struct client_space {
        struct attachment *attachment; /* owned */
        uint32_t handle;               /* 0: unused */
};

struct client {
        struct server *server;
        struct client *next;         /* in the unused seats, or the half-open ones */
        enum client_state state;
        bool admin, closing;         /* closing: after the reply */
        bool listed;                 /* a [domain] of the configuration lists its user */
        bool may_bring_fds;          /* see closer.h */
        bool gone;                   /* the process is; what it held waits for its team (mates.h) */
        uint8_t team[TEAM_BYTES];    /* zeros: none */
        uint32_t number;             /* smallest that was free in its domain */
        struct domain *domain;
        struct peer peer;
        struct user *user;           /* whose kernel credentials it has */
        struct turns_place place;
        void (*end)(struct client *); /* its process has ended: to be called in its next turn */
        struct loop_source socket;   /* its fd is owned; -1: closed */
        struct loop_source process;  /* of peer.pidfd */
        struct loop_timer quarantine; /* the process is gone, its GPU work perhaps not yet */
        bool held;                   /* in it: a process that it forked had the connection, too */
        void *late;                  /* owned; a request that waits (requests.c); NULL: none does */
        size_t late_bytes;
        int64_t room;                /* bytes of replies that the socket surely takes */
        uint64_t connected_ns, requests;
        uint32_t next_handle, n_spaces;
        uint32_t followed;           /* 1 + the number of a space; 0: none */
        /* places in spaces, a bit each: in use; whose rings are still to be looked at; see rounds.h */
        uint64_t used, rings, told;
        struct kvd_list_node round;  /* in the rounds' clients: it is not told that it has to wake us */
        bool posted;                 /* ... and has posted something lately */
        struct client_space spaces[CLIENT_SPACES];
        char name[64];
};

/*
 * Takes the connection over; on failure it is closed, and the client unused. ready: called for the
 * socket.
 */
int client_open(struct client *client, int fd, void (*ready)(struct loop_source *, short));

/*
 * Before attach, where the kernel does not say which process it is: see peer_make_lifeline. On failure
 * the connection ends.
 */
int client_make_lifeline(struct client *client, uint64_t process, int *writing);

/*
 * The connection is of no more use: closes it, and waits for the end of the process if it may still
 * use memory.
 */
void client_disconnect(struct client *client);

/* If its process has ended, does what follows from that. False: it has not. */
bool client_ends(struct client *client);

/* The process cannot touch memory any more, or the daemon ends: gives everything back. */
void client_end(struct client *client, bool died);

/* ---- for handlers ---------------------------------------------------------------------------- */

/* Say in one line why a request is refused, and return the error. */
#define client_refuse(client, error, ...) \
        kvd_refuse(&(client)->server->scratch->why, error, __VA_ARGS__)
int client_store_failed(struct client *client, int error);

/* 0 if there is a worker; what: the request needs one for, in words. */
int client_needs_worker(struct client *client, const char *what);

/* Space of this connection by handle. -ESTALE: deleted; -EBADF: never was. */
int client_find_space(struct client *client, uint32_t handle, struct attachment **ret);
/* Attaches to the space; -EMFILE: too many. */
int client_add_space(struct client *client, struct space *space, uint32_t *handle);
int client_remove_space(struct client *client, uint32_t handle);
/* Takes what was posted in the next space that has to be looked at: see rings. */
void client_take_ring(struct client *client);

/* Reads what that space's clients look up, and no other's that it read before; NULL: none. */
void client_follow(struct client *client, struct space *space);

/* The domain a request names: the client's own if it names none. -EPERM, -ENOENT. */
int client_find_domain(struct client *client, struct kvd_slice name, struct domain **ret);
/*
 * 0: the space is complete (space_take_over). CLIENT_LATER: not yet; a handler returns this before it
 * changes anything, and is called again in the client's next turn.
 */
#define CLIENT_LATER (-EINPROGRESS)
int client_await_space(struct space *space);
/* A space or a place in one was refused with that error: later, if unused spaces can make way. */
int client_make_way(struct client *client, struct domain *domain, const struct space *except,
                    int error);

/* Space by name in such a domain, once it is there as a whole. */
int client_find_named(struct client *client, struct kvd_slice domain, struct kvd_slice space,
                      struct space **ret);
/* NULL: nobody has this number. */
struct client *client_by_number(const struct seats *seats, const struct domain *domain,
                                uint32_t number);
bool client_sees(const struct client *client, const struct domain *domain);

#endif
