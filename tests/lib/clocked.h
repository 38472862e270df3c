/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_CLOCKED_H
#define KVD_TESTS_CLOCKED_H

/*
 * A daemon in a process of its own whose time is the test's, so that what it does does not depend
 * on how fast the machine is. It has no time but what the test gives it, and uses none of that, nor
 * does it anything ahead of need, while there is a message or a client runs that could send one.
 */

#include "tests/lib/daemon_process.h"

#define CLOCKED_CLIENTS 4u

struct clocked_page;

struct clocked {
        struct daemon_process process;
        struct clocked_page *page; /* shared with it */
        int given, rested;         /* eventfds */
        uint64_t now_ns;           /* all of the time that was given */
};

void clocked_start(struct clocked *c, const char *const *settings);
void clocked_end_clean(struct clocked *c); /* with the ends of instance_expect_clean */

/* The caller is a client's process, and has the daemon's time. */
void clocked_be_client(const struct clocked *c);
/* Process pid is the client of that number: it may run. */
void clocked_client(struct clocked *c, uint32_t number, pid_t pid);

/* Gives it time, without waiting for it: a client may need some. */
void clocked_give(struct clocked *c, uint64_t ns);
/* Waits until it has used up its time and has nothing to do. */
void clocked_rest(struct clocked *c);

#endif
