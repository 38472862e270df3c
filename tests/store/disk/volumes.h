/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_DISK_VOLUMES_H
#define KVD_TESTS_STORE_DISK_VOLUMES_H

/*
 * Files that have one cache, each with a volume of its own, opened as the daemon and its disk
 * processes do.
 */

#include "store/file/set.h"
#include "store/file/volume.h"
#include "tests/store/disk/simulated.h"

#define VOLUMES 3u /* at most */

struct volumes {
        uint32_t n;
        struct simulated *disks[VOLUMES];
        int missing[VOLUMES];           /* an error: it cannot be opened */
        struct volume volumes[VOLUMES]; /* valid if there is one */
        struct set set;
};

/* What the set makes of them; 0, or a negative errno. Nothing is written. */
int volumes_judge(struct volumes *v, uint64_t extent_bytes, uint64_t staging_bytes);
/*
 * Writes a file's superblock, of which it has none that is newer. One that fails is not used any
 * more.
 */
int volumes_tell(struct volumes *v, uint32_t file);
/* ... all of those that are used. -EIO: none is, any more. */
int volumes_tell_all(struct volumes *v);
/* Both: the best state of those that are used, or the first one's error if none is. */
int volumes_open(struct volumes *v, uint64_t extent_bytes, uint64_t staging_bytes);
void volumes_close(struct volumes *v);

#endif
