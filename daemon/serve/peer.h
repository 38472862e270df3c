/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_SERVE_PEER_H
#define KVD_DAEMON_SERVE_PEER_H

/* The peer at the other end of a connection, as the kernel knew it when the connection was made. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define PEER_MAX_GROUPS 256u

struct peer {
        pid_t pid; /* 0: in a pid namespace that the daemon does not see */
        uid_t uid;
        int pidfd;        /* owned; readable when the process is gone; -1: not available */
        bool lifeline;    /* pidfd is the reading end of a lifeline */
        uint64_t process; /* the same for all connections of one process only; see process_of */
        uint32_t groups[PEER_MAX_GROUPS]; /* the primary group first */
        uint32_t n_groups;
};

/* Negative errno if the process is gone already or cannot be watched. */
int peer_get(int socket, struct peer *ret);
/*
 * For a process without a pidfd (-1): watches it through a new lifeline instead, and identifies it
 * by the number that it gave itself. writing: the end for the peer; the caller owns it.
 */
int peer_make_lifeline(struct peer *peer, uint64_t number, int *writing);
/*
 * Opens another pidfd or lifeline of the process, as an open file of its own; the caller owns it.
 */
int peer_pidfd(int socket, const struct peer *peer, int *ret);

#endif
