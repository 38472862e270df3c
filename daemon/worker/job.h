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
#include "ipc/base/threads.h"
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

struct task {
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
        struct threads *threads;
        struct room *rooms;           /* owned: task_room */
        uint8_t *result;              /* RESULT_BYTES */
        uint32_t result_size;
        char *why;                    /* of a refusal */
        size_t why_size;
};

/* Does the job that lies in the arguments. 0, or a negative errno and one line in why. */
int task_job(struct task *task, struct spaces *spaces, uint64_t bytes);

/* ---- for the families -------------------------------------------------------------------------------------------- */

typedef int task_kind(struct task *task);
task_kind task_summarise;
task_kind task_summarise_on_device;
task_kind task_score;
task_kind task_score_on_device;
task_kind task_compact;
task_kind task_compare;
task_kind task_calibrate;
task_kind task_spill;
task_kind task_revive;
task_kind task_forget;
task_kind task_rebuild;
task_kind task_config;
task_kind task_profile;

_printf_(3, 4) int task_refuse(struct task *task, int error, const char *format, ...);

/* Zeroed memory until the job's end, aligned to 64 bytes; NULL: there is none. */
void *task_room(struct task *task, size_t n, size_t size);

/* Room for the result, zeroed; NULL after task_refuse: it would not fit into an answer. */
void *task_results(struct task *task, size_t n, size_t size);

/* -EOPNOTSUPP if no kernel reads the space's numbers. */
int task_needs_numbers(struct task *task);

/* The item's block, for the processor. NULL: no such block, or in another incarnation. */
uint8_t *task_block(const struct task *task, uint32_t item);

/* Spaces on a GPU (staging.c): where the item's block is there; 0: no such block. */
bool task_on_device(const struct task *task);
cu_address task_address(const struct task *task, uint32_t item);

/* Before and behind a job: brings what it reads within task_block's reach, and what it wrote back. */
enum task_access {
        TASK_NONE,
        TASK_READ,
        TASK_WRITE,
        TASK_PACK, /* writes the items that are KVD_JOB_DEST, reads the others */
};
int task_stage(struct task *task, enum task_access access);
int task_unstage(struct task *task, enum task_access access);
uint8_t *task_row(const struct task *task, uint32_t row);      /* of the summaries; NULL: no such row */

/* The row, if it has the summary of that incarnation; or NULL. */
const uint8_t *task_summary(const struct task *task, uint32_t row, uint32_t generation);

/* KeyDiff: the sum of the directions of all items' keys, [layer][head][dim], but of KVD_JOB_DEST; NULL: no memory. */
float *task_anchors(struct task *task);

/* Another row with the same contents, for a block of that generation. */
void task_copy_summary(const struct task *task, const uint8_t *from, uint8_t *to, uint32_t generation);

double task_setting(const struct task *task, enum kvd_setting which);

static inline uint8_t *layer_keys(const struct shape *s, const uint8_t *block, uint32_t layer) {
        return (uint8_t *)block + layer * 2 * s->plane;
}

static inline uint8_t *head_keys(const struct shape *s, const uint8_t *block, uint32_t layer, uint32_t head) {
        return layer_keys(s, block, layer) + head * s->head_stride * s->element;
}

#endif
