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
        uint32_t groups[PEER_MAX_GROUPS]; /* primary first */
        uint32_t n_groups;
};

/* Negative errno if the process is gone already or cannot be watched. */
int peer_get(int socket, struct peer *ret);

#endif
