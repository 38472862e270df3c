/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_FILE_RECORD_H
#define KVD_STORE_FILE_RECORD_H

/*
 * The format of a file, version 1. All numbers are little-endian. Everything is in whole sectors of
 * 4 KiB, and unused bytes are zero.
 *
 *      0            superblock          two copies: the intact one with the higher serial counts
 *      64 KiB       superblock
 *      128 KiB      extent 0            one sector with the size of its slots, then
 *      ...          extent 1            the slots: a record's sector and its payload; if the block has
 *                                       more tokens than a sector holds, sectors with them in between
 *
 * A sector is intact if its checksum, which is keyed with the file's secret, is right. A record
 * counts if and only if its sector is intact and names the place where it lies, its epoch is that
 * of a namespace in the superblock, and its payload has the checksum that covers all of this. So
 * writes need no order and no journal: a record that was lost or torn does not count.
 *
 * A namespace is a space with its domain and geometry. An epoch is never used twice, so all records
 * of a namespace are erased once the superblock has it with another epoch, or not at all.
 *
 * A record with the epoch FILE_NO_EPOCH, which no namespace has, is an exact copy (cold_copies.c).
 * It counts only for the daemon that wrote it; after a restart its slot is free.
 *
 * The life and the set in a superblock are kept for older versions of kvd, which spread a cache over
 * several files: a file with the same secret, but another set, was opened without the others. The
 * life is part of the key of the file's checksums.
 */

#include <assert.h>
#include <stdbool.h>

#include "ipc/base/disk.h"
#include "ipc/base/key.h"
#include "store/file/disk_ops.h"
#include "store/file_tier.h"

#define FILE_MAGIC UINT64_C(0x656c69660064766b) /* "kvd\0file" */
#define FILE_VERSION 1u
#define FILE_HEAD (UINT64_C(128) << 10)
#define FILE_COPIES 2u
#define FILE_NAMESPACES 158u
static_assert(FILE_NAMESPACES == STORE_DISK_SPACES, "domains have shares of them");
#define FILE_NO_EPOCH 0u /* epochs of namespaces begin at 1 */

enum file_sector { FILE_SUPER = 1, FILE_EXTENT, FILE_RECORD };

struct file_mark { /* begins every sector except those of a payload */
        uint64_t magic;
        uint32_t version, what;  /* what: enum file_sector */
        struct kvd_key checksum; /* of the sector with this field 0 */
};

struct file_super {
        struct file_mark mark;
        uint64_t serial; /* counts changes of the superblock */
        uint64_t bytes, extent_bytes;
        uint64_t opening; /* counts openings; each has sequences from file_sequence_of on */
        uint64_t next_epoch;
        uint32_t n_namespaces, pad;
        uint8_t secret[KVD_SECRET_BYTES];
        struct kvd_disk_namespace namespaces[FILE_NAMESPACES];
        uint64_t life; /* 0, but in files of several that older versions used together */
        uint64_t set;  /* drawn at each opening */
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

#define FILE_RECORD_TOKENS 992u

struct file_record {
        struct file_mark mark;
        uint64_t place;
        struct kvd_label label;
        uint64_t payload_bytes;
        struct kvd_key payload;
        uint32_t tokens[FILE_RECORD_TOKENS]; /* all zeros if there are more: see file_head_bytes */
        struct kvd_record_key key;           /* then; else zeros */
};
static_assert(sizeof(struct file_record) == DISK_SECTOR, "version 1");

static inline bool file_record_has_tokens(uint32_t n_tokens) {
        return n_tokens <= FILE_RECORD_TOKENS;
}

/* Bytes of a record before its payload. */
static inline uint32_t file_head_bytes(uint32_t n_tokens) {
        uint32_t bytes = n_tokens * (uint32_t)sizeof(uint32_t);

        return DISK_SECTOR +
               (file_record_has_tokens(n_tokens) ? 0 : (uint32_t)ALIGN_UP(bytes, DISK_SECTOR));
}

static inline uint64_t file_sequence_of(uint64_t opening) {
        return opening << 40;
}

/* The key of the checksums of a file's extents and records: KVD_SECRET_BYTES at ret. */
void file_key_of_life(const uint8_t *secret, uint64_t life, uint8_t *ret);

/* Fills in the mark of a sector before it is written. */
void file_sector_seal(const uint8_t *secret, enum file_sector what, struct file_mark *sector);
/* Is it of that kind, and intact? */
bool file_sector_whole(const uint8_t *secret, enum file_sector what,
                       const struct file_mark *sector);

/* Is it intact and plausible? This does not tell whether it is of the right file or set. */
bool file_super_makes_sense(const struct file_super *super);

/* The clients' number of a record: the low bits of its opening and of its number in that. */
static inline uint64_t file_handle(uint64_t sequence) {
        return kvd_hint_handle(sequence >> 40 << 32 | (uint32_t)sequence);
}

/* The hash by which a record is found. Its tokens are compared when it is read. */
uint64_t file_tag(const uint8_t *secret, const struct kvd_label *label, const uint32_t *tokens);
struct kvd_record_key file_key(const uint8_t *secret, const struct kvd_label *label,
                               const uint32_t *tokens);

/* What a record says. Its payload is file_head_bytes behind the beginning of its memory. */
struct file_contents {
        const struct kvd_label *label;
        const uint32_t *tokens;
        uint64_t place, bytes; /* bytes: of the payload */
};

/* Writes all of the record that is before its payload. file_secret: that of the superblock. */
void file_record_make(const uint8_t *secret, const uint8_t *file_secret,
                      const struct file_contents *of, struct file_record *ret);

/* Is the record's sector intact, and does it lie where it belongs? */
bool file_record_lies_right(const uint8_t *secret, const struct file_record *record,
                            uint64_t place);
/* Does it also have that label and these tokens, and is its payload intact? */
bool file_record_is(const uint8_t *secret, const struct file_record *record,
                    const struct file_contents *of);
/* of a record that lies right */
struct kvd_record_key file_record_key(const uint8_t *file_secret, const struct file_record *record);

#endif
