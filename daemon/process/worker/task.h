/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_TASK_H
#define KVD_DAEMON_PROCESS_WORKER_TASK_H

/*
 * A task: a job while it is being done. It has pointers to everything that the job names, already
 * checked, and to what every kind of job needs.
 */

#include "client/kvd_methods.h" /* enum kvd_entry_flags */
#include "daemon/process/worker/spaces.h"
#include "ipc/base/threads.h"
#include "ipc/base/util.h"
#include "ipc/base/why.h"
#include "kernels/ops.h"

#define RESULT_BYTES ((size_t)KVD_MOST_work_reply_result)

/* Layout of a block. */
struct shape {
        uint32_t layers; /* of one block */
        uint32_t heads, tokens, dim;
        enum kvd_number type; /* 0: numbers that no kernel reads (i8) */
        /* bytes: of a token's row (ipc/base/format.h); from head to head; from token to token */
        size_t row, head_stride, token_stride;
        size_t plane; /* bytes of one layer's keys, or values */
        size_t block_bytes;
};

struct task {
        const struct kvd_job *job;
        const struct kvd_job_item *items;
        const struct kvd_job_step *steps;
        const uint32_t *tokens;
        struct worker_space *space;
        struct worker_sketch *sketch; /* NULL if the job has none */
        struct shape shape;
        struct worker_device *device;
        /* [item]: copy of its block in host memory, or NULL; the array is NULL without staging */
        uint8_t **staged;
        const struct kvd_ops *ops;
        struct threads *threads;
        struct room *rooms; /* owned; memory from task_room */
        uint8_t *result;    /* RESULT_BYTES */
        uint32_t result_size;
        struct kvd_why why; /* of a refusal */
        uint64_t spent;     /* bytes processed since the last pause */
};

/* ---- services (task.c) ----------------------------------------------------------------------- */

#define task_refuse(task, error, ...) kvd_refuse(&(task)->why, error, __VA_ARGS__)

/* Zeroed memory until task_leave, aligned to 64 bytes. NULL: out of memory. */
void *task_room(struct task *task, size_t n, size_t size);

/* Zeroed memory for the result. NULL, after task_refuse, if it does not fit into a reply. */
void *task_results(struct task *task, size_t n, size_t size);

/* 0, or -EOPNOTSUPP if no kernel reads the space's numbers. */
int task_needs_numbers(struct task *task);

/* A row of the summaries; NULL if there is no such row. */
uint8_t *task_row(const struct task *task, uint32_t row);

/* The row if it has the summary of that generation, or else NULL. */
const uint8_t *task_summary(const struct task *task, uint32_t row, uint32_t generation);

/* Copies a summary into another row, for a block of that generation. */
void task_copy_summary(const struct task *task, const uint8_t *from, uint8_t *to,
                       uint32_t generation);

double task_setting(const struct task *task, enum kvd_setting which);
void task_leave(struct task *task); /* frees its rooms, and drops its sketch */

/* ---- pauses (rests.c) ------------------------------------------------------------------------ */

/*
 * The code of a job is written as if it ran without interruption, and reports here how many bytes
 * it has processed. After a piece (job->piece bytes) this call pauses the job, so that other jobs
 * get their turns, if the daemon allows it. The job keeps its staging and its GPU memory meanwhile,
 * and its stream is empty. If the job is cancelled while it is paused, the call does not return
 * (longjmp).
 */
void task_spend(struct task *task, uint64_t bytes);

/*
 * Bytes that one launch of the GPU's kernels should process, about 0.3 ms of work; a launch cannot
 * process less than its smallest unit. The job may pause after each launch.
 */
uint64_t task_launch_bytes(const struct task *task);

/*
 * threads_share in portions that fit into a piece; the job may pause after each. bytes: processed
 * by each of the n calls.
 */
void task_share(struct task *task, uint32_t n, uint64_t bytes, threads_piece *piece, void *data);

/* ---- blocks (staging.c) ---------------------------------------------------------------------- */

/* The item's block, for the processor. NULL if it is gone, or has another generation. */
uint8_t *task_block(const struct task *task, uint32_t item);

bool task_on_device(const struct task *task); /* the space is on a GPU */
/* Address of the item's block on the GPU; 0 if it is gone, or has another generation. */
cu_address task_address(const struct task *task, uint32_t item);
/* [item]: block number for the kernels, GPU_NO_BLOCK if the block is gone. NULL: out of memory. */
uint32_t *task_ids(struct task *task);
/* Writes the ids to GPU memory. -ESTALE if a block is gone; what: names the blocks in task->why. */
int task_send_ids(struct task *task, cu_address to, const char *what);

/*
 * task_stage, before a job, makes the blocks that it reads available to task_block. task_unstage,
 * after it, copies the blocks that it wrote back to the GPU.
 */
enum task_access {
        TASK_NONE,
        TASK_READ,
        TASK_WRITE,
        TASK_PACK, /* writes the KVD_JOB_DEST items, and reads the others */
};
int task_stage(struct task *task, enum task_access access);
int task_unstage(struct task *task, enum task_access access);

/* ---- batches of blocks (batches.c) ----------------------------------------------------------- */

/*
 * Processes the blocks of items first to first + n - 1 on the processor; task_block finds them
 * during the call. 0 or negative errno.
 */
typedef int batch_fn(void *data, uint32_t first, uint32_t n);

/*
 * Calls `some` for all items in order, until it fails. Blocks in host memory are one batch. Blocks
 * on a GPU are processed in batches, while the copy engine reads later batches (TASK_READ) or
 * writes the previous one (TASK_WRITE; a batch is zeros before its call). Only for jobs that do not
 * pause.
 */
int task_batches(struct task *task, enum task_access access, batch_fn *some, void *data);

static inline uint8_t *layer_keys(const struct shape *s, const uint8_t *block, uint32_t layer) {
        return (uint8_t *)block + layer * 2 * s->plane;
}

static inline uint8_t *head_keys(const struct shape *s, const uint8_t *block, uint32_t layer,
                                 uint32_t head) {
        return layer_keys(s, block, layer) + head * s->head_stride;
}

#endif
