/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_CALLER_H
#define KVD_DAEMON_PROCESS_REMOTE_CALLER_H

/*
 * A thread for calls that may return late, or never: who wants one done waits for it until a
 * deadline, and then goes on without. One call is made at a time.
 */

#include <stdbool.h>
#include <stdint.h>

struct caller;

int caller_new(struct caller **ret); /* 0 or -ENOMEM; it stays as long as the process */

/* Only if none is on its way. */
void caller_begin(struct caller *caller, void (*call)(void *data), void *data);
/* Until no call is on its way any more, or it is so late (sys_now_ns). True: none is. */
bool caller_wait(struct caller *caller, uint64_t until_ns);

#endif
