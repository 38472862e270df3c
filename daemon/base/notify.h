/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_BASE_NOTIFY_H
#define KVD_DAEMON_BASE_NOTIFY_H

/*
 * Reports the daemon's state to the service manager: sd_notify(3) without its library. Does nothing
 * without a service manager.
 */

#include <stdint.h>

struct notify {
        int fd;               /* owned; -1: there is no service manager */
        uint64_t watchdog_ns; /* maximum time between WATCHDOG=1 messages; 0: none are expected */
};

/* Takes NOTIFY_SOCKET and WATCHDOG_USEC from the environment, and removes them. */
int notify_open(struct notify *notify);
void notify_close(struct notify *notify);

/*
 * state: lines as in sd_notify(3). Waits up to wait_ms if the manager is busy. The message may be
 * lost; nothing depends on it.
 */
void notify_send(const struct notify *notify, const char *state, int wait_ms);

#endif
