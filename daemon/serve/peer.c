/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Gets the process at the other end of a socket, its user and its groups from the kernel. The peer
 * itself is believed only if the kernel does not identify the process: then the peer says which of
 * its connections belong to one process.
 */

#include "daemon/serve/peer.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "ipc/base/lifeline.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

/*
 * Before Linux 6.5 the process is opened by its pid, which another process may have got between the
 * connection and this call. Then the daemon waits for the end of that process, which keeps memory
 * longer than needed but is otherwise harmless. In a pid namespace that the daemon does not see,
 * pid is 0.
 */
static int open_pidfd(int socket, pid_t pid, int *ret) {
        unsigned n = sizeof *ret;

        if (sys->getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, ret, &n) == 0)
                return 0;
        if (errno != ENOPROTOOPT)
                return negative_errno();
        *ret = -1;
        if (pid == 0)
                return 0;
        *ret = sys->pidfd_open(pid);
        return *ret < 0 ? negative_errno() : 0;
}

/* Since Linux 6.9 a pidfd has an inode number that no other process ever gets. */
#define PIDFS_MAGIC 0x50494446

/*
 * Before 6.9 the process is identified by its pid. A later process may get the same pid while an
 * orphan of the first one waits for its team; the two then share the limits of one process.
 */
static uint64_t process_of(const struct peer *peer) {
        struct statfs fs;
        struct stat st;

        if (fstatfs(peer->pidfd, &fs) == 0 && fs.f_type == PIDFS_MAGIC &&
            fstat(peer->pidfd, &st) == 0)
                return st.st_ino;
        return (uint64_t)peer->pid;
}

/* If the user has more groups than fit here, only the primary group and the uid select a domain. */
static void get_groups(int socket, gid_t primary, struct peer *peer) {
        unsigned n = (PEER_MAX_GROUPS - 1) * sizeof(uint32_t);

        peer->groups[0] = primary;
        peer->n_groups = 1;
        if (sys->getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, peer->groups + 1, &n) == 0)
                peer->n_groups += n / (unsigned)sizeof(uint32_t);
}

int peer_pidfd(int socket, const struct peer *peer, int *ret) {
        if (!peer->lifeline)
                return open_pidfd(socket, peer->pid, ret);
        *ret = lifeline_reopen(peer->pidfd);
        return *ret < 0 ? *ret : 0;
}

/* A bit that no pid or inode number of the kernel has. */
#define NAMED_BY_ITSELF (UINT64_C(1) << 63)

int peer_make_lifeline(struct peer *peer, uint64_t number, int *writing) {
        int r = lifeline_new(&peer->pidfd, writing);

        if (r < 0)
                return r;
        peer->lifeline = true;
        peer->process = number | NAMED_BY_ITSELF;
        return 0;
}

int peer_get(int socket, struct peer *ret) {
        struct ucred credentials;
        unsigned n = sizeof credentials;
        int r;

        if (sys->getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &n) < 0)
                return negative_errno();
        ret->pid = credentials.pid;
        ret->uid = credentials.uid;
        r = open_pidfd(socket, credentials.pid, &ret->pidfd);
        if (r < 0)
                return r;
        ret->process = process_of(ret);
        get_groups(socket, credentials.gid, ret);
        return 0;
}
