/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_NOTIFY_H
#define KVD_DAEMON_BASE_NOTIFY_H

/*
 * Tells the service manager how we are: sd_notify(3) without its library. Without one, nothing
 * happens.
 */

#include <stdint.h>

struct notify {
        int fd; /* owned; -1: nobody wants to know */
        uint64_t watchdog_ns; /* WATCHDOG=1 must come at least this often; 0: not wanted */
};

/* Takes NOTIFY_SOCKET and WATCHDOG_USEC from the environment, and removes them. */
int notify_open(struct notify *notify);
void notify_close(struct notify *notify);

/*
 * state: lines as of sd_notify(3). Gives a manager that is busy up to wait_ms; nothing depends on
 * its being heard.
 */
void notify_send(const struct notify *notify, const char *state, int wait_ms);

#endif
