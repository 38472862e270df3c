/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_TLS_H
#define KVD_DAEMON_PROCESS_REMOTE_TLS_H

/*
 * Who is who, with TLS: which servers are believed, and what we show them. A server is believed
 * only with a certificate for the name or the address that it was connected to by.
 */

#include <stdbool.h>

#include "ipc/base/why.h"

struct ssl_ctx_st;
struct ssl_st;

/* Descriptors of files in PEM, which are read from their beginning on; -1: there is none. */
struct tls_files {
        int ca;               /* who signs servers' certificates; none: whom the system trusts */
        int certificate, key; /* ours, with those behind it; both or neither */
};
#define TLS_NO_FILES ((struct tls_files){-1, -1, -1})

/* For all connections of a process. It stays until it is freed by SSL_CTX_free. */
int tls_context_new(const struct tls_files *files, struct ssl_ctx_st **ret, struct kvd_why *why);
/* For one, to that host. NULL: out of memory. */
struct ssl_st *tls_new(struct ssl_ctx_st *context, const char *host);
/* Is the server's certificate, which was verified, for that name or address, too? */
bool tls_is_for(struct ssl_st *ssl, const char *host);
/* Why it failed, in the words of libssl. Returns -EPROTO. */
int tls_why(struct ssl_st *ssl, struct kvd_why *why);

#endif
