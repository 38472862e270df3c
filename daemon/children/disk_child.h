/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_DISK_CHILD_H
#define KVD_DAEMON_CHILDREN_DISK_CHILD_H

/*
 * The owner's side of the disk process (kvd --disk), which reads and writes the file of the file
 * tier (store/file_tier.h). It is started with the daemon. A process that hangs is killed. Until it
 * is gone, according to the kernel, and the next one has opened the file, nothing in the file is
 * used, and no client waits for it.
 */

#include <stddef.h>

#include "daemon/base/config.h"
#include "daemon/children/child.h"
#include "store/store.h"

struct disk_owner;

/*
 * Opens and locks the file, and creates it if it is missing. *ret is NULL if the configuration names
 * none.
 */
int disk_owner_new(const struct config *config, struct loop *loop, struct store *store,
                   struct disk_owner **ret, struct kvd_why *why);
struct disk_owner *disk_owner_free(struct disk_owner *disk);
void disk_owner_start(struct disk_owner *disk); /* NULL is fine */

#endif
