/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_DAEMON_H
#define KVD_TESTS_LIB_DAEMON_H

/*
 * A kvd of the test's own: started with --private in a new directory, ended and swept up at the end. Failures end the
 * test with a line: none of these calls returns one.
 */

#include <stdint.h>
#include <sys/types.h>

#include "ipc/msg.h"

struct conn;

struct daemon {
        pid_t pid;
        char dir[64];
        char socket[96];
};

/* arguments: further arguments, ended by NULL; may be NULL. The binary is $KVD. */
void daemon_start(struct daemon *d, const char *const *arguments);
void daemon_again(struct daemon *d, const char *const *arguments); /* in the same directory, after it ended */
void daemon_stop(struct daemon *d);   /* SIGTERM; it must exit with 0 */
void daemon_kill(struct daemon *d);   /* SIGKILL */
void daemon_sweep(struct daemon *d);  /* removes the directory */

struct conn *daemon_connect(const struct daemon *d);

/* Counts of the daemon's process, for leaks. */
uint32_t daemon_fds(const struct daemon *d);
uint64_t daemon_rss_kib(const struct daemon *d);

/* The first space, and what kvd says about it. slices of the reply live until the next call on conn. */
void space_facts(struct conn *conn, uint32_t nth, struct kvd_msg_space_info_reply *ret);

/* Walks every invariant of every space; ends the test with the first broken one. */
void expect_clean(struct conn *conn);

/* Waits until nobody fills or holds anything in any space (clients were reaped), at most ms. */
void expect_quiet(struct conn *conn, uint32_t ms);

/* Ends the test. */
_Noreturn __attribute__((format(printf, 1, 2))) void die(const char *format, ...);

#endif
