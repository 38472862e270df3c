/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_IPC_FRAME_H
#define KVD_IPC_FRAME_H

/* One SOCK_SEQPACKET packet at a time, with or without descriptors. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define KVD_FRAME_MAX 65536u /* bytes of a frame */
#define KVD_FRAME_FDS 64u    /* descriptors of a frame */

struct kvd_fds {
        int fd[KVD_FRAME_FDS];
        uint32_t n;
};

/*
 * Sends a whole frame. flags: 0 or MSG_DONTWAIT. 0, or a negative errno: -EAGAIN (nothing was
 * sent), -EPIPE and -ECONNRESET (the peer is gone). Never raises SIGPIPE. fds may be NULL; they
 * stay the caller's.
 */
int kvd_frame_send(int socket, const void *frame, size_t size, const struct kvd_fds *fds,
                   int flags);

/*
 * Receives a frame into to, which has KVD_FRAME_MAX bytes. Returns its size; 0: the peer has closed
 * the connection; -EAGAIN; -EMSGSIZE: the frame was larger, and is lost; -ENOMSG: more descriptors
 * came with it than fit, and all are closed. With fds NULL none are taken: the kernel drops them
 * before they become ours. Otherwise those that came are the caller's, close-on-exec.
 */
ssize_t kvd_frame_receive(int socket, void *to, struct kvd_fds *fds, int flags);

/*
 * Does the next frame bring descriptors? Nothing is taken: they stay where they are. Only for a
 * socket that gets nothing else beside its frames (SO_PASSCRED and the like are off).
 */
bool kvd_frame_has_fds(int socket);

/* Closes what is left in the set. */
void kvd_fds_close(struct kvd_fds *fds);

#endif
