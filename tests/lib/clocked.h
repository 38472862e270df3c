/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_CLOCKED_H
#define KVD_TESTS_CLOCKED_H

/*
 * A daemon in a process of its own whose clock the test controls, so that its behaviour does not
 * depend on the speed of the machine. The clock advances only by the time that the test gives.
 * While there is a message, or a client runs that could send one, the clock stands still and the
 * daemon does nothing ahead of need.
 */

#include "tests/lib/daemon_process.h"

#define CLOCKED_CLIENTS 4u

struct clocked_page;

struct clocked {
        struct daemon_process process;
        struct clocked_page *page; /* shared with the daemon */
        int given, rested;         /* eventfds */
        uint64_t now_ns;           /* the clock, with all time that was given */
};

void clocked_start(struct clocked *c, const char *const *settings);
void clocked_end_clean(struct clocked *c); /* checks as instance_expect_clean does, and stops it */

/* Makes the calling process a client that uses the daemon's clock. */
void clocked_be_client(const struct clocked *c);
/* Registers process pid as client `number`: the daemon waits while it runs. */
void clocked_client(struct clocked *c, uint32_t number, pid_t pid);

/* Gives the daemon time and does not wait until it is used: a client may need it. */
void clocked_give(struct clocked *c, uint64_t ns);
/* Waits until the daemon has used up its time and has nothing to do. */
void clocked_rest(struct clocked *c);

#endif
