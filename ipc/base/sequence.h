/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_SEQUENCE_H
#define KVD_BASE_SEQUENCE_H

/*
 * A sequence is the block table of one inference request, shared by its client and the daemon. It
 * has blocks borrowed from the prefix cache and private blocks, which the client filled for this
 * request (sealed, but not in the index). The methods work on sequences. The daemon never changes a
 * table that its client may be using: it proposes changes, and the client takes them at a safe
 * point (message sync) and reports which ones it took.
 */

#include <stdint.h>

#include "ipc/base/layout.h"

#define KVD_MAX_SEQUENCES 1024u /* sequences of a space */
#define KVD_SYNC_CHANGES 1024u  /* changes in one reply */

enum kvd_change_kind {
        KVD_CHANGE_REMAP = 1, /* use ref instead, with its keys rotated by delta */
        /* the block leaves; flags tell whether there is an exact copy, a sketch, or nothing */
        KVD_CHANGE_LEAVE = 2,
        /* ref has the entry's contents again, approximately with KVD_ENTRY_APPROX, else exactly */
        KVD_CHANGE_ARRIVE = 3,
        KVD_CHANGE_COMPACT =
                4, /* ref has n_tokens of the range's tokens; 0: the entry is removed. Take all
                      changes of a range or none: delta is how many more follow, in this reply */
};

/* Little endian, as the sync message carries it. */
struct kvd_change {
        uint32_t slot; /* entry of the table */
        uint32_t kind; /* enum kvd_change_kind */
        kvd_ref ref;
        /*
         * position of the entry - position at which the block was written: rotate queries by -delta
         */
        int32_t delta;
        uint32_t flags; /* enum kvd_entry_flags of the entry after the change */
        uint32_t row;   /* row of the summaries */
        union {
                float distance;          /* REMAP: distance of the two blocks */
                uint32_t n_tokens;       /* COMPACT: number of tokens in the block */
                uint32_t row_generation; /* LEAVE, ARRIVE: generation in the row's stamp */
        };
};
static_assert(sizeof(struct kvd_change) == 32, "wire format");

#endif
