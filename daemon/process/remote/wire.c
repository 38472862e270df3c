/* SPDX-License-Identifier: Apache-2.0 */

/*
 * TLS writes and reads through the same two functions as a wire without it (by a BIO of our own),
 * so signals, silence and errors of the socket are handled alike.
 */

#include "daemon/process/remote/wire.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/process/remote/tls.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define AT_ONCE ((size_t)256 << 10) /* bytes that TLS encrypts per call; other links wait */

/* ---- the socket ------------------------------------------------------------------------------ */

/* Returns bytes; 0: would block; -1: w->error is set. */
static ssize_t moved(struct wire *w, ssize_t n) {
        if (n > 0)
                w->since_ns = sys_now_ns();
        else if (n < 0 && (errno == EAGAIN || errno == EINTR))
                n = 0;
        else if (n < 0)
                w->error = errno;
        return n;
}

static ssize_t socket_send(struct wire *w, const void *data, size_t n) {
        return moved(w, send(w->fd, data, n, MSG_NOSIGNAL | MSG_DONTWAIT));
}

static ssize_t socket_receive(struct wire *w, void *to, size_t n) {
        ssize_t got = recv(w->fd, to, n, MSG_DONTWAIT);

        if (got != 0)
                return moved(w, got);
        w->error = ESHUTDOWN;
        return -1;
}

static int socket_why(const struct wire *w, struct kvd_why *why) {
        return kvd_refuse(why, -w->error, "%s",
                          w->error == ESHUTDOWN ? "it closed the connection" : strerror(w->error));
}

/* ---- below TLS ------------------------------------------------------------------------------- */

static int below_write(BIO *below, const char *data, int n) {
        ssize_t some = socket_send(BIO_get_data(below), data, (size_t)n);

        BIO_clear_retry_flags(below);
        if (some == 0)
                BIO_set_retry_write(below);
        return some > 0 ? (int)some : -1;
}

static int below_read(BIO *below, char *to, int n) {
        ssize_t some = socket_receive(BIO_get_data(below), to, (size_t)n);

        BIO_clear_retry_flags(below);
        if (some == 0)
                BIO_set_retry_read(below);
        return some > 0 ? (int)some : -1;
}

/* Flushing succeeds, since it buffers nothing. All else is not supported. */
static long below_control(BIO *below, int what, long number, void *data) {
        return what == BIO_CTRL_FLUSH;
}

static BIO_METHOD *below_method(void) {
        static BIO_METHOD *method; /* lives as long as the process */

        if (!method)
                method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "wire");
        if (method) {
                BIO_meth_set_write(method, below_write);
                BIO_meth_set_read(method, below_read);
                BIO_meth_set_ctrl(method, below_control);
        }
        return method;
}

static bool put_below(struct wire *w) {
        BIO_METHOD *method = below_method();
        BIO *below = method ? BIO_new(method) : NULL;

        if (!below)
                return false;
        BIO_set_data(below, w);
        BIO_set_init(below, 1);
        SSL_set_bio(w->ssl, below, below);
        return true;
}

/* ---- TLS ------------------------------------------------------------------------------------- */

/* A call of TLS returned r: 0 and the event that it waits for, or a negative errno and why. */
static int tls_waits(struct wire *w, int r, short *event, struct kvd_why *why) {
        switch (SSL_get_error(w->ssl, r)) {
        case SSL_ERROR_WANT_READ: *event = POLLIN; return 0;
        case SSL_ERROR_WANT_WRITE: *event = POLLOUT; return 0;
        case SSL_ERROR_ZERO_RETURN: w->error = ESHUTDOWN; return socket_why(w, why);
        case SSL_ERROR_SYSCALL: return w->error ? socket_why(w, why) : tls_why(w->ssl, why);
        default: return tls_why(w->ssl, why);
        }
}

static ssize_t tls_send(struct wire *w, const uint8_t *data, size_t n, struct kvd_why *why) {
        size_t sent = 0, some;
        int r;

        for (; sent < MIN(n, AT_ONCE); sent += some) {
                ERR_clear_error();
                w->sending = POLLOUT;
                r = SSL_write_ex(w->ssl, data + sent, n - sent, &some);
                if (r != 1)
                        return tls_waits(w, r, &w->sending, why) < 0 ? -EPROTO : (ssize_t)sent;
        }
        return (ssize_t)sent;
}

/* Bytes that came before an error are returned first. */
static ssize_t tls_receive(struct wire *w, uint8_t *to, size_t n, struct kvd_why *why) {
        size_t got = 0, some;
        int r = 1;

        while (r == 1 && got < n) {
                ERR_clear_error();
                w->receiving = POLLIN;
                r = SSL_read_ex(w->ssl, to + got, n - got, &some);
                got += r == 1 ? some : 0;
        }
        if (r != 1 && tls_waits(w, r, &w->receiving, why) < 0 && got == 0)
                return -EPROTO;
        return (ssize_t)got;
}

/* ---- with and without TLS -------------------------------------------------------------------- */

int wire_begin(struct wire *w, int fd, struct ssl_ctx_st *tls, const char *host) {
        *w = (struct wire){.fd = fd,
                           .sending = POLLOUT,
                           .receiving = POLLIN,
                           .since_ns = sys_now_ns()};
        if (!tls)
                return 0;
        w->ssl = tls_new(tls, host);
        return w->ssl && put_below(w) ? 0 : -ENOMEM;
}

void wire_end(struct wire *w) {
        SSL_free(w->ssl);
        if (w->fd >= 0)
                close(w->fd);
        *w = (struct wire){.fd = -1};
}

int wire_shake(struct wire *w, struct kvd_why *why) {
        int r = 1;

        if (w->ssl) {
                ERR_clear_error();
                r = SSL_connect(w->ssl);
        }
        if (r == 1) {
                w->receiving = POLLIN;
                return 1;
        }
        return tls_waits(w, r, &w->receiving, why);
}

ssize_t wire_send(struct wire *w, const void *data, size_t n, struct kvd_why *why) {
        ssize_t sent;

        if (w->ssl)
                return tls_send(w, data, n, why);
        sent = socket_send(w, data, n);
        return sent < 0 ? socket_why(w, why) : sent;
}

ssize_t wire_receive(struct wire *w, void *to, size_t n, struct kvd_why *why) {
        ssize_t got;

        if (w->ssl)
                return tls_receive(w, to, n, why);
        got = socket_receive(w, to, n);
        return got < 0 ? socket_why(w, why) : got;
}

bool wire_holds(const struct wire *w) {
        return w->ssl && SSL_pending(w->ssl) > 0;
}
