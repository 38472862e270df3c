/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_CALLER_H
#define KVD_DAEMON_PROCESS_REMOTE_CALLER_H

/*
 * A thread for calls that may return late, or never. Its user waits for a call until a deadline,
 * and then continues without it. Only one call can be under way.
 */

#include <stdbool.h>
#include <stdint.h>

struct caller;

int caller_new(struct caller **ret); /* 0 or -ENOMEM; lives as long as the process */

/* Starts a call. No other one may be under way. */
void caller_begin(struct caller *caller, void (*call)(void *data), void *data);
/* Waits until the call has returned, or until_ns (sys_now_ns). True: no call is under way. */
bool caller_wait(struct caller *caller, uint64_t until_ns);

#endif
