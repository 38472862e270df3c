/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_VOLUME_H
#define KVD_STORE_FILE_VOLUME_H

/*
 * A volume: records (record.h) in a file. It knows superblock and extents; what is where is its
 * caller's to know, who asks once for all that an extent holds (volume_scan) and says from then on
 * which place a record goes to. A place is extent x FILE_SLOTS + slot. A write is there when it was
 * answered, and may be gone after a power cut; an erasure that was answered is for good.
 *
 * What the superblock says is its caller's to know, too, since that of several files is one
 * (set.h): volume_look says what lies there, volume_tell writes what is to be there.
 *
 * After a flush that failed nobody knows what the file has: nothing is asked of it any more, and
 * everything fails (-EIO).
 */

#include "ipc/base/why.h"
#include "store/file/record.h"

#define FILE_SLOTS 2048u  /* most of an extent */
#define VOLUME_ITEMS DISK_DEPTH /* headers under way at once */

struct volume_item;

struct volume {
        struct disk *disk;
        bool broken;
        uint8_t key[KVD_SECRET_BYTES]; /* of its checksums */
        /* A payload from where it belongs to staging, or back (out); at first, payload is memory. */
        int (*copy)(const struct volume_item *item, void *staging, bool out);
        struct file_super *super; /* owned, as is all below: one sector, as the file has it */
        uint32_t n_extents;       /* 0: it was not told of any superblock yet */
        uint32_t *slot_bytes;     /* of each extent; 0: not known to be used */
        uint8_t *staging;
        uint64_t staging_bytes;
        struct kvd_why why;
};

struct volume_item {
        uint64_t place;
        const struct kvd_label *label;
        const uint32_t *tokens;
        void *payload;           /* what copy takes: written from, or read to, if it was right */
        uint32_t bytes;          /* of it */
        int error;               /* afterwards: 0; -EBADMSG: it is not there; or the disk's */
};

static inline uint32_t file_slot_bytes(uint64_t payload_bytes) {
        return (uint32_t)(DISK_SECTOR + ALIGN_UP(payload_bytes, DISK_SECTOR));
}

/* Extents of a file. */
static inline uint32_t file_extents(uint64_t bytes, uint64_t extent_bytes) {
        return (uint32_t)MIN((bytes - FILE_HEAD) / extent_bytes, UINT32_MAX / FILE_SLOTS);
}

/* Slots of an extent. */
static inline uint32_t file_slots(uint64_t extent_bytes, uint32_t slot_bytes) {
        return (uint32_t)MIN((extent_bytes - DISK_SECTOR) / slot_bytes, FILE_SLOTS);
}

/*
 * staging_bytes: room for what is on its way at once; no slot may be larger. Whatever is returned,
 * volume_close is to be called.
 */
int volume_begin(struct volume *volume, struct disk *disk, uint64_t staging_bytes);
void volume_close(struct volume *volume);

/*
 * Both copies of the superblock as they lie there, of zeros if there are none; nothing is written.
 * -EMEDIUMTYPE: there are none, and it has data: it is not ours.
 */
int volume_look(struct volume *volume, uint8_t copies[static FILE_COPIES * DISK_SECTOR]);
/*
 * What its superblock is from now on, which is for good when it was answered. The first one says
 * how large its extents are, and how its checksums are made. -EPROTO: it is none, or another
 * file's.
 */
int volume_tell(struct volume *volume, const struct file_super *super);

/*
 * The records of n slots of an extent from the first on, which is 0 at first: then the extent says
 * how large they are (slot_bytes; 0: nothing is there). Returns how many, or a negative errno.
 */
int volume_scan(struct volume *volume, uint32_t extent, uint32_t first, uint32_t n,
                struct kvd_disk_found *ret);

/* All slots of a write's extent are of one size. */
void volume_write(struct volume *volume, struct volume_item *items, uint32_t n);
void volume_read(struct volume *volume, struct volume_item *items, uint32_t n);
int volume_erase(struct volume *volume, const uint64_t *places, uint32_t n);

#endif
