/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_BEFORE_H
#define KVD_STORE_CACHE_BEFORE_H

/*
 * The index of the previous daemon. Nothing writes it any more, and each part is verified before it
 * is used.
 */

#include "store/core.h"
#include "store/keep.h"

enum before_phase { BEFORE_NUMBERS, BEFORE_JUDGES, BEFORE_FREES, BEFORE_UNMAPS };

struct before {
        struct kvd_index header; /* a copy, verified */
        const uint8_t *at;       /* owned mapping, read-only */
        uint64_t bytes;
        struct kept_file file; /* its fd is owned; -1 if none */
        uint32_t n_segments, ids;
        uint8_t *fate; /* owned; enum fate of each id */

        enum before_phase phase;
        uint32_t next;  /* id at which the phase continues */
        uint32_t *path; /* owned; a block and its ancestors that are to be judged first */
        uint32_t n_path;
        bool climbs;      /* the top of the path is not reached yet */
        bool fills_table; /* enough blocks to write nearly every page of the table */
};

/* b must be all zeros. -EPROTO: not an index of this version, or no daemon wrote it. */
int before_open(int fd, struct before *b);
/* frees b, also if before_open failed; b->file stays the caller's */
void before_close(struct before *b);

/* How many of a segment's blocks had memory (the first ones), and the version of that memory. */
uint32_t before_ready(const struct before *b, uint32_t segment);
uint32_t before_memory(const struct before *b, uint32_t segment);

/*
 * Takes the blocks over into the space, whose segments have their memory already. Call before_begin
 * once, then before_piece until it returns false; each call is bounded.
 */
void before_begin(struct before *b, struct space *space);
bool before_piece(struct before *b, struct space *space);

#endif
