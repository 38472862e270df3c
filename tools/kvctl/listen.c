/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A listening socket. A path that a killed process left behind is replaced; one at which a process
 * still listens is not.
 */

#include "tools/kvctl/listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#define BACKLOG 64

struct address {
        socklen_t size;
        union {
                struct sockaddr any;
                struct sockaddr_un un;
                struct sockaddr_in in;
                struct sockaddr_in6 in6;
        };
};

/* ---- which address --------------------------------------------------------------------------- */

static bool read_port(const char *text, uint16_t *port) {
        char *end;
        unsigned long n = strtoul(text, &end, 10);

        *port = (uint16_t)n;
        return *text >= '0' && *text <= '9' && !*end && n <= UINT16_MAX;
}

static bool read_host(const char *host, uint16_t port, struct address *a) {
        if (strcmp(host, "localhost") == 0)
                host = "127.0.0.1";
        if (inet_pton(AF_INET, host, &a->in.sin_addr) == 1) {
                a->in.sin_family = AF_INET;
                a->in.sin_port = htons(port);
                a->size = sizeof a->in;
        } else if (inet_pton(AF_INET6, host, &a->in6.sin6_addr) == 1) {
                a->in6.sin6_family = AF_INET6;
                a->in6.sin6_port = htons(port);
                a->size = sizeof a->in6;
        }
        return a->size;
}

static bool read_address(const char *text, struct address *a) {
        const char *colon = strrchr(text, ':');
        char host[64] = "127.0.0.1";
        uint16_t port;

        if (colon) {
                bool bracketed = text[0] == '[' && colon > text + 1 && colon[-1] == ']';
                const char *from = text + bracketed, *end = colon - bracketed;

                snprintf(host, sizeof host, "%.*s", (int)(end - from), from);
        }
        return read_port(colon ? colon + 1 : text, &port) && read_host(host, port, a);
}

static bool is_loopback(const struct address *a) {
        if (a->any.sa_family == AF_INET)
                return ntohl(a->in.sin_addr.s_addr) >> 24 == 127;
        return IN6_IS_ADDR_LOOPBACK(&a->in6.sin6_addr);
}

static int parse(const char *text, bool everybody, struct address *a, struct kvd_why *why) {
        if (strchr(text, '/')) {
                if (strlen(text) >= sizeof a->un.sun_path)
                        return kvd_refuse(why, -EINVAL, "--listen: a path has %zu bytes at most",
                                          sizeof a->un.sun_path - 1);
                a->un.sun_family = AF_UNIX;
                strcpy(a->un.sun_path, text);
                a->size = sizeof a->un;
                return 0;
        }
        if (!read_address(text, a))
                return kvd_refuse(why, -EINVAL,
                                  "--listen takes /a/path, PORT or ADDRESS:PORT, not \"%s\"", text);
        if (!everybody && !is_loopback(a))
                return kvd_refuse(why, -EINVAL,
                                  "--listen %s: other machines could reach that; use 127.0.0.1 or "
                                  "a path, or add --public if they may",
                                  text);
        return 0;
}

/* ---- the socket ------------------------------------------------------------------------------ */

/* Is the path a socket at which no process listens any more? */
static bool is_left_over(const struct address *a) {
        _cleanup_(closep) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        struct stat st;

        return fd >= 0 && lstat(a->un.sun_path, &st) == 0 && S_ISSOCK(st.st_mode) &&
               connect(fd, &a->any, a->size) < 0 && errno == ECONNREFUSED;
}

static int bind_path(int fd, const struct address *a) {
        mode_t mask = umask(0117); /* for owner and group */
        int r;

        if (is_left_over(a))
                unlink(a->un.sun_path);
        r = bind(fd, &a->any, a->size) < 0 ? negative_errno() : 0;
        umask(mask);
        return r;
}

static int bind_to(int fd, const struct address *a) {
        int on = 1;

        if (a->any.sa_family == AF_UNIX)
                return bind_path(fd, a);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        return bind(fd, &a->any, a->size) < 0 ? negative_errno() : 0;
}

/* With the port that the kernel chose, if it did. */
static void set_name(struct listener *l) {
        struct address a = {.size = sizeof a.in6};
        char host[64] = "", port[8] = "";

        getsockname(l->fd, &a.any, &a.size);
        getnameinfo(&a.any, a.size, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV);
        snprintf(l->name, sizeof l->name,
                 a.any.sa_family == AF_INET6 ? "http://[%s]:%s/metrics" : "http://%s:%s/metrics",
                 host, port);
}

int listener_open(const char *text, bool everybody, struct listener *ret, struct kvd_why *why) {
        struct address a = {.size = 0};
        int r = parse(text, everybody, &a, why);

        *ret = LISTENER_NONE;
        if (r < 0)
                return r;
        ret->fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        r = ret->fd < 0 ? negative_errno() : bind_to(ret->fd, &a);
        if (r == 0 && a.any.sa_family == AF_UNIX)
                strcpy(ret->path, a.un.sun_path);
        if (r == 0 && listen(ret->fd, BACKLOG) < 0)
                r = negative_errno();
        if (r < 0) {
                listener_close(ret);
                return kvd_refuse(why, r, "cannot listen at %s: %s", text, strerror(-r));
        }
        if (*ret->path)
                snprintf(ret->name, sizeof ret->name, "%s", ret->path);
        else
                set_name(ret);
        return 0;
}

void listener_close(struct listener *l) {
        if (*l->path)
                unlink(l->path);
        closep(&l->fd);
        *l = LISTENER_NONE;
}
