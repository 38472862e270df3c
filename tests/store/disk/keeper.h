/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_STORE_DISK_KEEPER_H
#define KVD_TESTS_STORE_DISK_KEEPER_H

/* Opens a volume in the same way as the daemon and its disk process: this process plays both. */

#include "store/file/head.h"
#include "store/file/volume.h"
#include "tests/store/disk/simulated.h"

enum keeper_state { KEEPER_FOUND, KEEPER_NEW, KEEPER_LOST }; /* LOST: both copies are broken */

struct keeper {
        struct simulated *disk;
        uint64_t staging_bytes;
        struct volume volume;
        struct head head;
};

/* Reads the superblocks and has them judged. The state, or a negative errno. Writes nothing. */
int keeper_judge(struct keeper *k, uint64_t extent_bytes);
/* Writes the current superblock. A file that fails is not used any more. */
int keeper_tell(struct keeper *k);
/* Judges and tells. The state, or a negative errno. */
int keeper_open(struct keeper *k, uint64_t extent_bytes);
/* A new process opens the file again, and gets the current superblock. */
int keeper_reopen(struct keeper *k);
void keeper_close(struct keeper *k);

#endif
