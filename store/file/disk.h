/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_DISK_H
#define KVD_STORE_FILE_DISK_H

/*
 * A disk as the file tier needs one: reads and writes of whole sectors of a file, many at once
 * and in no order, and a flush behind which everything that was answered before is there to stay.
 * The real one is the disk process's (daemon/process/disk); tests have one that forgets, tears and lies.
 */

#include <stdbool.h>
#include <stdint.h>

#define DISK_SECTOR 4096u

struct disk_io {
        uint64_t at;    /* like bytes and the memory, a multiple of DISK_SECTOR */
        void *data;
        uint32_t bytes;
        int error;      /* afterwards: 0 or a negative errno */
};

#define DISK_DEPTH 128u /* of those that have begun and not ended */

struct disk {
        uint64_t bytes; /* of which some may not be there yet: they are read as zeros */
        void (*begin)(struct disk *disk, struct disk_io *io, bool writes);
        /* One that has begun, whichever is done first; waits for it. NULL: there is none. */
        struct disk_io *(*end)(struct disk *disk);
        int (*flush)(struct disk *disk); /* when all have ended */
        /* what most of them are from or to, which is there as long as the disk; NULL: who cares */
        void (*staging)(struct disk *disk, void *memory, uint64_t bytes);
};

#endif
