/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_INPROC_H
#define KVD_TESTS_INPROC_H

/*
 * The daemon as a thread of the test: sanitizers and replaced tables of system calls see it and its
 * clients alike.
 */

#include <pthread.h>

#include "tests/lib/instance.h"

struct config;
struct daemon;

struct inproc {
        pthread_t thread;
        struct daemon *daemon;
        struct instance in; /* pid is not used */
        int result;         /* what daemon_run returned */
};

/*
 * settings: "section.key=value", ended by NULL, in addition to a small pool, epoll and no log. May
 * be NULL.
 */
void inproc_start(struct inproc *d, const char *const *settings);
/* The same with a worker: this program is started with --worker. */
void inproc_start_with_worker(struct inproc *d, const char *const *settings, const char *program);
void inproc_stop(struct inproc *d); /* checks that it leaves no socket */

/* The same configuration, for a daemon that is started in another way. */
void inproc_configure(struct config *config, const char *socket, const char *const *settings);

#endif
