/* SPDX-License-Identifier: Apache-2.0 */

/*
 * As much of HTTP/1.1 as a scraper needs: one request per connection, of which only the first line
 * and Accept matter. Every connection has a bounded head and a deadline. The number of connections
 * is limited: a new one replaces the oldest. The daemon is asked once for all requests that wait
 * for the same format.
 */

#include "tools/kvctl/http.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "ipc/base/sys.h"
#include "tools/kvctl/listen.h"
#include "tools/kvctl/metrics.h"

#define CONNECTIONS 64u
#define OWN_FILES 16u /* descriptors for other purposes */
#define HEAD_MAX 8192u
#define PATIENCE_NS (UINT64_C(10) * 1000000000) /* for a request, and again for its answer */
#define LINGER_NS (UINT64_C(1) * 1000000000)    /* for a peer that still sends */

enum stage {
        NOBODY,
        READING, /* a request */
        ASKED,   /* for metrics */
        WRITING, /* the answer */
        LEAVING, /* answered; input is discarded, since unread input at close() loses the answer */
};

struct connection {
        enum stage stage;
        int fd;           /* owned */
        uint64_t until_ns;
        bool head_only;
        bool plain;       /* it did not ask for OpenMetrics */
        char *answer;     /* owned */
        size_t size, sent, n_head;
        char head[HEAD_MAX];
};

struct server {
        struct kvctl *kvctl;
        struct listener listener;
        size_t n_places;
        struct connection connections[CONNECTIONS];
};

static void hang_up(struct connection *c) {
        close(c->fd);
        free(c->answer);
        c->answer = NULL;
        c->stage = NOBODY;
}

/* ---- answers --------------------------------------------------------------------------------- */

#define OPENMETRICS "application/openmetrics-text"
#define OPENMETRICS_TYPE OPENMETRICS "; version=1.0.0; charset=utf-8"
#define PLAIN_TYPE "text/plain; version=0.0.4; charset=utf-8"

/* status: the status line without "HTTP/1.1 " */
static void answer(struct connection *c, const char *status, const char *type, const char *body,
                   size_t size) {
        FILE *to = open_memstream(&c->answer, &c->size);

        if (!to) {
                hang_up(c);
                return;
        }
        fprintf(to,
                "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nConnection: close\r\n"
                "%s\r\n",
                status, type, size, strncmp(status, "405", 3) == 0 ? "Allow: GET, HEAD\r\n" : "");
        if (!c->head_only)
                fwrite(body, 1, size, to);
        if (fclose(to) != 0) {
                hang_up(c);
                return;
        }
        c->sent = 0;
        c->stage = WRITING;
        c->until_ns = sys_now_ns() + PATIENCE_NS;
}

