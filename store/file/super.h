/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_SUPER_H
#define KVD_STORE_FILE_SUPER_H

/* What volume.c and super.c share: a volume's superblock, and single sectors. */

#include "store/file/volume.h"

#define volume_refuse(v, error, ...) kvd_refuse(&(v)->why, error, __VA_ARGS__)

void volume_begin_all(struct volume *v, struct disk_io *ios, uint32_t n, bool writes);
void volume_end_all(struct volume *v);
int volume_read_sector(struct volume *v, uint32_t file, uint64_t at, void *to);
int volume_write_sector(struct volume *v, uint32_t file, uint64_t at, void *from);
/* A file whose flush fails is not used any more. */
int volume_flush(struct volume *v, uint32_t file);

/* Which files belong together, and which superblock counts; the volume has room for it. */
int super_read(struct volume *v, uint64_t extent_bytes);
/* To all files that are used: those that do not take it are not, any more. -EIO: none has. */
int super_write(struct volume *v);

/* Any number but 0. */
int super_random(struct volume *v, void *ret, size_t bytes);

#endif
