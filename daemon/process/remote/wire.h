/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_WIRE_H
#define KVD_DAEMON_PROCESS_REMOTE_WIRE_H

/*
 * The lowest layer of a link: sends and receives on a socket without blocking, with or without TLS
 * (tls.h). The layers above it do not see the difference.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "ipc/base/why.h"

struct ssl_ctx_st;
struct ssl_st;

struct wire {
        int fd;                   /* owned; -1: none */
        struct ssl_st *ssl;       /* owned; NULL: no TLS */
        short sending, receiving; /* awaited event; with TLS, sending may need POLLIN */
        uint64_t since_ns;        /* time of the last byte sent or received, including TLS's own */
        int error;                /* errno of the socket; 0 if none */
};

/* Takes the socket, also on failure. tls: NULL for none. 0 or -ENOMEM. */
int wire_begin(struct wire *wire, int fd, struct ssl_ctx_st *tls, const char *host);
void wire_end(struct wire *wire);

/* 1: the handshake is complete; 0: not yet; negative: it failed, and why has the reason. */
int wire_shake(struct wire *wire, struct kvd_why *why);
/* Returns bytes; 0: would block; negative: the connection ended, and why has the reason. */
ssize_t wire_send(struct wire *wire, const void *data, size_t n, struct kvd_why *why);
ssize_t wire_receive(struct wire *wire, void *to, size_t n, struct kvd_why *why);
/* TLS holds received bytes that poll on the socket does not report. */
bool wire_holds(const struct wire *wire);

#endif
