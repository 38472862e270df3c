/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_INPROC_H
#define KVD_TESTS_INPROC_H

/* The daemon as a thread of the test: sanitizers and replaced tables of system calls see it and its clients alike. */

#include <pthread.h>

struct daemon;

struct inproc {
        pthread_t thread;
        struct daemon *daemon;
        char dir[64], socket[96];
        int result; /* of daemon_run */
};

/* settings: "section.key=value" on top of a small pool, epoll and no log; ended by NULL. Ends the test on failure. */
void inproc_start(struct inproc *d, const char *const *settings);
/* The same, with a worker: the program that is started with --worker. */
void inproc_start_with_worker(struct inproc *d, const char *const *settings, const char *program);
void inproc_stop(struct inproc *d);

/* Every invariant of every space that the caller may see, and that nobody holds anything any more. */
void inproc_expect_clean(const struct inproc *d);

_Noreturn __attribute__((format(printf, 1, 2))) void give_up(const char *format, ...);

#endif
