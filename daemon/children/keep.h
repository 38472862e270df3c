/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_KEEP_H
#define KVD_DAEMON_CHILDREN_KEEP_H

/*
 * Hands descriptors to whoever keeps them for the next daemon: systemd's file descriptor store, or
 * kvd --keep. Which of the two it is does not matter here; without either, nothing happens.
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
        struct keep_entry *entries; /* owned; NULL: nobody keeps anything */
        uint32_t *hashes;           /* owned; of the entries' names; 0: unused */
        uint32_t max, used;         /* that can be kept; entries that were ever used, which are in front */
        uint32_t n;                 /* that are to be kept: not those that the keeper is to close */
        size_t bytes;               /* of their names */
        struct kvd_list waiting;    /* entries of which the keeper is to be told, in order */
        struct loop_source queue;   /* there is room in the keeper's queue */
        struct loop *loop;          /* NULL: not running yet */
        struct domain *(*domain)(struct keep *keep, const char *name); /* as in keep_ops */
};

/* Takes FDSTORE, the number that is kept, from the environment. keep_clear is always to be called. */
int keep_init(struct keep *keep, const struct notify *notify);
void keep_clear(struct keep *keep);
/* From now on what does not fit into the keeper's queue is sent as soon as there is room. */
void keep_start(struct keep *keep, struct loop *loop);

/* For store_config, with keep as the argument; NULL: nobody keeps anything. */
const struct keep_ops *keep_ops(const struct keep *keep);

/* For store_config: room for names, in bytes, and the bytes that each counts for at least. */
void keep_room(const struct keep *keep, uint64_t *bytes, uint64_t *least);

/* It was handed to us, so it is kept already. */
void keep_known(struct keep *keep, const char *name);
uint32_t keep_count(const struct keep *keep);

#endif
