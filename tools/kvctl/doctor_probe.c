/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Each probe runs in its own process, because it may hang or crash. The process writes its finding
 * to a pipe, and is killed if it takes too long.
 */

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tools/kvctl/doctor.h"

void found(struct finding *f, enum health health, const char *format, ...) {
        va_list more;

        va_start(more, format);
        vsnprintf(f->text, sizeof f->text, format, more);
        va_end(more);
        f->health = health;
}

/* ---- a process of its own -------------------------------------------------------------------- */

/* A driver may print something. */
static void be_quiet(void) {
        if (!freopen("/dev/null", "r+", stdout) || !freopen("/dev/null", "r+", stderr))
                _exit(1);
}

_Noreturn static void run_probe(probe_fn *function, uint32_t device, int to) {
        struct finding f = {.health = HEALTH_MISSING};

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        be_quiet();
        function(&f, device);
        _exit(write(to, &f, sizeof f) != sizeof f);
}

static void read_finding(int from, int ms, struct finding *ret) {
        struct pollfd p = {from, POLLIN, 0};

        if (poll(&p, 1, ms) != 1)
                found(ret, HEALTH_MISSING, "no answer in %d s", ms / 1000);
        else if (read(from, ret, sizeof *ret) != sizeof *ret)
                found(ret, HEALTH_MISSING, "the attempt crashed");
}

void probe(probe_fn *function, uint32_t device, unsigned seconds, struct finding *ret) {
        int ends[2];
        pid_t pid;

        *ret = (struct finding){.health = HEALTH_MISSING};
        if (pipe2(ends, O_CLOEXEC) < 0) {
                found(ret, HEALTH_MISSING, "not tried: %s", strerror(errno));
                return;
        }
        fflush(stdout);
        pid = fork();
        if (pid == 0)
                run_probe(function, device, ends[1]);
        close(ends[1]);
        if (pid < 0)
                found(ret, HEALTH_MISSING, "not tried: %s", strerror(errno));
        else
                read_finding(ends[0], (int)seconds * 1000, ret);
        close(ends[0]);
        if (pid > 0) {
                kill(pid, SIGKILL);
                waitpid(pid, NULL, 0);
        }
}

/* ---- a second process ------------------------------------------------------------------------ */

int probe_other(void (*function)(int socket, uint32_t device), uint32_t device) {
        int ends[2];
        pid_t pid;

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
                return negative_errno();
        pid = fork();
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                close(ends[0]);
                function(ends[1], device);
                _exit(0);
        }
        close(ends[1]);
        return pid < 0 ? -EAGAIN : ends[0];
}

int socket_send(int socket, const void *bytes, size_t size, int fd) {
        union {
                char room[CMSG_SPACE(sizeof fd)];
                struct cmsghdr align;
        } control = {0};
        struct iovec part = {(void *)bytes, size};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

        if (fd >= 0) {
                control.align = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
                memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
                message.msg_control = &control;
                message.msg_controllen = sizeof control;
        }
        return sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)size ? 0 : -EIO;
}

int socket_take(int socket, void *bytes, size_t size, int *fd) {
        union {
                char room[CMSG_SPACE(sizeof *fd)];
                struct cmsghdr align;
        } control;
        struct iovec part = {bytes, size};
        struct msghdr message = {.msg_iov = &part,
                                 .msg_iovlen = 1,
                                 .msg_control = &control,
                                 .msg_controllen = sizeof control};

        if (fd)
                *fd = -1;
        if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != (ssize_t)size)
                return -EIO;
        if (fd && CMSG_FIRSTHDR(&message))
                memcpy(fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof *fd);
        return 0;
}
