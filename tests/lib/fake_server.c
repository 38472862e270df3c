/* SPDX-License-Identifier: Apache-2.0 */

/* One thread accepts; one per connection parses commands with the daemon's own parser. */

#include "tests/lib/fake_server.h"

#include <arpa/inet.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/process/remote/resp.h"
#include "ipc/base/util.h"
#include "tests/lib/mark.h"

#define MOST 65536u

struct connection { /* owned by its thread */
        struct fake_server *server;
        int fd;
        SSL *ssl; /* NULL: no TLS */
        uint8_t data[MOST];
        size_t n;
};

/* ---- bytes ----------------------------------------------------------------------------------- */

static bool receive(struct connection *c) {
        uint8_t *to = c->data + c->n;
        ssize_t n = c->ssl ? SSL_read(c->ssl, to, (int)(MOST - c->n)) :
                             recv(c->fd, to, MOST - c->n, 0);

        c->n += n > 0 ? (size_t)n : 0;
        return n > 0;
}

static void say(struct connection *c, const char *text) {
        if (c->ssl)
                SSL_write(c->ssl, text, (int)strlen(text));
        else
                send(c->fd, text, strlen(text), MSG_NOSIGNAL);
}

static bool shake_hands(struct connection *c) {
        if (!c->server->tls)
                return true;
        c->ssl = SSL_new(c->server->tls);
        SSL_set_fd(c->ssl, c->fd);
        return SSL_accept(c->ssl) == 1;
}

/* ---- commands -------------------------------------------------------------------------------- */

static void obey(struct connection *c, const struct resp *word) {
        const char *slots = c->server->slots, *says = c->server->says;

        c->server->commands++;
        if (resp_begins(word, "AUTH"))
                c->server->passwords++;
        if (resp_begins(word, "CLUSTER"))
                say(c, slots ? slots : "-ERR This instance has cluster support disabled\r\n");
        else if (resp_begins(word, "PING"))
                say(c, "+PONG\r\n");
        else
                say(c, says && !resp_begins(word, "AUTH") ? says : "+OK\r\n");
}

static void take_commands(struct connection *c) {
        struct resp list, word;
        size_t used, head, some;

        while (resp_take_whole(c->data, c->n, MOST, &list, &used) == 1) {
                resp_take(c->data, c->n, MOST, &list, &head);
                if (resp_take(c->data + head, c->n - head, MOST, &word, &some) == 1)
                        obey(c, &word);
                c->n -= used;
                memmove(c->data, c->data + used, c->n);
        }
}

static void *serve(void *data) {
        struct connection *c = data;

        if (shake_hands(c))
                while (receive(c))
                        take_commands(c);
        SSL_free(c->ssl);
        close(c->fd);
        free(c);
        return NULL;
}

/* ---- life ------------------------------------------------------------------------------------ */

static void *accept_all(void *data) {
        struct fake_server *s = data;
        pthread_t thread;
        int fd;

        while ((fd = accept(s->fd, NULL, NULL)) >= 0) {
                struct connection *c = calloc(1, sizeof *c);

                s->connections++;
                c->server = s;
                c->fd = fd;
                ck_assert_int_eq(pthread_create(&thread, NULL, serve, c), 0);
                pthread_detach(thread);
        }
        return NULL;
}

static void load_certificate(struct fake_server *s) {
        char path[160];

        s->tls = SSL_CTX_new(TLS_server_method());
        snprintf(path, sizeof path, "%s/%s.pem", s->folder, s->name);
        ck_assert_int_eq(SSL_CTX_use_certificate_file(s->tls, path, SSL_FILETYPE_PEM), 1);
        snprintf(path, sizeof path, "%s/%s.key", s->folder, s->name);
        ck_assert_int_eq(SSL_CTX_use_PrivateKey_file(s->tls, path, SSL_FILETYPE_PEM), 1);
}

static void bind_to(struct fake_server *s, const char *host, uint16_t port) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
        socklen_t n = sizeof a;
        int one = 1;

        snprintf(s->host, sizeof s->host, "%s", host);
        ck_assert_int_eq(inet_pton(AF_INET, host, &a.sin_addr), 1);
        s->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        setsockopt(s->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        ck_assert_int_eq(bind(s->fd, (struct sockaddr *)&a, n), 0);
        ck_assert_int_eq(getsockname(s->fd, (struct sockaddr *)&a, &n), 0);
        s->port = ntohs(a.sin_port);
}

void fake_server_start(struct fake_server *s, const char *host, uint16_t port) {
        pthread_t thread;

        signal(SIGPIPE, SIG_IGN); /* SSL_write raises it */
        bind_to(s, host, port);
        if (s->folder)
                load_certificate(s);
        ck_assert_int_eq(listen(s->fd, 64), 0);
        ck_assert_int_eq(pthread_create(&thread, NULL, accept_all, s), 0);
        pthread_detach(thread);
}

uint16_t fake_server_refuses(const char *host) {
        struct fake_server s = {0};

        bind_to(&s, host, 0); /* bound, so no other process gets the port */
        return s.port;
}

/* Linux drops connection requests while the queue is full. */
void fake_server_silent(struct fake_server *s, const char *host, uint16_t port) {
        struct sockaddr_in a = {.sin_family = AF_INET};

        bind_to(s, host, port);
        ck_assert_int_eq(listen(s->fd, 0), 0);
        a.sin_port = htons(s->port);
        ck_assert_int_eq(inet_pton(AF_INET, host, &a.sin_addr), 1);
        for (uint32_t i = 0; i < 4; i++) {
                int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

                connect(fd, (struct sockaddr *)&a, sizeof a); /* the socket stays open */
        }
}
