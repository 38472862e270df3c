/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_REDIS_H
#define KVD_TESTS_LIB_REDIS_H

/*
 * Real redis-server processes of the test's own, on loopback, that end with it. A failure ends the
 * test.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define REDIS_CLUSTER 3u

struct redis {
        pid_t pid;
        uint16_t port, bus; /* of a Cluster's server: where it speaks to the others */
        int fd;             /* of redis_do, which goes through a Unix socket */
        char dir[64];
};

/* With it the port is one of TLS. */
struct redis_tls {
        const char *folder, *name; /* of ca.pem, and of the server's certificate (certificates.h) */
        bool asks;                 /* for clients' certificates */
};

bool redis_is_there(void);  /* the program is installed */
bool redis_has_tls(void);   /* ... and was built with it; if not, a line says so */

/* tls: NULL: without. */
void redis_start(struct redis *r, const struct redis_tls *tls);
void redis_again(struct redis *r, const struct redis_tls *tls); /* at the same port; it was killed */
/* each has a third of the slots */
void redis_start_cluster(struct redis r[static REDIS_CLUSTER], const struct redis_tls *tls);
void redis_stop(struct redis *r); /* kills it, also one that was stopped by a signal */

/* "SET", "name", ... The reply's text, number or first member, until the next call. */
const char *redis_do(struct redis *r, uint32_t n, const char *const words[]);
#define REDIS(r, ...) \
        redis_do(r, (uint32_t)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)), \
                 (const char *const[]){__VA_ARGS__})
/* Changes the values of all keys that begin so. Returns how many. */
uint32_t redis_change(struct redis *r, const char *prefix,
                      size_t (*change)(uint8_t *value, size_t n));
uint64_t redis_calls(struct redis *r, const char *command); /* so far */

#endif
