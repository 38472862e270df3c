/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_LOOKUP_H
#define KVD_DAEMON_PROCESS_REMOTE_LOOKUP_H

/*
 * A name is looked up by a thread, since libc returns when it likes: after half a minute, if a name
 * server is silent. Nobody has to wait for it: a lookup that was left goes on, and the next one of
 * that name has its result.
 */

#include <stdint.h>

#include "daemon/process/remote/address.h"
#include "ipc/base/why.h"

struct lookup;

/* NULL: it cannot be begun, and why says so. Ends with lookup_leave, or with a result. */
struct lookup *lookup_begin(const char *host, uint16_t port, struct kvd_why *why);
void lookup_leave(struct lookup *lookup);
int lookup_fd(const struct lookup *lookup); /* can be read once there is a result */
/* 1: *ret is filled; negative: there is no such name, or why else; 0: no result yet. */
int lookup_take(struct lookup *lookup, struct addresses *ret, struct kvd_why *why);

#endif
