/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each daemon gets a new socket, so that no message of the previous daemon is left in it. Its
 * folder is closed to other users and removed once the daemon has sent a message. A message is
 * accepted only if it is the daemon's, according to the kernel. So no other user can fill the
 * queue, and no other process can pass a descriptor.
 */

#include "daemon/process/keeper/mailbox.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "ipc/address.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

static void remove_path(struct mailbox *box) {
        if (box->path[0])
                unlink(box->path);
        if (box->folder[0])
                rmdir(box->folder);
        box->path[0] = box->folder[0] = 0;
}

void mailbox_close(struct mailbox *box) {
        closep(&box->fd);
        remove_path(box);
        *box = MAILBOX_CLOSED;
}

static int make_folder(struct mailbox *box) {
        const char *where = getenv("TMPDIR");

        if (snprintf(box->folder, sizeof box->folder, "%s/kvd-keep-XXXXXX",
                     where && where[0] ? where : "/tmp") >= (int)sizeof box->folder) {
                box->folder[0] = 0;
                return -ENAMETOOLONG;
        }
        if (!mkdtemp(box->folder)) {
                box->folder[0] = 0;
                return negative_errno();
        }
        snprintf(box->path, sizeof box->path, "%s/notify", box->folder);
        return 0;
}

static int open_in_folder(struct mailbox *box) {
        struct kvd_address address;
        int r = make_folder(box), on = 1;

        if (r >= 0)
                r = kvd_address_make(box->path, &address);
        if (r < 0)
                return r;
        box->fd = sys->socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (box->fd < 0 || sys->setsockopt(box->fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) < 0 ||
            sys->bind(box->fd, kvd_address_of(&address), address.size) < 0)
                return negative_errno();
        return 0;
}

int mailbox_open(struct mailbox *box) {
        int r;

        *box = MAILBOX_CLOSED;
        r = open_in_folder(box);
        if (r < 0)
                mailbox_close(box);
        return r;
}

/* ---- messages -------------------------------------------------------------------------------- */

struct brought {
        pid_t from;
        int fds[4];
        size_t n;
};

static void take_control(struct msghdr *m, struct brought *ret) {
        struct ucred who;

        for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
                if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS) {
                        memcpy(&who, CMSG_DATA(c), sizeof who);
                        ret->from = who.pid;
                } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
                        ret->n = MIN((c->cmsg_len - CMSG_LEN(0)) / sizeof(int),
                                     ARRAY_SIZE(ret->fds));
                        memcpy(ret->fds, CMSG_DATA(c), ret->n * sizeof(int));
                }
        }
}

/* Returns the length, or a negative errno. The caller owns the descriptors in brought. */
static ssize_t receive(int fd, char *text, struct brought *brought, int *flags) {
        union {
                struct cmsghdr align;
                char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(sizeof(int))];
        } control;
        struct iovec piece = {text, MAIL_MAX - 1};
        struct msghdr m = {.msg_iov = &piece,
                           .msg_iovlen = 1,
                           .msg_control = &control,
                           .msg_controllen = sizeof control};
        ssize_t n = sys->recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

        *brought = (struct brought){0};
        *flags = m.msg_flags;
        if (n < 0)
                return negative_errno();
        take_control(&m, brought);
        return n;
}

int mailbox_receive(struct mailbox *box, pid_t from, struct mail *ret) {
        struct brought brought;
        int flags;
        ssize_t n = receive(box->fd, ret->text, &brought, &flags);

        ret->fd = -1;
        if (n < 0)
                return n == -EINTR ? -EPERM : (int)n;
        if (brought.from == from)
                remove_path(box);
        if (brought.from != from || brought.n > 1 || flags & (MSG_TRUNC | MSG_CTRUNC) ||
            memchr(ret->text, 0, (size_t)n)) {
                while (brought.n)
                        close(brought.fds[--brought.n]);
                return -EPERM;
        }
        ret->text[n] = 0;
        if (brought.n)
                ret->fd = brought.fds[0];
        return 0;
}

/* ---- text ------------------------------------------------------------------------------------ */

static const char *next_line(const char *line) {
        line += strcspn(line, "\n");
        return line + (*line == '\n');
}

bool mail_has(const struct mail *mail, const char *line) {
        size_t n = strlen(line);

        for (const char *at = mail->text; *at; at = next_line(at))
                if (strcspn(at, "\n") == n && memcmp(at, line, n) == 0)
                        return true;
        return false;
}

void mail_value(const struct mail *mail, const char *key, char *to, size_t size) {
        size_t n = strlen(key);

        *to = 0;
        for (const char *at = mail->text; *at; at = next_line(at))
                if (strncmp(at, key, n) == 0 && at[n] == '=')
                        snprintf(to, size, "%.*s", (int)strcspn(at + n + 1, "\n"), at + n + 1);
}
