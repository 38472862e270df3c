/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads and writes the two copies of a file's superblock, in such a way that one of them is intact
 * at any time.
 */

#include "store/file/super.h"

#include <errno.h>
#include <string.h>

/* ---- sectors --------------------------------------------------------------------------------- */

void volume_begin_all(struct volume *v, struct disk_io *ios, uint32_t n, bool writes) {
        for (uint32_t i = 0; i < n; i++)
                v->disk->begin(v->disk, &ios[i], writes);
}

void volume_end_all(struct volume *v) {
        while (v->disk->end(v->disk))
                ;
}

static int move_sector(struct volume *v, struct disk_io io, bool writes) {
        io.bytes = DISK_SECTOR;
        volume_begin_all(v, &io, 1, writes);
        volume_end_all(v);
        return io.error;
}

int volume_read_sector(struct volume *v, uint64_t at, void *to) {
        return move_sector(v, (struct disk_io){.at = at, .data = to}, false);
}

int volume_write_sector(struct volume *v, uint64_t at, void *from) {
        return move_sector(v, (struct disk_io){.at = at, .data = from}, true);
}

int volume_flush(struct volume *v) {
        int r = v->disk->flush(v->disk);

        v->broken = v->broken || r < 0;
        return r;
}

static uint64_t copy_at(uint32_t copy) {
        return copy * FILE_HEAD / FILE_COPIES;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Reads it back, since a disk may have written it elsewhere. */
static int write_copy(struct volume *v, uint32_t copy) {
        int r = volume_write_sector(v, copy_at(copy), v->super);

        if (r == 0)
                r = volume_flush(v);
        if (r == 0)
                r = volume_read_sector(v, copy_at(copy), v->staging);
        if (r == 0 && memcmp(v->staging, v->super, DISK_SECTOR) != 0)
                r = -EIO;
        return r;
}

/* Any error breaks the volume, since nothing can be erased there any more. */
int super_write(struct volume *v) {
        int r = 0;

        for (uint32_t copy = 0; r == 0 && copy < FILE_COPIES; copy++)
                r = write_copy(v, copy);
        v->broken = v->broken || r < 0;
        return r < 0 ? volume_refuse(v, r, "the superblock cannot be written: %s", strerror(-r)) :
                       0;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool all_zero(const uint8_t *sector) {
        return !sector[0] && memcmp(sector, sector + 1, DISK_SECTOR - 1) == 0;
}

static int look_at(struct volume *v, uint64_t at) {
        int r = volume_read_sector(v, at, v->staging);

        return r == 0 && !all_zero(v->staging) ? -EMEDIUMTYPE : r;
}

#define LOOKS 64u

/*
 * A file without superblock that has data is not ours. Probes powers of two, where other formats
 * keep headers, and LOOKS evenly spaced sectors.
 */
static int look_for_data(struct volume *v) {
        uint64_t sectors = v->disk->bytes / DISK_SECTOR;
        int r = 0;

        for (uint64_t at = 1; r == 0 && at < sectors; at *= 2)
                r = look_at(v, at * DISK_SECTOR);
        for (uint32_t i = 1; r == 0 && i <= LOOKS; i++)
                r = look_at(v, (sectors - 1) * i / LOOKS * DISK_SECTOR);
        return r;
}

int volume_look(struct volume *v, uint8_t copies[static FILE_COPIES * DISK_SECTOR]) {
        bool none = true;
        int r = 0;

        for (uint32_t copy = 0; r == 0 && copy < FILE_COPIES; copy++) {
                r = volume_read_sector(v, copy_at(copy), v->staging);
                memcpy(copies + copy * DISK_SECTOR, v->staging, DISK_SECTOR);
                none = none && all_zero(v->staging);
        }
        return r == 0 && none ? look_for_data(v) : r;
}
