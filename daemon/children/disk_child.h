/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_DISK_CHILD_H
#define KVD_DAEMON_CHILDREN_DISK_CHILD_H

/*
 * The owner's side of the disk processes (kvd --disk), one for each file of the file tier
 * (store/disk.h), which read and write them. They are started with the daemon. One that hangs is
 * ended; until the kernel says that it is gone, and the next one has the file open, nothing of
 * its file is used, and nobody waits for it.
 */

#include <stddef.h>

#include "daemon/base/config.h"
#include "daemon/children/child.h"
#include "store/store.h"

struct disk_owner;

/*
 * Opens the files, which nobody else may have open in that way; makes those that are missing.
 * *ret is NULL if the configuration names none.
 */
int disk_owner_new(const struct config *config, struct loop *loop, struct store *store,
                   struct disk_owner **ret, struct kvd_why *why);
struct disk_owner *disk_owner_free(struct disk_owner *disk);
void disk_owner_start(struct disk_owner *disk); /* NULL is fine */

#endif
