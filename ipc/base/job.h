/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_JOB_H
#define KVD_BASE_JOB_H

/*
 * What the owner asks of a worker. One job at a time; its arguments lie in a memfd that the owner
 * writes before it sends the work message and the worker reads (it never writes there), its result
 * comes in the answer:
 *
 *      arguments   struct kvd_job | items | steps | tokens            result   n_results x the kind's result
 *
 * A job names blocks that the owner keeps in their places until it has the answer, or until the
 * kernel says that the worker is gone. A worker writes summaries, exact copies, sketches, and
 * blocks named as dest; nothing else. Doing a job twice is the same as doing it once, but for
 * sketches: those are marked while they are written (KVD_SKETCH_BUSY).
 */

#include "ipc/base/tier.h"

#define KVD_JOB_BYTES (UINT64_C(16) << 20) /* room for arguments */
/* blocks of one job: an answer has room for 16 bytes of each */
#define KVD_JOB_ITEMS 3840u

enum kvd_job_kind {
        KVD_JOB_SUMMARISE = 1, /* items: ref -> row. No result */
        /* items: blocks of one sequence or chain, in order. Result: float each, priority 0 to 1 */
        KVD_JOB_SCORE = 2,
        /* items and steps of a sequence; step 0 is new. Result: struct kvd_match, best per block */
        KVD_JOB_COMPARE = 3,
        /* items: ref -> place, into the sketch if ordinal is set. Result: struct kvd_spilled */
        KVD_JOB_SPILL = 4,
        KVD_JOB_REVIVE = 5, /* items: dest <- place, or the sketch if approx; the summary of row
                               goes to to_row, if there is one. Result: u32 each, 0 or errno */
        /* items: takes their exact copies out of the sketch. Result: u32 each */
        KVD_JOB_FORGET = 6,
        /* the sketch, anew from the exact copies of all items. Result: u32 each */
        KVD_JOB_REBUILD = 7,
        /* HShare: items: blocks that hold selection bitsets. Result: bytes, see critical */
        KVD_JOB_CONFIG = 8,
        KVD_JOB_COMPACT =
                10, /* KeyDiff: items: what is packed (SOURCE), where to (DEST), and the rest of the
                       sequence, for the anchor. Result: one u32, 0 or errno */
        /* MemShare: items: pairs. Result: float each, their distance by the space's metric */
        KVD_JOB_CALIBRATE = 11,
        /*
         * BiCache: items: pairs of blocks, layer group by layer group. Result: 2 floats each layer
         */
        KVD_JOB_PROFILE = 9,
};

struct kvd_job {
        uint32_t kind, space; /* space: number */
        uint64_t id;
        uint32_t n_items, n_steps, n_tokens, n_results;
        uint32_t
                param[8];     /* CONFIG: layers, kv_heads, queries, words of a bitset, selected;
                                 PROFILE: tokens;    COMPARE: threshold, a float's bits; 0:
                                 memshare.tau_block;    COMPACT: sources, dests, tokens that are kept */
        uint32_t sketch;      /* number of the sketch that came with work_sketch; 0: none */
        uint32_t turn;        /* enum kvd_job_turn */
        uint64_t piece;       /* bytes to be gone through before it may rest; 0: it may not */
};

/*
 * A job may rest: then its answer says that there is more of it, and nothing else. The worker goes
 * on with it when it is asked for the job of that number again. A worker that ends has begun
 * nothing; who dies in the middle of one loses it.
 */
enum kvd_job_turn {
        KVD_JOB_BEGIN,
        KVD_JOB_GO_ON, /* the rest of the arguments is not there */
        KVD_JOB_END,   /* ... and nobody wants it any more: the answer is an error */
};

#define KVD_CONFIG_ROWS (1u << 20) /* layers x kv_heads x queries; a count of each is kept */

#define KVD_NO_ORDINAL UINT32_MAX

struct kvd_job_item {
        kvd_ref ref;         /* source; REVIVE: dest */
        uint64_t checksum;   /* REVIVE, FORGET: XXH3-64 of the exact copy */
        uint32_t row;        /* of the summaries */
        uint32_t to_row;     /* SPILL: row that keeps the summary */
        uint32_t place;      /* of the exact copy; KVD_NOWHERE: there is none */
        uint32_t ordinal;    /* of its first token in the sketch; KVD_NO_ORDINAL: not there */
        int32_t position;    /* of its first token when it was written */
        uint32_t n_tokens;
        /* REVIVE: KVD_ENTRY_APPROX: from the sketch; COMPARE, COMPACT: KVD_JOB_SOURCE and so on */
        uint32_t flags;
        uint32_t slot;       /* COMPARE: of its table, echoed */
};

#define KVD_JOB_SOURCE 1u /* COMPARE: may stand in for another; COMPACT: its tokens are packed */
#define KVD_JOB_TARGET 2u /* COMPARE: may be replaced */
#define KVD_JOB_DEST 4u   /* COMPACT: is written */

struct kvd_job_step { /* COMPARE */
        uint32_t first_item, n_items;   /* blocks that lie in it */
        uint32_t first_token, n_tokens; /* in the job's tokens */
};

struct kvd_match {
        uint32_t target, source; /* items */
        float distance;          /* by the space's metric */
        float similarity;        /* of the two steps */
};

struct kvd_spilled {
        uint64_t checksum;
        uint32_t error; /* 0, or errno: there is no copy */
        uint32_t pad;
};

/* A sketch's memory: this, then rows x columns cells of key floats, the same of value floats. */
struct kvd_sketch_header {
        uint32_t state;        /* KVD_SKETCH_IDLE or KVD_SKETCH_BUSY */
        uint32_t rows, columns;
        uint32_t n_tokens;     /* in it, without those taken out */
        uint64_t salt;
        uint32_t cell_floats;  /* of one plane: layers x kv_heads x head_dim */
        uint32_t has_mean;     /* the mean key behind this header is frozen */
        uint64_t job; /* the last one that changed it, or is changing it: if that one was lost, what
                         is in the sketch is not known, whatever the state, and only REBUILD makes
                         it known again */
        /* what it was begun with: 1 + the values of kvreviver.key_mode and .hash */
        uint32_t key_mode, hash;
        uint64_t pad[2];
        /* mean key: cell_floats floats, then the cells */
};
static_assert(sizeof(struct kvd_sketch_header) == 64, "cells stay aligned");

#define KVD_SKETCH_IDLE 0u
#define KVD_SKETCH_BUSY 1u

static inline uint64_t kvd_sketch_bytes(uint32_t rows, uint32_t columns, uint32_t cell_floats) {
        uint64_t plane = (uint64_t)rows * columns * cell_floats;

        return sizeof(struct kvd_sketch_header) + (cell_floats + 2 * plane) * sizeof(float);
}

#endif
