/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sends and receives frames with their descriptors. A received descriptor is either handed to the
 * caller or closed, whatever else fails.
 */

#include "ipc/frame.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

union control {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int) * KVD_FRAME_FDS)];
};

static void put_fds(struct msghdr *m, union control *control, const struct kvd_fds *fds) {
        struct cmsghdr *c;

        m->msg_control = control;
        m->msg_controllen = CMSG_SPACE(sizeof(int) * fds->n);
        c = CMSG_FIRSTHDR(m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * fds->n);
        memcpy(CMSG_DATA(c), fds->fd, sizeof(int) * fds->n);
}

int kvd_frame_send(int socket, const void *frame, size_t size, const struct kvd_fds *fds,
                   int flags) {
        struct iovec piece = {(void *)frame, size};
        struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1};
        union control control = {0};
        ssize_t n;

        if (fds && fds->n)
                put_fds(&m, &control, fds);
        do
                n = sys->sendmsg(socket, &m, flags | MSG_NOSIGNAL);
        while (n < 0 && errno == EINTR);
        if (n < 0)
                return negative_errno();
        return (size_t)n == size ? 0 : -EMSGSIZE;
}

static void take_fds(struct msghdr *m, struct kvd_fds *fds) {
        uint32_t n;

        for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
                if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
                        continue;
                n = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
                /* the control buffer has room for no more */
                memcpy(fds->fd + fds->n, CMSG_DATA(c), n * sizeof(int));
                fds->n += n;
        }
}

ssize_t kvd_frame_receive(int socket, void *to, struct kvd_fds *fds, int flags) {
        struct iovec piece = {to, KVD_FRAME_MAX};
        struct msghdr m = {.msg_iov = &piece, .msg_iovlen = 1};
        union control control;
        ssize_t n;

        if (fds) {
                fds->n = 0;
                m.msg_control = &control;
                m.msg_controllen = sizeof control;
        }
        do
                n = sys->recvmsg(socket, &m, flags | MSG_CMSG_CLOEXEC);
        while (n < 0 && errno == EINTR);
        if (n < 0)
                return negative_errno();
        if (!fds) /* MSG_CTRUNC then only means that descriptors were dropped */
                return m.msg_flags & MSG_TRUNC ? -EMSGSIZE : n;
        take_fds(&m, fds);
        if (!(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
                return n;
        kvd_fds_close(fds);
        return m.msg_flags & MSG_TRUNC ? -EMSGSIZE : -ENOMSG;
}

bool kvd_frame_has_fds(int socket) {
        struct msghdr m = {0};

        return sys->recvmsg(socket, &m, MSG_PEEK | MSG_DONTWAIT) >= 0 && m.msg_flags & MSG_CTRUNC;
}

void kvd_fds_close(struct kvd_fds *fds) {
        while (fds->n)
                close(fds->fd[--fds->n]);
}
