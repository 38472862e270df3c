/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Takes descriptors from a service manager by the protocol of sd_listen_fds: three environment
 * variables, which are not worth a dependency on a library.
 */

#include "daemon/main/activation.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/log.h"
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

/* Copies the next name of a list separated by colons, and advances *list. "": no more names. */
static void next_name(const char **list, char *to, size_t size) {
        size_t n = strcspn(*list, ":");

        snprintf(to, size, "%.*s", (int)n, *list);
        *list += n + ((*list)[n] == ':');
}

/* A single descriptor without a name is the socket: `systemd-socket-activate` gives no name. */
static bool is_socket(const char *name, long n) {
        return strcmp(name, "listen") == 0 ||
               (n == 1 && (!name[0] || strcmp(name, "unknown") == 0));
}

static bool is_kept(const char *name) {
        return strchr(name, '.') && strlen(name) < KEEP_NAME_MAX;
}

static void take_one(struct activation *a, const char *name, int fd, long n) {
        fcntl(fd, F_SETFD, FD_CLOEXEC);
        if (is_socket(name, n) && a->listen < 0) {
                a->listen = fd;
        } else if (is_kept(name)) {
                strcpy(a->files[a->n].name, name);
                a->files[a->n++].fd = fd;
        } else {
                log_limited(LOG_WARNING, "a descriptor called '%s' was handed over: closed", name);
                close(fd);
        }
}

static int take_all(struct activation *a, long n, const char *names) {
        char name[KEEP_NAME_MAX + 1];

        a->files = sys->calloc((size_t)n, sizeof *a->files);
        if (!a->files)
                return -ENOMEM;
        for (long i = 0; i < n; i++) {
                next_name(&names, name, sizeof name);
                take_one(a, name, FIRST_FD + (int)i, n);
        }
        return 0;
}

static int check(const struct activation *a, long n, struct kvd_why *why) {
        if (a->listen < 0 && a->n == 0)
                return kvd_refuse(
                        why, -EINVAL,
                        "none of the %ld descriptors handed over is called 'listen'; write FileDescriptorName=listen in the socket unit",
                        n);
        if (a->listen >= 0 && !is_listening(a->listen))
                return kvd_refuse(why, -EINVAL,
                                  "the descriptor called 'listen' is not a listening seqpacket "
                                  "Unix socket; write ListenSequentialPacket= in the socket unit");
        return 0;
}

int activation_take(struct activation *ret, struct kvd_why *why) {
        long n = number_of("LISTEN_PID") == getpid() ? number_of("LISTEN_FDS") : 0;
        const char *names = getenv("LISTEN_FDNAMES");
        int r = 0;

        *ret = ACTIVATION_NONE;
        if (n > 0 && n <= INT_MAX - FIRST_FD)
                r = take_all(ret, n, names ? names : "");
        unsetenv("LISTEN_FDS");
        unsetenv("LISTEN_FDNAMES");
        unsetenv("LISTEN_PID");
        if (r < 0)
                kvd_refuse(why, r, "out of memory");
        else if (n > 0)
                r = check(ret, n, why);
        if (r < 0)
                activation_clear(ret);
        return r;
}

void activation_clear(struct activation *a) {
        closep(&a->listen);
        for (size_t i = 0; i < a->n; i++)
                closep(&a->files[i].fd);
        free(a->files);
        *a = ACTIVATION_NONE;
}
