/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_SUPER_H
#define KVD_STORE_FILE_SUPER_H

/* What volume.c and super.c share: a volume's superblock, and single sectors. */

#include "store/file/volume.h"

#define volume_refuse(v, error, ...) kvd_refuse(&(v)->why, error, __VA_ARGS__)

void volume_begin_all(struct volume *v, struct disk_io *ios, uint32_t n, bool writes);
void volume_end_all(struct volume *v);
int volume_read_sector(struct volume *v, uint64_t at, void *to);
int volume_write_sector(struct volume *v, uint64_t at, void *from);
/* Behind one that fails the volume is broken. */
int volume_flush(struct volume *v);

/* Both copies, one after the other. What does not take it is broken. */
int super_write(struct volume *v);

#endif
