/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_IPC_FRAME_H
#define KVD_IPC_FRAME_H

/* A frame is one SOCK_SEQPACKET packet, with or without descriptors. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define KVD_FRAME_MAX 65536u /* maximum bytes of a frame */
#define KVD_FRAME_FDS 64u    /* maximum number of descriptors of a frame */

struct kvd_fds {
        int fd[KVD_FRAME_FDS];
        uint32_t n;
};

/*
 * Sends a whole frame. flags: 0 or MSG_DONTWAIT. Returns 0 or a negative errno: -EAGAIN (nothing
 * was sent), -EPIPE and -ECONNRESET (the peer is gone). Never raises SIGPIPE. fds may be NULL; its
 * descriptors stay the caller's.
 */
int kvd_frame_send(int socket, const void *frame, size_t size, const struct kvd_fds *fds,
                   int flags);

/*
 * Receives a frame into to, a buffer of KVD_FRAME_MAX bytes. Returns the frame's size; 0: the peer
 * has closed the connection; -EAGAIN; -EMSGSIZE: the frame was larger, and is lost; -ENOMSG: it
 * came with more descriptors than fit, and all are closed. The descriptors in fds are the caller's,
 * with close-on-exec. If fds is NULL, the kernel drops the frame's descriptors.
 */
ssize_t kvd_frame_receive(int socket, void *to, struct kvd_fds *fds, int flags);

/*
 * Does the next frame bring descriptors? Leaves frame and descriptors in the queue. Only for a
 * socket that gets no other ancillary data (SO_PASSCRED and the like are off).
 */
bool kvd_frame_has_fds(int socket);

/* Closes what is left in the set. */
void kvd_fds_close(struct kvd_fds *fds);

#endif
