/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_DIALECT_H
#define KVD_DAEMON_PROCESS_REMOTE_DIALECT_H

/*
 * A dialect is how servers of one kind are asked: Redis's and Valkey's (redis.c), or Mooncake
 * Store's (mooncake.c). What is asked for is the same for all: records (sealed.h), by their keys.
 *
 * Servers are connected to by open alone. What does not answer in time is away until then: whoever
 * asks for it meanwhile is told at once.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/process/remote/tls.h"
#include "ipc/base/layout.h"
#include "ipc/base/why.h"

#define REMOTE_PASSWORD 512u
#define RECORD_KEY (KVD_NAME_MAX + 34u) /* bytes of a key: "tenant:name", in hexadecimal */

#define TLS_ALONE \
        "remote_ca, remote_certificate and remote_certificate_key are for rediss:// servers"

struct dialect_config {
        const char *servers;    /* "scheme://..." */
        const char *password;   /* "": none */
        struct tls_files files; /* Redis's, with TLS */
        const char *library, *metadata, *devices; /* Mooncake's (kvd.conf(5)) */
        uint64_t timeout_ns;    /* for which a server may be silent */
};

/* Those of one question: all whose error is -EINPROGRESS are asked for, and get another one. */
struct records {
        uint32_t n;
        int32_t *errors;        /* 0, -ENOENT, -EBADMSG, or why nobody knows */
        void (*key)(uint32_t item, char ret[static RECORD_KEY]);
        uint64_t most;          /* bytes of any of them, if it is right */
        uint64_t (*bytes)(uint32_t item);                               /* put: of one */
        int (*take)(uint32_t item, const uint8_t *record, size_t size); /* get: returns its error */
        bool (*make)(uint32_t item, uint8_t *to); /* put; false: there is no memory for it */
};

struct dialect_state {
        uint32_t servers, away; /* how many there are, and do not answer */
        const char *why;        /* one of them is away */
        const char *refusal;    /* what was said to an item of the last question that was refused */
        bool stale;             /* who has what has changed: open finds out */
};

struct dialect {
        const char *const *schemes; /* until NULL */
        int (*check)(const struct dialect_config *config, struct kvd_why *why);
        int (*open)(const struct dialect_config *config, struct kvd_why *why);
        void (*look)(const struct records *records); /* 0: it is there */
        void (*get)(const struct records *records);
        void (*put)(const struct records *records);
        void (*state)(struct dialect_state *ret);
};

extern const struct dialect dialect_redis, dialect_mooncake;

/* That of the servers in the configuration. NULL: there is none such. */
const struct dialect *dialect_of(const char *servers);
/* Says what is wrong before anything runs. */
int dialect_check(const struct dialect_config *config, struct kvd_why *why);

#endif