static void say(struct connection *c, const char *status, const char *text) {
        answer(c, status, "text/plain; charset=utf-8", text, strlen(text));
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Does any Accept line name OpenMetrics? */
static bool accepts_openmetrics(const char *head) {
        for (const char *at = head; (at = strchr(at, '\n')); at++) {
                const char *name = strcasestr(at, OPENMETRICS), *end = strchrnul(at + 1, '\n');

                if (strncasecmp(at + 1, "Accept:", 7) == 0 && name && name < end)
                        return true;
        }
        return false;
}

/* METHOD TARGET HTTP/1.x; the other lines matter only for Accept. */
static void take_request(struct connection *c) {
        char method[16] = "", target[256] = "", version[16] = "";

        if (sscanf(c->head, "%15[^ \r\n] %255[^ \r\n] %15[^ \r\n]", method, target, version) != 3 ||
            strncmp(version, "HTTP/1.", 7) != 0) {
                say(c, "400 Bad Request", "This is not HTTP/1.1.\n");
                return;
        }
        c->head_only = strcmp(method, "HEAD") == 0;
        c->plain = !accepts_openmetrics(c->head);
        target[strcspn(target, "?#")] = 0;
        if (!c->head_only && strcmp(method, "GET") != 0)
                say(c, "405 Method Not Allowed", "Only GET and HEAD.\n");
        else if (strcmp(target, "/metrics") != 0)
                say(c, "404 Not Found", "Metrics are at /metrics.\n");
        else
                c->stage = ASKED;
}

static void read_some(struct connection *c) {
        ssize_t n = recv(c->fd, c->head + c->n_head, sizeof c->head - 1 - c->n_head, 0);

        if (n < 0 && (errno == EAGAIN || errno == EINTR))
                return;
        if (n <= 0) {
                hang_up(c);
                return;
        }
        c->n_head += (size_t)n;
        c->head[c->n_head] = 0;
        if (memchr(c->head, 0, c->n_head))
                say(c, "400 Bad Request", "This is not HTTP/1.1.\n");
        else if (strstr(c->head, "\r\n\r\n") || strstr(c->head, "\n\n"))
                take_request(c);
        else if (c->n_head == sizeof c->head - 1)
                say(c, "431 Request Header Fields Too Large", "The request is too long.\n");
}

static void throw_away(struct connection *c) {
        char waste[4096];
        ssize_t n = recv(c->fd, waste, sizeof waste, 0);

        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
                hang_up(c);
}

static void write_some(struct connection *c) {
        ssize_t n = send(c->fd, c->answer + c->sent, c->size - c->sent, MSG_NOSIGNAL);

        if (n < 0 && (errno == EAGAIN || errno == EINTR))
                return;
        if (n < 0) {
                hang_up(c);
                return;
        }
        c->sent += (size_t)n;
        if (c->sent < c->size)
                return;
        shutdown(c->fd, SHUT_WR);
        c->stage = LEAVING;
        c->until_ns = sys_now_ns() + LINGER_NS;
}

/* ---- all connections ------------------------------------------------------------------------- */

/* Maximum number of connections that leaves enough descriptors for asking the daemon. */
static size_t places(void) {
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
                return 1;
        return limit.rlim_cur > CONNECTIONS + OWN_FILES ?
                       CONNECTIONS :
                       MAX(limit.rlim_cur, OWN_FILES + 1) - OWN_FILES;
}

static struct connection *place_for_one(struct server *s) {
        struct connection *oldest = &s->connections[0];

        for (size_t i = 0; i < s->n_places; i++) {
                if (s->connections[i].stage == NOBODY)
                        return &s->connections[i];
                if (s->connections[i].until_ns < oldest->until_ns)
                        oldest = &s->connections[i];
        }
        hang_up(oldest);
        return oldest;
}

static void accept_one(struct server *s) {
        int fd = accept4(s->listener.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct connection *c;

        if (fd < 0)
                return;
        c = place_for_one(s);
        *c = (struct connection){
                .stage = READING, .fd = fd, .until_ns = sys_now_ns() + PATIENCE_NS};
}

static bool any_asks(const struct server *s, bool plain) {
        for (size_t i = 0; i < CONNECTIONS; i++)
                if (s->connections[i].stage == ASKED && s->connections[i].plain == plain)
                        return true;
        return false;
}

/* Owned; NULL: out of memory. */
static char *metrics_text(struct server *s, bool plain, size_t *size) {
        char *text = NULL;
        FILE *to = open_memstream(&text, size);

        if (!to)
                return NULL;
        metrics_write(s->kvctl, to, plain, NULL);
        fclose(to);
        return text;
}

/* Asks the daemon once for all requests of the same format. */
static void answer_all(struct server *s, bool plain) {
        _cleanup_(freep) char *text = NULL;
        size_t size = 0;

        if (!any_asks(s, plain))
                return;
        text = metrics_text(s, plain, &size);
        for (size_t i = 0; i < CONNECTIONS; i++) {
                struct connection *c = &s->connections[i];

                if (c->stage != ASKED || c->plain != plain)
                        continue;
                if (text)
                        answer(c, "200 OK", plain ? PLAIN_TYPE : OPENMETRICS_TYPE, text, size);
                else
                        hang_up(c);
        }
}

static void serve_one(struct connection *c, short events, uint64_t now_ns) {
        if (now_ns >= c->until_ns)
                hang_up(c);
        else if (events && c->stage == READING)
                read_some(c);
        else if (events && c->stage == WRITING)
                write_some(c);
        else if (events && c->stage == LEAVING)
                throw_away(c);
}

static size_t list(const struct server *s, struct pollfd *fds, struct connection **of) {
        size_t n = 0;

        for (size_t i = 0; i < CONNECTIONS; i++) {
                const struct connection *c = &s->connections[i];

                if (c->stage == NOBODY)
                        continue;
                of[n] = (struct connection *)c;
                fds[n++] = (struct pollfd){
                        .fd = c->fd, .events = c->stage == WRITING ? POLLOUT : POLLIN};
        }
        fds[n] = (struct pollfd){.fd = s->listener.fd, .events = POLLIN};
        return n;
}

/* False: the user wants to stop. */
static bool serve_some(struct server *s) {
        struct connection *of[CONNECTIONS];
        struct pollfd fds[CONNECTIONS + 1];
        size_t n = list(s, fds, of);
        uint64_t now_ns;

        if (screen_poll(&s->kvctl->screen, fds, n + 1, n ? 1 : 86400) < 0)
                return false;
        now_ns = sys_now_ns();
        for (size_t i = 0; i < n; i++)
                serve_one(of[i], fds[i].revents, now_ns);
        if (fds[n].revents)
                accept_one(s);
        answer_all(s, false);
        answer_all(s, true);
        return true;
}

static void server_clear(struct server *s) {
        for (size_t i = 0; i < CONNECTIONS; i++)
                if (s->connections[i].stage != NOBODY)
                        hang_up(&s->connections[i]);
        listener_close(&s->listener);
}

int http_serve(struct kvctl *kvctl, const char *address) {
        static struct server server;
        int r;

        server = (struct server){.kvctl = kvctl, .n_places = places()};
        r = listener_open(address, args_has(&kvctl->args, FLAG_PUBLIC), &server.listener,
                          &kvctl->why);
        if (r < 0) {
                kvctl->exit = r == -EINVAL ? KVCTL_USAGE : KVCTL_NO;
                return r;
        }
        screen_watch_begin(&kvctl->screen, false, false);
        printf("Metrics are at %s (Ctrl-C ends)\n", server.listener.name);
        r = kvctl_flush(kvctl);
        while (r == 0 && serve_some(&server))
                ;
        server_clear(&server);
        screen_watch_end(&kvctl->screen);
        return r;
}
