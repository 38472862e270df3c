/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_DIALECT_H
#define KVD_DAEMON_PROCESS_REMOTE_DIALECT_H

/*
 * A dialect is the protocol of one kind of server: Redis and Valkey (redis.c), or Mooncake Store
 * (mooncake.c). All of them store records (sealed.h) under keys.
 *
 * Only open connects to servers. A server that does not answer in time is away until the next open:
 * requests to it fail at once.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/process/remote/tls.h"
#include "ipc/base/layout.h"
#include "ipc/base/why.h"

#define REMOTE_PASSWORD 512u
#define RECORD_KEY (KVD_NAME_MAX + 34u) /* bytes of a key: "tenant:name", name in hexadecimal */

#define TLS_ALONE \
        "remote_ca, remote_certificate and remote_certificate_key are for rediss:// servers"

struct dialect_config {
        const char *servers;                      /* "scheme://..." */
        const char *password;                     /* "": none */
        struct tls_files files;                   /* Redis: for TLS */
        const char *library, *metadata, *devices; /* Mooncake (kvd.conf(5)) */
        uint64_t timeout_ns;                      /* after which a silent server is away */
};

/* Items of one request. Each item whose error is -EINPROGRESS is requested, and its error set. */
struct records {
        uint32_t n;
        int32_t *errors; /* 0, -ENOENT, -EBADMSG (invalid record), or another errno */
        void (*key)(uint32_t item, char ret[static RECORD_KEY]);
        uint64_t most;                    /* maximum bytes of a valid record */
        uint64_t (*bytes)(uint32_t item); /* put: of its record */
        int (*take)(uint32_t item, const uint8_t *record, size_t size); /* get; returns its error */
        bool (*make)(uint32_t item, uint8_t *to); /* put; false: no memory or no random numbers */
};

struct dialect_state {
        uint32_t servers, away; /* number of servers, and of those that do not answer */
        const char *why;        /* error of a server that is away */
        const char *refusal;    /* error reply to an item of the last request; empty if none */
        bool stale;             /* data moved between servers; open reads where it is */
};

struct dialect {
        const char *const *schemes; /* NULL-terminated */
        int (*check)(const struct dialect_config *config, struct kvd_why *why);
        int (*open)(const struct dialect_config *config, struct kvd_why *why);
        void (*look)(const struct records *records); /* error 0: it is stored */
        void (*get)(const struct records *records);
        void (*put)(const struct records *records);
        void (*state)(struct dialect_state *ret);
};

extern const struct dialect dialect_redis, dialect_mooncake;

/* The dialect of servers in the configuration. NULL: unknown scheme. */
const struct dialect *dialect_of(const char *servers);
/* Finds errors in the configuration before anything runs. */
int dialect_check(const struct dialect_config *config, struct kvd_why *why);

#endif
