/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_SUPER_H
#define KVD_STORE_FILE_SUPER_H

/* Shared by volume.c and super.c: a volume's superblock and single sectors. */

#include "store/file/volume.h"

#define volume_refuse(v, error, ...) kvd_refuse(&(v)->why, error, __VA_ARGS__)

void volume_begin_all(struct volume *v, struct disk_io *ios, uint32_t n, bool writes);
void volume_end_all(struct volume *v);
int volume_read_sector(struct volume *v, uint64_t at, void *to);
int volume_write_sector(struct volume *v, uint64_t at, void *from);
/* A failed flush breaks the volume. */
int volume_flush(struct volume *v);

/* Writes both copies, one after the other. A failed write breaks the volume. */
int super_write(struct volume *v);

#endif
