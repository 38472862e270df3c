/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_REMOTE_CHILD_H
#define KVD_DAEMON_CHILDREN_REMOTE_CHILD_H

/*
 * The owner's side of the remote process (kvd --remote), which talks to the servers of the remote
 * tier (store/remote_tier.h). Servers that do not answer are retried after a pause, which doubles.
 * Meanwhile they get no requests, and no client waits.
 */

#include "daemon/base/config.h"
#include "daemon/children/child.h"
#include "store/store.h"

struct remote_owner;

/* Reads the key, the password and TLS files. *ret is NULL if the configuration names no servers. */
int remote_owner_new(const struct config *config, struct loop *loop, struct store *store,
                     struct remote_owner **ret, struct kvd_why *why);
struct remote_owner *remote_owner_free(struct remote_owner *remote);
void remote_owner_start(struct remote_owner *remote); /* NULL is fine */

#endif
