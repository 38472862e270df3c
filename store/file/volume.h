/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_VOLUME_H
#define KVD_STORE_FILE_VOLUME_H

/*
 * A volume: records (record.h) in one file or several. It knows superblock and extents; what is
 * where is its caller's to know, who asks once for all that an extent holds (volume_scan) and says
 * from then on which place a record goes to. A place is extent x FILE_SLOTS + slot; extents are
 * numbered from the first file on. A write is there when it was answered, and may be gone after a
 * power cut; an erasure that was answered is for good, in all files that the volume has then.
 *
 * After a flush that failed nobody knows what a file has: nothing is asked of it any more, and what
 * is there fails (-EIO). The others go on; without any everything fails.
 */

#include "ipc/base/why.h"
#include "store/file/record.h"

#define FILE_SLOTS 2048u  /* most of an extent */
#define VOLUME_ITEMS DISK_DEPTH /* headers under way at once */

struct volume_item;

/* LEFT: it was used without the others of these files: what it had is not believed. */
enum volume_state { VOLUME_FOUND, VOLUME_NEW, VOLUME_LOST, VOLUME_LEFT };

struct volume_file {
        enum volume_state state;  /* as it was found */
        int error;                /* why it is not used; 0: it is */
        uint64_t extent_bytes, life;
        uint32_t first, n_extents; /* of the volume's */
        uint8_t key[KVD_SECRET_BYTES]; /* of its checksums */
};

struct volume {
        struct disk *disk;
        struct volume_file files[DISK_FILES]; /* as many as the disk has */
        /* A payload from where it belongs to staging, or back (out); at first, payload is memory. */
        int (*copy)(const struct volume_item *item, void *staging, bool out);
        struct file_super *super; /* owned, as is all below: one sector, as a file has it */
        uint32_t n_extents;
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

/* Slots of an extent. */
static inline uint32_t file_slots(uint64_t extent_bytes, uint32_t slot_bytes) {
        return (uint32_t)MIN((extent_bytes - DISK_SECTOR) / slot_bytes, FILE_SLOTS);
}

/*
 * Which files can be used, and as what: nothing is written. One of zeros can, with extents of
 * that size, and so can one whose superblocks are both broken (VOLUME_LOST); others are left as
 * they are, with an error: -EMEDIUMTYPE: it is something else, or of another version; -ERANGE: it
 * was made with another size. -EXDEV, of all: they have records of different volumes. Whatever is
 * returned, volume_close is to be called. staging_bytes: room for what is on its way at once; no
 * slot may be larger.
 */
int volume_judge(struct volume *volume, struct disk *disk, uint64_t extent_bytes,
                 uint64_t staging_bytes);
/*
 * Behind that, when those that can be used are as large as they are to be, or have an error.
 * Returns the best state of those that are used, or the first one's error if none is.
 */
int volume_open(struct volume *volume);
void volume_close(struct volume *volume);

/* -EIO: no file is used any more. */
int volume_broken(struct volume *volume);
/* The file that an extent is in; there is such an extent. */
uint32_t volume_file_of(const struct volume *volume, uint64_t extent);
/* Why a file is not used, in words. */
const char *volume_file_why(int error);

/*
 * The records of n slots of an extent from the first on, which is 0 at first: then the extent says
 * how large they are (slot_bytes; 0: nothing is there). Returns how many, or a negative errno.
 */
int volume_scan(struct volume *volume, uint32_t extent, uint32_t first, uint32_t n,
                struct kvd_disk_found *ret);

/* The epoch of a namespace, which is entered if it is new. -ENOSPC: there are too many. */
int volume_namespace(struct volume *volume, struct kvd_key id, uint64_t *epoch);
/* Erases all that it has, and forgets it. */
int volume_forget(struct volume *volume, struct kvd_key id);

/* All slots of a write's extent are of one size. */
void volume_write(struct volume *volume, struct volume_item *items, uint32_t n);
void volume_read(struct volume *volume, struct volume_item *items, uint32_t n);
int volume_erase(struct volume *volume, const uint64_t *places, uint32_t n);

#endif
