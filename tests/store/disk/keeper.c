/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/store/disk/keeper.h"

static int look(struct keeper *k, uint8_t *copies) {
        return volume_begin(&k->volume, &k->disk->disk, k->staging_bytes) ?:
                       volume_look(&k->volume, copies);
}

int keeper_judge(struct keeper *k, uint64_t extent_bytes) {
        uint8_t copies[FILE_COPIES * DISK_SECTOR];
        int r;

        head_begin(&k->head, k->disk->disk.bytes);
        r = look(k, copies);
        head_see(&k->head, r, copies);
        r = head_judge(&k->head, extent_bytes);
        return r < 0 ? r : k->head.whole ? KEEPER_FOUND : !k->head.ours ? KEEPER_NEW : KEEPER_LOST;
}

int keeper_tell(struct keeper *k) {
        struct file_super super;

        head_tell(&k->head, &super);
        k->head.error = k->head.error ?: volume_tell(&k->volume, &super);
        k->head.told = k->head.told || !k->head.error;
        return k->head.error;
}

int keeper_open(struct keeper *k, uint64_t extent_bytes) {
        int state = keeper_judge(k, extent_bytes), r = state < 0 ? state : keeper_tell(k);

        return r < 0 ? r : state;
}

int keeper_reopen(struct keeper *k) {
        uint8_t copies[FILE_COPIES * DISK_SECTOR];
        int r;

        volume_close(&k->volume);
        r = look(k, copies) ?: head_see_again(&k->head, copies);
        k->head.error = k->head.error ?: r;
        return keeper_tell(k);
}

void keeper_close(struct keeper *k) {
        volume_close(&k->volume);
}
