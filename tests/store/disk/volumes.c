/* SPDX-License-Identifier: Apache-2.0 */

/*
 * This process plays the daemon and all disk processes: it reads each file's superblocks, has the
 * set judge them, and writes each file's new superblock.
 */

#include "tests/store/disk/volumes.h"

#include <errno.h>

int volumes_judge(struct volumes *v, uint64_t extent_bytes, uint64_t staging_bytes) {
        static uint8_t copies[FILE_COPIES * DISK_SECTOR];
        uint64_t bytes[VOLUMES] = {0};

        for (uint32_t i = 0; i < v->n; i++)
                bytes[i] = v->disks[i]->disk.bytes;
        set_begin(&v->set, v->n, bytes);
        for (uint32_t i = 0; i < v->n; i++) {
                int r = v->missing[i];

                if (!r)
                        r = volume_begin(&v->volumes[i], &v->disks[i]->disk, staging_bytes);
                if (!r)
                        r = volume_look(&v->volumes[i], copies);
                set_see(&v->set, i, r, copies);
        }
        return set_judge(&v->set, extent_bytes);
}

int volumes_tell(struct volumes *v, uint32_t file) {
        struct set_file *f = &v->set.files[file];
        struct file_super super;

        set_tell(&v->set, file, &super);
        f->error = f->error ?: volume_tell(&v->volumes[file], &super);
        f->told = f->told || !f->error;
        return f->error;
}

int volumes_tell_all(struct volumes *v) {
        int r = -EIO;

        for (uint32_t i = 0; i < v->n; i++)
                if (!v->set.files[i].error && volumes_tell(v, i) == 0)
                        r = 0;
        return r;
}

int volumes_open(struct volumes *v, uint64_t extent_bytes, uint64_t staging_bytes) {
        int r = volumes_judge(v, extent_bytes, staging_bytes), best = SET_LEFT;

        if (r == 0)
                r = volumes_tell_all(v);
        for (uint32_t i = 0; r == 0 && i < v->n; i++)
                if (!v->set.files[i].error)
                        best = MIN(best, (int)v->set.files[i].state);
        return r < 0 ? r : best;
}

void volumes_close(struct volumes *v) {
        for (uint32_t i = 0; i < v->n; i++)
                volume_close(&v->volumes[i]);
}
