/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_DISK_DEVICE_H
#define KVD_DAEMON_PROCESS_DISK_DEVICE_H

/* A file, or block device, as the disk of a volume: by io_uring where that is allowed. */

#include "store/file/disk.h"

struct device;

/*
 * The descriptor stays the caller's. A file that is shorter than bytes is filled with zeros, a
 * piece a call: 1 then, and *done says how far. 0: it is as long as that; none is cut. -ENOSPC, -EIO
 * and others.
 */
int device_fill(int fd, uint64_t bytes, uint64_t *done);

int device_new(int fd, uint64_t bytes, struct device **ret);
struct disk *device_disk(struct device *device);

#endif
