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
 * A client that used GPU memory stays ORPHANED for a while longer: see end_process in client.c. One
 * whose team has other live processes stays until these have ended, too: see mates.h.
 */

#include "daemon/serve/peer.h"
#include "daemon/serve/server.h"

#define CLIENT_SPACES 64u
#define TEAM_BYTES 16u

enum client_state { CLIENT_UNUSED, CLIENT_HALF_OPEN, CLIENT_ATTACHED, CLIENT_ORPHANED };

/*
 * handle % CLIENT_SPACES is the place in the table. When a space is deleted, its handle stays, so
 * that its use is refused with -ESTALE.
 */
struct client_space {
        struct attachment *attachment; /* owned */
        uint32_t handle;               /* 0: unused */
};

struct client {
        struct server *server;
        struct client *next; /* in the list of unused seats, or of half-open clients */
        enum client_state state;
        bool admin, closing;      /* closing: after the reply */
        bool listed;              /* a [domain] of the configuration lists its user */
        bool may_bring_fds;       /* see closer.h */
        bool gone;                /* the process has ended; kept for its team (mates.h) */
        uint8_t team[TEAM_BYTES]; /* name of its team; all zeros if none */
        uint32_t number;          /* smallest number that was free in its domain */
        struct domain *domain;
        struct peer peer;
        struct user *user; /* user of the peer's process */
        struct turns_place place;
        void (*end)(struct client *); /* set after its process ended; called in its next turn */
        struct loop_source socket;    /* its fd is owned; -1: closed */
        struct loop_source process;   /* of peer.pidfd */
        struct loop_timer quarantine; /* waits for GPU work of a process that has ended */
        bool held;                    /* in quarantine: the last check found a child's connection */
        void *late;                   /* owned; a request that was put off (requests.c), or NULL */
        size_t late_bytes;
        int64_t room; /* bytes of replies that the socket will certainly accept */
        uint64_t connected_ns, requests;
        uint32_t next_handle, n_spaces;
        uint32_t followed; /* 1 + number of the space that it follows; 0 if none */
        /* bitmaps of spaces[]: in use; rings to look at; rings polled in rounds (told, rounds.h) */
        uint64_t used, rings, told;
        struct kvd_list_node round; /* in rounds.clients: its rings are polled */
        bool posted;                /* in the rounds: it has posted recently */
        struct client_space spaces[CLIENT_SPACES];
        char name[64];
};

/*
 * Takes ownership of fd. After an error, fd is closed and the client is unused. ready: the socket's
 * callback.
 */
int client_open(struct client *client, int fd, void (*ready)(struct loop_source *, short));

/*
 * For a client that has not attached and whose process the kernel does not identify: see
 * peer_make_lifeline. After an error the connection ends.
 */
int client_make_lifeline(struct client *client, uint64_t process, int *writing);

/* Closes the connection. If the client uses spaces, it is kept until its process ends. */
void client_disconnect(struct client *client);

/* Calls `end`, which is set once the process has ended. False: it was not set. */
bool client_ends(struct client *client);

/* Frees all that the client has. Its process must not be able to touch memory any more. */
void client_end(struct client *client, bool died);

/* ---- for handlers ---------------------------------------------------------------------------- */

/* Sets the reason of a refusal, one line, and returns the error. */
#define client_refuse(client, error, ...) \
        kvd_refuse(&(client)->server->scratch->why, error, __VA_ARGS__)
int client_store_failed(struct client *client, int error);

/* 0 if the daemon runs a worker. what: names in the refusal what needs one. */
int client_needs_worker(struct client *client, const char *what);

/* Finds a space by handle. -ESTALE: it was deleted; -EBADF: the connection has no such handle. */
int client_find_space(struct client *client, uint32_t handle, struct attachment **ret);
/* Attaches to the space. -EMFILE: the connection uses too many; CLIENT_LATER. */
int client_add_space(struct client *client, struct space *space, uint32_t *handle);
int client_remove_space(struct client *client, uint32_t handle);
/* Takes the posts of the first ring in `rings` that has some. */
void client_take_ring(struct client *client);

/* Makes the client a follower of this space, and of no other; NULL: of none. */
void client_follow(struct client *client, struct space *space);

/* The domain that a request names, or the client's own if it names none. -EPERM, -ENOENT. */
int client_find_domain(struct client *client, struct kvd_slice name, struct domain **ret);
/*
 * 0: the space is complete (space_take_over). CLIENT_LATER: not yet. A handler returns this before
 * it changes anything, and is called again in the client's next turn.
 */
#define CLIENT_LATER (-EINPROGRESS)
int client_await_space(struct space *space);
/*
 * Call after creating a space or attaching to one has failed with that error. CLIENT_LATER: an
 * unused space is being deleted to make room. Otherwise refuses with the error.
 */
int client_make_way(struct client *client, struct domain *domain, const struct space *except,
                    int error);

/* Finds a space by the names of domain and space. CLIENT_LATER: it is not complete yet. */
int client_find_named(struct client *client, struct kvd_slice domain, struct kvd_slice space,
                      struct space **ret);
/* NULL: no client of the domain has this number. */
struct client *client_by_number(const struct seats *seats, const struct domain *domain,
                                uint32_t number);
bool client_sees(const struct client *client, const struct domain *domain);

#endif
