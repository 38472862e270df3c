/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PEER_H
#define KVD_DAEMON_PEER_H

/* The peer at the other end of a connection, as the kernel knew it when the connection was made. */

#include <stdint.h>
#include <sys/types.h>

#define PEER_MAX_GROUPS 256u

struct peer {
        pid_t pid; /* for show; 0: not visible from here */
        uid_t uid;
        int pidfd; /* owned; readable when the process is gone */
        uint64_t process; /* all connections of one process have the same, and nobody else's */
        uint32_t groups[PEER_MAX_GROUPS]; /* primary first */
        uint32_t n_groups;
};

/* Negative errno if the process is gone already or cannot be watched. */
int peer_get(int socket, struct peer *ret);
/* Another descriptor of the process, with an open file of its own; the caller's. */
int peer_pidfd(int socket, const struct peer *peer, int *ret);

#endif
