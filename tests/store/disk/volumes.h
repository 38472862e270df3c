/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_DISK_VOLUMES_H
#define KVD_TESTS_STORE_DISK_VOLUMES_H

/*
 * Files that hold one cache, each with its own volume, opened in the same way as by the daemon and
 * its disk processes.
 */

#include "store/file/set.h"
#include "store/file/volume.h"
#include "tests/store/disk/simulated.h"

#define VOLUMES 3u /* maximum number of files */

struct volumes {
        uint32_t n;
        struct simulated *disks[VOLUMES];
        int missing[VOLUMES];           /* the error of opening it; 0: it can be opened */
        struct volume volumes[VOLUMES]; /* valid unless missing */
        struct set set;
};

/* Reads the superblocks and has the set judge them. 0, or a negative errno. Writes nothing. */
int volumes_judge(struct volumes *v, uint64_t extent_bytes, uint64_t staging_bytes);
/* Writes the current superblock to a file. A file that fails is not used any more. */
int volumes_tell(struct volumes *v, uint32_t file);
/* Writes the superblock to all files in use. -EIO: no file is left. */
int volumes_tell_all(struct volumes *v);
/* Judges and tells all. The best state of the files in use, or a negative errno. */
int volumes_open(struct volumes *v, uint64_t extent_bytes, uint64_t staging_bytes);
void volumes_close(struct volumes *v);

#endif
