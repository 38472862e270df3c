/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_TLS_H
#define KVD_DAEMON_PROCESS_REMOTE_TLS_H

/*
 * Authentication by TLS, of servers and of this machine. A server needs a certificate for the name
 * or address under which kvd connected to it.
 */

#include <stdbool.h>

#include "ipc/base/why.h"

struct ssl_ctx_st;
struct ssl_st;

/* Descriptors of PEM files, which are read from offset 0; -1: none. */
struct tls_files {
        int ca;               /* authorities for the servers' certificates; -1: the system's */
        int certificate, key; /* our certificate with its chain, and its key; both or neither */
};
#define TLS_NO_FILES ((struct tls_files){-1, -1, -1})

/* For all connections of a process. Owned by the caller, who frees it with SSL_CTX_free. */
int tls_context_new(const struct tls_files *files, struct ssl_ctx_st **ret, struct kvd_why *why);
/* For one connection, to host. NULL: out of memory. */
struct ssl_st *tls_new(struct ssl_ctx_st *context, const char *host);
/* Whether the server's certificate, already verified, is also valid for this name or address. */
bool tls_is_for(struct ssl_st *ssl, const char *host);
/* Writes the error of libssl to why. Returns -EPROTO. */
int tls_why(struct ssl_st *ssl, struct kvd_why *why);

#endif
