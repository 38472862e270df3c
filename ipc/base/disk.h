/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_DISK_H
#define KVD_BASE_DISK_H

/* Records in the messages between the daemon and its disk process (msg.def, disk_*). */

#include "ipc/base/layout.h"

/* Identifies a record: a block and its position in a chain of records. */
struct kvd_label {
        uint64_t sequence; /* number of the record; never used twice */
        uint64_t parent;   /* sequence of the record before it; 0: first of its chain */
        uint64_t epoch;    /* of its namespace */
        uint64_t root;     /* causal: salt of the chain; bidirectional: kvd_hint_root */
        uint32_t group, depth, n_tokens, pad;
};

struct kvd_disk_item {
        uint64_t place; /* number of a slot in the file */
        struct kvd_label label;
        uint64_t offset; /* of the block's memory in the descriptor */
        uint32_t file;   /* index of the descriptor in the message */
        uint32_t pad;
};

/* Keys to find a record: tag for the daemon, made with the file's secret; hint: see layout.h. */
struct kvd_record_key {
        uint64_t tag, hint;
};

struct kvd_disk_found {
        struct kvd_label label;
        struct kvd_record_key key;
        uint64_t place;
};

struct kvd_disk_namespace {
        struct kvd_key id;
        uint64_t epoch;
};

#define KVD_DISK_ITEMS 256u                 /* items of one message */
#define KVD_DISK_FILES 64u                  /* descriptors of one message */
#define KVD_DISK_TOKENS 8192u               /* tokens of one message */
#define KVD_DISK_BYTES (UINT64_C(64) << 20) /* bytes of one message: other requests wait for it */
#define KVD_DISK_FOUND 512u                 /* slots that one disk_scan reads */

#endif
