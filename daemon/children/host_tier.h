/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_HOST_TIER_H
#define KVD_DAEMON_CHILDREN_HOST_TIER_H

/*
 * The timer of a tier in host memory below a pool on a GPU, without a file (store/file/host.c). It
 * checks for blocks to write ahead of need a few times a second; requests that a client waits for
 * are served immediately.
 */

#include "daemon/base/loop.h"
#include "daemon/base/config.h"
#include "daemon/children/tier_errors.h"
#include "store/store.h"

struct host_tier {
        struct loop *loop;
        struct store *store; /* NULL: there is no such tier */
        struct loop_timer look;
        struct tier_errors errors;
};

/* Does nothing if host_tier is 0, or if there is a file: then disk_child.h serves the tier. */
int host_tier_begin(struct host_tier *tier, const struct config *config, struct loop *loop,
                    struct store *store, struct kvd_why *why);
void host_tier_end(struct host_tier *tier);

#endif
