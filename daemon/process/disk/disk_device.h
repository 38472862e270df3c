/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_DISK_DISK_DEVICE_H
#define KVD_DAEMON_PROCESS_DISK_DISK_DEVICE_H

/* A file or block device as the disk of a volume, through io_uring where that is allowed. */

#include "store/file/disk_ops.h"

struct device;

/*
 * The descriptor stays the caller's. Extends a file to bytes with zeros, one piece per call.
 * Returns 1 if it wrote a piece, with the new size in *done; 0 if the file is long enough (it is
 * never truncated); or a negative errno, such as -ENOSPC.
 */
int device_fill(int fd, uint64_t bytes, uint64_t *done);

int device_new(int fd, uint64_t bytes, struct device **ret);
struct disk *device_disk(struct device *device);

#endif
