/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_REMOTE_NAME_LOOKUP_H
#define KVD_DAEMON_PROCESS_REMOTE_NAME_LOOKUP_H

/*
 * Looks up names in threads, since getaddrinfo may take half a minute if a name server is silent. A
 * lookup that was left continues, and the next one for that name gets its result.
 */

#include <stdint.h>

#include "daemon/process/remote/server_address.h"
#include "ipc/base/why.h"

struct lookup;

/* NULL: it cannot begin, and why has the reason. Ends with lookup_leave, or with a result. */
struct lookup *lookup_begin(const char *host, uint16_t port, struct kvd_why *why);
void lookup_leave(struct lookup *lookup);
int lookup_fd(const struct lookup *lookup); /* readable once there is a result */
/* 1: *ret is filled; 0: no result yet; negative: the lookup failed, and why has the reason. */
int lookup_take(struct lookup *lookup, struct addresses *ret, struct kvd_why *why);

#endif
