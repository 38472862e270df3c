/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_PEER_H
#define KVD_DAEMON_SERVE_PEER_H

/* The peer at the other end of a connection, as the kernel knew it when the connection was made. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define PEER_MAX_GROUPS 256u

struct peer {
        pid_t pid; /* for show; 0: not visible from here */
        uid_t uid;
        int pidfd; /* owned; readable when the process is gone; -1: the kernel does not say */
        bool lifeline; /* pidfd is the reading end of a lifeline */
        uint64_t process; /* the same for all connections of one process, and for no other's */
        uint32_t groups[PEER_MAX_GROUPS]; /* primary first */
        uint32_t n_groups;
};

/* Negative errno if the process is gone already or cannot be watched. */
int peer_get(int socket, struct peer *ret);
/*
 * Where the kernel does not say (pidfd is -1): the process is known by a lifeline from now on, and by
 * the number that it gives itself. writing: the caller's, for the peer.
 */
int peer_make_lifeline(struct peer *peer, uint64_t number, int *writing);
/* Another descriptor of the process, with an open file of its own; the caller's. */
int peer_pidfd(int socket, const struct peer *peer, int *ret);

#endif
