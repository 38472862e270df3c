/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_FAKE_SERVER_H
#define KVD_TESTS_LIB_FAKE_SERVER_H

/*
 * A server that speaks enough of Redis's protocol to be connected to, says what a test wants it to
 * say of its Cluster, and counts what it is told. A thread of the test; it ends with the process.
 */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct fake_server {
        char host[16];                  /* an address of loopback */
        uint16_t port;
        const char *folder, *name;      /* of its certificate (certificates.h); NULL: without TLS */
        const char *_Atomic slots;      /* its reply to CLUSTER SLOTS; NULL: it is no Cluster's */
        const char *_Atomic says;       /* ... to commands about keys; NULL: "+OK\r\n" */
        _Atomic uint32_t connections, commands, passwords; /* that it was told */
        int fd;
        struct ssl_ctx_st *tls;
};

/* port: 0: one that is free. */
void fake_server_start(struct fake_server *s, const char *host, uint16_t port);
/* A port of that address that nothing listens at; what connects to it is refused. */
uint16_t fake_server_refuses(const char *host);
/* One that takes no connection, and refuses none: whoever connects waits. */
void fake_server_silent(struct fake_server *s, const char *host, uint16_t port);

#endif
