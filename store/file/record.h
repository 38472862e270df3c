/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_RECORD_H
#define KVD_STORE_FILE_RECORD_H

/*
 * What lies on the disk, version 1. All numbers are little-endian; everything is in whole sectors
 * of 4 KiB, and what is not named is zero.
 *
 *      0            superblock          two copies: the whole one with the higher serial counts
 *      64 KiB       superblock
 *      128 KiB      extent 0            one sector says how large its slots are,
 *      ...          extent 1            then slots: a record's sector, and its payload
 *
 * A sector is whole if its checksum, made with the file's secret, is right. A record counts if
 * and only if its sector is whole and names the place where it lies, its epoch is that of a
 * namespace in the superblock, and its payload has the checksum that belongs to all of this. So
 * nothing needs to be written in an order, and nothing is a journal: what was lost or torn is not
 * there.
 *
 * A namespace is a space with its domain and geometry. Its epoch is a number that was never given
 * before, so that all its records are erased when the superblock names another one, or none.
 *
 * A record whose epoch is FILE_NO_EPOCH, which is no namespace's, counts only for who wrote it: an
 * exact copy (copies.c), whose slot is free after a restart.
 *
 * Several files have one superblock: each has a copy, and all that is written is written to each,
 * if not at once; a record may be behind one in another file, and is in none before that one's
 * superblock has its epoch. Which of them belong together they say themselves: all have the
 * secret, and the set, a number that was made when they were opened last. Of these the newest
 * superblock counts, so that a file which had failed meanwhile has nothing that was erased. One
 * that has been opened with the secret and in another set may have given the same numbers to
 * something else: it begins a new life, by which its checksums are made, too, and all its records
 * are none.
 */

#include <assert.h>
#include <stdbool.h>

#include "ipc/base/disk.h"
#include "ipc/base/key.h"
#include "store/disk.h"
#include "store/file/disk.h"

#define FILE_MAGIC UINT64_C(0x656c69660064766b) /* "kvd\0file" */
#define FILE_VERSION 1u
#define FILE_HEAD (UINT64_C(128) << 10)
#define FILE_COPIES 2u
#define FILE_NAMESPACES 158u
static_assert(FILE_NAMESPACES == STORE_DISK_SPACES, "domains have shares of them");
#define FILE_NO_EPOCH 0u /* those of namespaces count from 1 */

/* of a sector: what it is */
enum file_sector { FILE_SUPER = 1, FILE_EXTENT, FILE_RECORD };

struct file_mark { /* begins every sector but a payload's */
        uint64_t magic;
        uint32_t version, what;
        struct kvd_key checksum; /* of the sector, this one apart */
};

struct file_super {
        struct file_mark mark;
        uint64_t serial;         /* of this writing */
        uint64_t bytes, extent_bytes; /* of this file; what is not, is the same in all */
        uint64_t opening;        /* counts them: sequences of one begin at file_sequence_of(it) */
        uint64_t next_epoch;
        uint32_t n_namespaces, pad;
        uint8_t secret[KVD_SECRET_BYTES];
        struct kvd_disk_namespace namespaces[FILE_NAMESPACES];
        uint64_t life;           /* of this file; 0: the first one of the secret's */
        uint64_t set;            /* of the files that were opened together; 0: by a kvd that had one */
        uint64_t rest[2];
};
static_assert(sizeof(struct file_super) == DISK_SECTOR, "version 1");

struct file_extent {
        struct file_mark mark;
        uint64_t number;
        uint32_t slot_bytes, pad;
        uint8_t rest[DISK_SECTOR - 48];
};
static_assert(sizeof(struct file_extent) == DISK_SECTOR, "version 1");

struct file_record {
        struct file_mark mark;
        uint64_t place;
        struct kvd_label label;
        uint64_t payload_bytes;
        struct kvd_key payload;
        uint32_t tokens[KVD_MAX_BLOCK_TOKENS];
        uint8_t rest[DISK_SECTOR - 1136];
};
static_assert(sizeof(struct file_record) == DISK_SECTOR, "version 1");

static inline uint64_t file_sequence_of(uint64_t opening) {
        return opening << 40;
}

/* What the checksums of a file's extents and records are made with. */
void file_key_of_life(const uint8_t *secret, uint64_t life, uint8_t *ret);

/* Before a sector is written; and of one that was read: is it such a one, and whole? */
void file_sector_seal(const uint8_t *secret, enum file_sector what, struct file_mark *sector);
bool file_sector_whole(const uint8_t *secret, enum file_sector what,
                       const struct file_mark *sector);

/* Is it whole, and can it be one? Whose it is it does not say. */
bool file_super_makes_sense(const struct file_super *super);

/*
 * What clients call a record: openings and what is counted in each, as much as there is room for.
 */
static inline uint64_t file_handle(uint64_t sequence) {
        return kvd_hint_handle(sequence >> 40 << 32 | (uint32_t)sequence);
}

/* Where to look for a record: tokens decide whether it is the one. */
uint64_t file_tag(const uint8_t *secret, const struct kvd_label *label, const uint32_t *tokens);
struct kvd_record_key file_key(const uint8_t *secret, const struct kvd_label *label,
                               const uint32_t *tokens);

void file_record_make(const uint8_t *secret, const struct kvd_label *label, const uint32_t *tokens,
                      uint64_t place, const void *payload, uint64_t bytes, struct file_record *ret);

/* Is it whole, and where it belongs? */
bool file_record_lies_right(const uint8_t *secret, const struct file_record *record,
                            uint64_t place);
/* ... is it the one that is asked for, and is this its payload? */
bool file_record_is(const uint8_t *secret, const struct file_record *record,
                    const struct kvd_label *label, const uint32_t *tokens, uint64_t place,
                    const void *payload, uint64_t bytes);

#endif
