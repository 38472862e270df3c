/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The socket that a service manager has opened for us, by the protocol of sd_listen_fds. It is
 * written out here, because it is four environment variables, and a library would be a dependency
 * for them.
 */

#include "daemon/activation.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define FIRST_FD 3 /* SD_LISTEN_FDS_START */

static long number_of(const char *variable) {
        const char *text = getenv(variable);

        return text ? strtol(text, NULL, 10) : 0;
}

static int socket_option(int fd, int name) {
        int value = -1;
        unsigned n = sizeof value;

        return sys->getsockopt(fd, SOL_SOCKET, name, &value, &n) < 0 ? -1 : value;
}

static bool is_listening(int fd) {
        return socket_option(fd, SO_DOMAIN) == AF_UNIX &&
               socket_option(fd, SO_TYPE) == SOCK_SEQPACKET &&
               socket_option(fd, SO_ACCEPTCONN) == 1;
}

/*
 * Place of the name in a list with colons, or -1. A list that is missing names everything
 * "unknown".
 */
static int find_name(const char *names, const char *name) {
        size_t n;

        for (int i = 0; names && *names; i++) {
                n = strcspn(names, ":");
                if (strlen(name) == n && memcmp(names, name, n) == 0)
                        return i;
                names += n + (names[n] == ':');
        }
        return -1;
}

/* One descriptor without a name is the socket, too: `systemd-socket-activate` gives none. */
static int choose(long n, const char *names) {
        int i = find_name(names, "listen");

        if (i < 0 && n == 1 && (!names || find_name(names, "unknown") == 0))
                return 0;
        return i < n ? i : -1;
}

int activation_take(int *ret, struct kvd_why *why) {
        long n = number_of("LISTEN_FDS");
        bool ours = number_of("LISTEN_PID") == getpid();
        int i = ours && n > 0 ? choose(n, getenv("LISTEN_FDNAMES")) : -1;

        unsetenv("LISTEN_FDS");
        unsetenv("LISTEN_FDNAMES");
        unsetenv("LISTEN_PID");
        if (!ours || n <= 0)
                return 0;
        for (long k = 0; k < n; k++)
                fcntl(FIRST_FD + (int)k, F_SETFD, FD_CLOEXEC);
        if (i < 0)
                return kvd_refuse(why, -EINVAL,
                                  "none of the %ld descriptors handed over is called 'listen'; "
                                  "write "
                                  "FileDescriptorName=listen in the socket unit",
                                  n);
        if (!is_listening(FIRST_FD + i))
                return kvd_refuse(why, -EINVAL,
                                  "the descriptor called 'listen' is not a listening seqpacket "
                                  "Unix "
                                  "socket; write ListenSequentialPacket= in the socket unit");
        *ret = FIRST_FD + i;
        return 1;
}
