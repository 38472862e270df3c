/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_DISK_OPS_H
#define KVD_STORE_FILE_DISK_OPS_H

/*
 * A disk as the file tier needs it: reads and writes of whole sectors of a file, many at once and
 * unordered, and a flush, which makes every write that completed before it durable.
 * The real one is in the disk process (daemon/process/disk); tests have one that forgets, tears and lies.
 */

#include <stdbool.h>
#include <stdint.h>

#define DISK_SECTOR 4096u

struct disk_io {
        uint64_t at; /* offset; like bytes and data, aligned to DISK_SECTOR */
        void *data;
        uint32_t bytes;
        int error; /* afterwards: 0 or a negative errno */
};

#define DISK_DEPTH 128u /* maximum number of I/Os in flight */

struct disk {
        uint64_t bytes; /* size; parts that are not allocated yet read as zeros */
        void (*begin)(struct disk *disk, struct disk_io *io, bool writes);
        /* Waits for an I/O in flight, whichever completes first. NULL if none. */
        struct disk_io *(*end)(struct disk *disk);
        int (*flush)(struct disk *disk); /* only while no I/O is in flight */
        /* announces the buffer of most I/Os, which outlives the disk; NULL: no need for it */
        void (*staging)(struct disk *disk, void *memory, uint64_t bytes);
};

#endif
