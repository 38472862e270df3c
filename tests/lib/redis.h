/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_REDIS_H
#define KVD_TESTS_LIB_REDIS_H

/* Real redis-server processes on loopback, which end with the test. A failure ends the test. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define REDIS_CLUSTER 3u

struct redis {
        pid_t pid;
        uint16_t port, bus; /* bus: the port on which servers of a Cluster talk to each other */
        int fd;             /* Unix socket that redis_do uses */
        char dir[64];
};

/* How the port uses TLS. */
struct redis_tls {
        const char *folder, *name; /* folder of ca.pem; name of the server's certificate */
        bool asks;                 /* whether clients need certificates */
};

bool redis_is_there(void); /* the program is installed */
bool redis_has_tls(void);  /* the program was built with TLS; prints a line if not */

/* tls: NULL for no TLS. */
void redis_start(struct redis *r, const struct redis_tls *tls);
void redis_again(struct redis *r, const struct redis_tls *tls); /* kills it first; the same port */
/* each has a third of the slots */
void redis_start_cluster(struct redis r[static REDIS_CLUSTER], const struct redis_tls *tls);
void redis_stop(struct redis *r); /* kills it, even if a signal has stopped it */

/* words: "SET", "name", ... The reply's text, number or first member, valid until the next call. */
const char *redis_do(struct redis *r, uint32_t n, const char *const words[]);
#define REDIS(r, ...) \
        redis_do(r, (uint32_t)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)), \
                 (const char *const[]){__VA_ARGS__})
/* Changes the values of all keys with this prefix. Returns how many. */
uint32_t redis_change(struct redis *r, const char *prefix,
                      size_t (*change)(uint8_t *value, size_t n));
uint64_t redis_calls(struct redis *r, const char *command); /* so far */

#endif
