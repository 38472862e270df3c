/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_VOLUME_H
#define KVD_STORE_FILE_VOLUME_H

/*
 * A volume: records (record.h) in a file. It handles the superblock and the extents. The caller
 * keeps the directory of records: it scans each extent once (volume_scan), and then decides the
 * place of each record. A place is extent x FILE_SLOTS + slot. A completed write can be read, but
 * may be lost in a power failure; a completed erasure is durable.
 *
 * The caller also decides the contents of the superblock (head.h): volume_look reads it,
 * volume_tell writes it.
 *
 * After a failed flush the contents of the file are unknown, and all operations fail (-EIO).
 */

#include "ipc/base/why.h"
#include "store/file/record.h"

#define FILE_SLOTS 2048u        /* maximum number of slots in an extent */
#define VOLUME_ITEMS DISK_DEPTH /* maximum number of record sectors in flight */

struct volume_item;

struct volume {
        struct disk *disk;
        bool broken;
        uint8_t key[KVD_SECRET_BYTES]; /* of its checksums */
        /* Copies a payload to staging, or from it (out). By default, payload is an address. */
        int (*copy)(const struct volume_item *item, void *staging, bool out);
        struct file_super *super; /* owned, as is all below: one sector, as last told */
        uint32_t n_extents;       /* 0 before the first volume_tell */
        uint32_t *slot_bytes;     /* of each extent; 0: not known to be used */
        uint8_t *staging;
        uint64_t staging_bytes;
        struct kvd_why why;
};

struct volume_item {
        uint64_t place;
        const struct kvd_label *label;
        const uint32_t *tokens;
        void *payload;  /* argument of copy: source of a write, destination of a read */
        uint32_t bytes; /* of the payload */
        int error;      /* result: 0; -EBADMSG: the record is not there; or the disk's */
};

static inline uint32_t file_slot_bytes(uint64_t payload_bytes, uint32_t n_tokens) {
        return (uint32_t)(file_head_bytes(n_tokens) + ALIGN_UP(payload_bytes, DISK_SECTOR));
}

/* Number of extents in a file. */
static inline uint32_t file_extents(uint64_t bytes, uint64_t extent_bytes) {
        return (uint32_t)MIN((bytes - FILE_HEAD) / extent_bytes, UINT32_MAX / FILE_SLOTS);
}

/* Number of slots in an extent. */
static inline uint32_t file_slots(uint64_t extent_bytes, uint32_t slot_bytes) {
        return (uint32_t)MIN((extent_bytes - DISK_SECTOR) / slot_bytes, FILE_SLOTS);
}

/*
 * staging_bytes: size of the buffer for I/Os in flight; no slot may be larger. The caller must call
 * volume_close even if this fails.
 */
int volume_begin(struct volume *volume, struct disk *disk, uint64_t staging_bytes);
void volume_close(struct volume *volume);

/*
 * Reads both copies of the superblock, whatever they contain; all zeros if the file is empty.
 * -EMEDIUMTYPE: both are zeros but the file has data, so it is not ours.
 */
int volume_look(struct volume *volume, uint8_t copies[static FILE_COPIES * DISK_SECTOR]);
/*
 * Writes the superblock, which is durable on return. The first one determines the size of extents
 * and the key of checksums. -EPROTO: it is invalid, or another file's.
 */
int volume_tell(struct volume *volume, const struct file_super *super);

/*
 * Reads the records of n slots of an extent, starting with slot first. The first scan of an extent
 * must start with slot 0; it also reads the slots' size into slot_bytes (0: the extent is unused).
 * Returns the number of records in ret, or a negative errno.
 */
int volume_scan(struct volume *volume, uint32_t extent, uint32_t first, uint32_t n,
                struct kvd_disk_found *ret);

/*
 * Both set each item's error. All slots of an extent have one size; a write of another size
 * changes it.
 */
void volume_write(struct volume *volume, struct volume_item *items, uint32_t n);
void volume_read(struct volume *volume, struct volume_item *items, uint32_t n);
int volume_erase(struct volume *volume, const uint64_t *places, uint32_t n);

#endif
