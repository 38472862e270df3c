/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_KEEPER_LINK_H
#define KVD_DAEMON_CHILDREN_KEEPER_LINK_H

/*
 * Hands descriptors to a keeper, which holds them for the next daemon: systemd's file descriptor
 * store, or kvd --keep. Both work the same way; without a keeper, nothing happens.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/loop.h"
#include "ipc/base/list.h"
#include "store/keep.h"

struct keep_entry;
struct notify;

struct keep {
        const struct notify *notify;
        struct keep_entry *entries; /* owned; NULL: there is no keeper */
        uint32_t *hashes;           /* owned; of the entries' names; 0: unused */
        uint32_t max, used;         /* limit of n; number of leading entries that were ever used */
        uint32_t n;                 /* number of entries to keep, without those to close */
        size_t bytes;               /* size of their names, with a separator each */
        struct kvd_list waiting;    /* entries with messages for the keeper, in order */
        struct loop_source queue;   /* writable when the keeper's queue has room */
        struct loop *loop;          /* NULL: not running yet */
        struct domain *(*domain)(struct keep *keep, const char *name); /* as in keep_ops */
};

/*
 * Takes FDSTORE, the maximum number of descriptors, from the environment. Call keep_clear
 * afterwards, even on failure.
 */
int keep_init(struct keep *keep, const struct notify *notify);
void keep_clear(struct keep *keep);
/* From now on, messages that do not fit into the keeper's queue are sent once there is room. */
void keep_start(struct keep *keep, struct loop *loop);

/* For store_config, with keep as the argument; NULL: there is no keeper. */
const struct keep_ops *keep_ops(const struct keep *keep);

/* For store_config: room for names, in bytes, and the least bytes that a name counts for. */
void keep_room(const struct keep *keep, uint64_t *bytes, uint64_t *least);

/* The keeper has this name already, since this daemon got its descriptor from it. */
void keep_known(struct keep *keep, const char *name);
uint32_t keep_count(const struct keep *keep);

#endif
