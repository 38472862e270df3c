/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_WIRE_H
#define KVD_DAEMON_PROCESS_REMOTE_WIRE_H

/*
 * The bottom of a link: bytes through a socket, without waiting, as they are or through TLS
 * (tls.h). Above it there is no difference.
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
        struct ssl_st *ssl;       /* owned; NULL: bytes go as they are */
        short sending, receiving; /* what each waits for: POLLOUT, POLLIN, or with TLS the other one */
        uint64_t since_ns;        /* a byte last went or came, also one that is nobody's but TLS's */
        int error;                /* the socket's, below TLS; 0: none */
};

/* Takes the socket. tls: how servers are verified; NULL: bytes go as they are. 0 or -ENOMEM. */
int wire_begin(struct wire *wire, int fd, struct ssl_ctx_st *tls, const char *host);
void wire_end(struct wire *wire);

/* 1: both know each other; 0: not yet; negative: they never will. */
int wire_shake(struct wire *wire, struct kvd_why *why);
/* Bytes; 0: none can go, or has come, now; negative: it has ended, and why says how. */
ssize_t wire_send(struct wire *wire, const void *data, size_t n, struct kvd_why *why);
ssize_t wire_receive(struct wire *wire, void *to, size_t n, struct kvd_why *why);
/* Something has come already, of which the socket tells nothing any more. */
bool wire_holds(const struct wire *wire);

#endif
