/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_DISK_H
#define KVD_BASE_DISK_H

/* What the daemon and its disk processes tell each other of records (msg.def, disk_*). */

#include "ipc/base/layout.h"

#define DISK_FILES 16u /* of the file tier, or block devices, at most */

/* What a record is: a block of tokens behind another record. No two have the same sequence. */
struct kvd_label {
        uint64_t sequence;
        uint64_t parent;      /* the sequence of the record before it; 0: it is the first */
        uint64_t epoch;       /* of its namespace */
        uint64_t root;        /* of its chain: the salt; bidirectional: kvd_hint_root */
        uint32_t group, depth, n_tokens, pad;
};

struct kvd_disk_item {
        uint64_t place;
        struct kvd_label label;
        uint64_t offset;      /* of the block, in one of the descriptors */
        uint32_t file;        /* ... which one */
        uint32_t pad;
};

/* What a record is found by: tag in the daemon, made with the file's secret; hint: see layout.h. */
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

#define KVD_DISK_ITEMS 256u   /* of one message */
#define KVD_DISK_FILES 64u    /* ... in so many descriptors */
#define KVD_DISK_TOKENS 8192u /* ... of all of them */
#define KVD_DISK_BYTES (UINT64_C(64) << 20) /* ... together: others wait meanwhile */
#define KVD_DISK_FOUND 512u   /* slots that one message looks at */

#endif
