/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_BEFORE_H
#define KVD_STORE_CACHE_BEFORE_H

/*
 * The index of the daemon before, which nobody writes any more. What it says is verified piece by
 * piece; nothing else of it is believed.
 */

#include "store/core.h"
#include "store/keep.h"

enum before_phase { BEFORE_NUMBERS, BEFORE_JUDGES, BEFORE_FREES, BEFORE_UNMAPS };

struct before {
        struct kvd_index header; /* a copy, verified */
        const uint8_t *at;       /* owned mapping, read-only */
        uint64_t bytes;
        struct kept_file file;   /* its fd is owned; -1 */
        uint32_t n_segments, ids;
        uint8_t *fate;           /* owned; of each id */

        enum before_phase phase;
        uint32_t next;           /* id that the phase goes on at */
        uint32_t *path;          /* owned; up from there, to blocks that are to be judged first */
        uint32_t n_path;
        bool climbs;             /* its end is not reached yet */
        bool fills_table;        /* so many blocks come that the whole table will be written */
};

/* Into zeros. -EPROTO: no index of this version, or not as a daemon wrote it. */
int before_open(int fd, struct before *b);
void before_close(struct before *b); /* in any case; frees it, and leaves b->file to the caller */

/* Of a segment's blocks, how many had memory, from the first on; which memory that was. */
uint32_t before_ready(const struct before *b, uint32_t segment);
uint32_t before_memory(const struct before *b, uint32_t segment);

/*
 * The space, whose segments have their memory, gets its blocks: a bounded piece a call, once
 * before_begin was called. False: that was all.
 */
void before_begin(struct before *b, struct space *space);
bool before_piece(struct before *b, struct space *space);

#endif
