/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_FAKE_SERVER_H
#define KVD_TESTS_LIB_FAKE_SERVER_H

/*
 * A server that speaks enough of Redis's protocol to be connected to, describes its Cluster as a
 * test wants, and counts what it receives. It is a thread of the test, and ends with the process.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct fake_server {
        char host[16]; /* a loopback address */
        uint16_t port;
        const char *folder, *name; /* of its certificate (certificates.h); NULL: no TLS */
        const char *_Atomic slots; /* its reply to CLUSTER SLOTS; NULL: not in a Cluster */
        const char *_Atomic says;  /* its reply to commands about keys; NULL: "+OK\r\n" */
        _Atomic uint32_t connections, commands, passwords; /* received so far */
        int fd;
        struct ssl_ctx_st *tls;
};

/* port: 0 for a free one. */
void fake_server_start(struct fake_server *s, const char *host, uint16_t port);
/* Returns a port of that address on which nothing listens: connections are refused. */
uint16_t fake_server_refuses(const char *host);
/* A server that neither accepts nor refuses connections: they wait. */
void fake_server_silent(struct fake_server *s, const char *host, uint16_t port);

#endif
