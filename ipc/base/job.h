/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_JOB_H
#define KVD_BASE_JOB_H

/*
 * The jobs that the daemon (the owner) gives to a worker, one at a time. The owner writes a job's
 * arguments into a memfd before it sends the work message; the worker only reads them. The result
 * comes in the reply:
 *
 *      arguments   struct kvd_job | items | steps | tokens            result   n_results x the kind's result
 *
 * The owner does not evict or move the blocks of a job until it has the reply, or until the kernel
 * says that the worker is gone. A worker writes only summaries, exact copies, sketches, and blocks
 * named as destination. Jobs are idempotent, except on sketches, which are marked KVD_SKETCH_BUSY
 * while a job writes them.
 */

#include "ipc/base/place.h"

#define KVD_JOB_BYTES (UINT64_C(16) << 20) /* maximum size of the arguments */
/* blocks of one job: a reply has room for 16 bytes for each */
#define KVD_JOB_ITEMS 3840u

enum kvd_job_kind {
#define KVD_JOB_KIND(NAME, name, number) KVD_JOB_##NAME = (number),
#include "ipc/base/methods.def"
};

struct kvd_job {
        uint32_t kind, space; /* enum kvd_job_kind; number of the space */
        uint64_t id;
        uint32_t n_items, n_steps, n_tokens, n_results;
        uint32_t param[8]; /* CONFIG: layers, kv_heads, queries, words of a bitset, selected;
                                 PROFILE: tokens;    COMPARE: bits of the threshold, a float (0:
                                 the setting's), and of that for blocks of the same tokens;    COMPACT: sources, dests, tokens to keep, blocks with
                                 scores; 0: by its own */
        uint32_t sketch;   /* number of the sketch that came with work_sketch; 0: none */
        uint32_t turn;     /* enum kvd_job_turn */
        uint64_t piece;    /* bytes to process before it may pause; 0: it must not pause */
};

/*
 * A worker may pause a job: then its reply has more = 1 and no result. The worker resumes the job
 * when it gets a job with the same number. If the worker ends, paused jobs count as never begun;
 * the job that was running is lost.
 */
enum kvd_job_turn {
        KVD_JOB_BEGIN,
        KVD_JOB_GO_ON, /* resume; there are no arguments but struct kvd_job */
        KVD_JOB_END,   /* cancel, likewise; the reply is an error */
};

#define KVD_CONFIG_ROWS (1u << 20) /* maximum of layers x kv_heads x queries */

#define KVD_NO_ORDINAL UINT32_MAX

struct kvd_job_item {
        kvd_ref ref;       /* source; REVIVE: destination */
        uint64_t checksum; /* REVIVE, FORGET: XXH3-64 of the exact copy */
        uint32_t row;      /* row of the summaries */
        uint32_t to_row;   /* SPILL: row that keeps the summary; REVIVE: row that gets it */
        uint32_t place;    /* of the exact copy; KVD_NOWHERE: none */
        /* of its first token in the sketch (KVD_NO_ORDINAL: not in it); COMPARE: in the job's
           tokens */
        uint32_t ordinal;
        int32_t position; /* of its first token when it was written */
        uint32_t n_tokens;
        /* REVIVE: KVD_ENTRY_APPROX: from the sketch; COMPARE, COMPACT: KVD_JOB_SOURCE and so on */
        uint32_t flags;
        uint32_t slot; /* COMPARE: entry in its sequence's table; the result repeats it */
};

#define KVD_JOB_SOURCE 1u /* COMPARE: may replace a target; COMPACT: its tokens are packed */
#define KVD_JOB_TARGET 2u /* COMPARE: may be replaced */
#define KVD_JOB_DEST 4u   /* COMPACT: receives the packed tokens */
#define KVD_JOB_SCORES 8u /* COMPACT: holds scores, which its client can still write */

struct kvd_job_step {                   /* COMPARE */
        uint32_t first_item, n_items;   /* blocks of the step */
        uint32_t first_token, n_tokens; /* in the job's tokens */
};

struct kvd_match {
        uint32_t target, source; /* numbers of items */
        float distance;          /* by the space's metric */
        float similarity;        /* of the two steps */
};

struct kvd_spilled {
        uint64_t checksum;
        uint32_t error; /* 0, or the errno if there is no copy */
        uint32_t pad;
};

/* A sketch: header, mean key, rows x columns cells of key floats, and as many of value floats. */
struct kvd_sketch_header {
        uint32_t state; /* KVD_SKETCH_IDLE or KVD_SKETCH_BUSY */
        uint32_t rows, columns;
        uint32_t n_tokens; /* number of tokens in it; removed ones do not count */
        uint64_t salt;
        uint32_t cell_floats; /* floats of a cell: layers x kv_heads x head_dim */
        uint32_t has_mean;    /* 1: the mean key behind this header is frozen */
        uint64_t job; /* number of the last job that changed it or is changing it. If that job was
                         lost, the contents are undefined, whatever the state, until a REBUILD */
        /* 1 + the values of the settings key_mode and hash that the sketch was begun with */
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
