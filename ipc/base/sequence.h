/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_SEQUENCE_H
#define KVD_BASE_SEQUENCE_H

/*
 * A sequence is a request's own block table, which its client uses and the daemon knows: the blocks
 * that it filled for itself (private: sealed, in no index) between those that it borrows from the
 * prefix cache. The methods work on sequences. The daemon never changes a table under its client:
 * it proposes changes, the client takes them at a safe point (message sync) and says which it took.
 */

#include <stdint.h>

#include "ipc/base/layout.h"

#define KVD_MAX_SEQUENCES 1024u /* of a space */
#define KVD_SYNC_CHANGES 1024u  /* in one answer */

enum kvd_change_kind {
        KVD_CHANGE_REMAP = 1, /* MemShare: use ref instead, its keys rotated by delta */
        /* let go: a copy was made, or none is wanted; flags say what the entry is then */
        KVD_CHANGE_LEAVE = 2,
        /* ref has the entry's contents again; flags: KVD_ENTRY_APPROX or exact */
        KVD_CHANGE_ARRIVE = 3,
        KVD_CHANGE_COMPACT =
                4, /* ref has n_tokens of the range's tokens; 0: the entry goes. All of a range or
                      none: delta says how many more of its changes follow, in the same answer */
};

/* Little endian, as the sync message carries it. */
struct kvd_change {
        uint32_t slot; /* of the table */
        uint32_t kind; /* enum kvd_change_kind */
        kvd_ref ref;
        /*
         * positions from the block's first token at writing to the slot's: rotate queries by minus
         * that
         */
        int32_t delta;
        uint32_t flags; /* enum kvd_entry_flags that the entry has after it */
        uint32_t row;  /* of the summaries */
        union {
                float distance;    /* REMAP: of the two blocks */
                uint32_t n_tokens; /* COMPACT: in the block */
                uint32_t row_generation; /* LEAVE, ARRIVE: in the row's stamp */
        };
};
static_assert(sizeof(struct kvd_change) == 32, "wire format");

#endif
