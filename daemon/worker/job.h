/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_WORKER_JOB_H
#define KVD_DAEMON_WORKER_JOB_H

/*
 * A job on its way: what it names, found and checked, and what every kind of job needs. One file a family:
 *
 *      job_summarise   SUMMARISE            labels, anchors, norms of sealed blocks
 *      job_score       SCORE                KeyDiff
 *      job_compact     COMPACT              KeyDiff
 *      job_compare     COMPARE CALIBRATE    MemShare
 *      job_sketch      SPILL REVIVE FORGET REBUILD      KVReviver
 *      job_config      CONFIG               HShare
 *      job_profile     PROFILE              BiCache
 */

#include "daemon/worker/spaces.h"
#include "daemon/worker/team.h"
#include "ipc/base/util.h"
#include "kernels/ops.h"

#define RESULT_BYTES 61440u /* as msg.def has it */

/* Where things lie in a block. Strides are elements, offsets bytes. */
struct shape {
        uint32_t layers; /* of one block */
        uint32_t heads, tokens, dim;
        uint32_t element; /* bytes */
        enum kvd_number type; /* 0: numbers that no kernel reads (i8) */
        size_t head_stride, token_stride;
        size_t plane; /* bytes */
        size_t block_bytes;
};

struct run {
        const struct kvd_job *job;
        const struct kvd_job_item *items;
        const struct kvd_job_step *steps;
        const uint32_t *tokens;
        struct worker_space *space;
        struct worker_sketch *sketch; /* NULL: the job has none */
        struct shape shape;
        struct worker_device *device;
        uint8_t **staged;             /* [item]: its block in host memory; NULL: none, or blocks are where they are */
        const struct kvd_ops *ops;
        struct team *team;
        struct room *rooms;           /* owned: run_room */
        uint8_t *result;              /* RESULT_BYTES */
        uint32_t result_size;
        char *why;                    /* of a refusal */
        size_t why_size;
};

/* Does the job that lies in the arguments. 0, or a negative errno and one line in why. */
int run_job(struct run *run, struct spaces *spaces, uint64_t bytes);

/* ---- for the families -------------------------------------------------------------------------------------------- */

typedef int run_kind(struct run *run);
run_kind run_summarise;
run_kind run_summarise_on_device;
run_kind run_score;
run_kind run_score_on_device;
run_kind run_compact;
run_kind run_compare;
run_kind run_calibrate;
run_kind run_spill;
run_kind run_revive;
run_kind run_forget;
run_kind run_rebuild;
run_kind run_config;
run_kind run_profile;

_printf_(3, 4) int run_refuse(struct run *run, int error, const char *format, ...);

/* Zeroed memory until the job's end, aligned to 64 bytes; NULL: there is none. */
void *run_room(struct run *run, size_t n, size_t size);

/* Room for the result, zeroed; NULL after run_refuse: it would not fit into an answer. */
void *run_results(struct run *run, size_t n, size_t size);

/* -EOPNOTSUPP if no kernel reads the space's numbers. */
int run_needs_numbers(struct run *run);

/* The item's block, for the processor. NULL: no such block, or in another incarnation. */
uint8_t *run_block(const struct run *run, uint32_t item);

/* Spaces on a GPU (stage.c): where the item's block is there; 0: no such block. */
bool run_on_device(const struct run *run);
cu_address run_address(const struct run *run, uint32_t item);

/* Before and behind a job: brings what it reads within run_block's reach, and what it wrote back. */
enum run_access {
        RUN_NONE,
        RUN_READ,
        RUN_WRITE,
        RUN_PACK, /* writes the items that are KVD_JOB_DEST, reads the others */
};
int run_stage(struct run *run, enum run_access access);
int run_unstage(struct run *run, enum run_access access);
uint8_t *run_spilled(const struct run *run, uint32_t slot); /* NULL: no such slot */
uint8_t *run_row(const struct run *run, uint32_t row);      /* of the summaries; NULL: no such row */

/* The row, if it has the summary of that incarnation; or NULL. */
const uint8_t *run_summary(const struct run *run, uint32_t row, uint32_t generation);

/* KeyDiff: the sum of the directions of all items' keys, [layer][head][dim], but of KVD_JOB_DEST; NULL: no memory. */
float *run_anchors(struct run *run);

/* Another row with the same contents, for a block of that generation. */
void run_copy_summary(const struct run *run, const uint8_t *from, uint8_t *to, uint32_t generation);

double run_setting(const struct run *run, enum kvd_setting which);

static inline uint8_t *layer_keys(const struct shape *s, const uint8_t *block, uint32_t layer) {
        return (uint8_t *)block + layer * 2 * s->plane;
}

static inline uint8_t *head_keys(const struct shape *s, const uint8_t *block, uint32_t layer, uint32_t head) {
        return layer_keys(s, block, layer) + head * s->head_stride * s->element;
}

#endif
