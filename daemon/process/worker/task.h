/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_TASK_H
#define KVD_DAEMON_PROCESS_WORKER_TASK_H

/*
 * A task: a job under way. It has what the job names, found and checked, and what every kind of job
 * needs.
 */

#include "client/kvd_methods.h" /* enum kvd_entry_flags */
#include "daemon/process/worker/spaces.h"
#include "ipc/base/threads.h"
#include "ipc/base/util.h"
#include "ipc/base/why.h"
#include "kernels/ops.h"

#define RESULT_BYTES ((size_t)KVD_MOST_work_reply_result)

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
        /* [item]: its block in host memory; NULL: none, or blocks are where they are */
        uint8_t **staged;
        const struct kvd_ops *ops;
        struct threads *threads;
        struct room *rooms;           /* owned: task_room */
        uint8_t *result;              /* RESULT_BYTES */
        uint32_t result_size;
        struct kvd_why why;           /* of a refusal */
        uint64_t spent;               /* bytes, since it rested */
};

/* ---- services (task.c) ----------------------------------------------------------------------- */

#define task_refuse(task, error, ...) kvd_refuse(&(task)->why, error, __VA_ARGS__)

/* Zeroed memory until task_leave_rooms, aligned to 64 bytes; NULL: there is none. */
void *task_room(struct task *task, size_t n, size_t size);

/* Room for the result, zeroed; NULL after task_refuse: it would not fit into an answer. */
void *task_results(struct task *task, size_t n, size_t size);

/* -EOPNOTSUPP if no kernel reads the space's numbers. */
int task_needs_numbers(struct task *task);

/* A row of the summaries; NULL: there is no such row. */
uint8_t *task_row(const struct task *task, uint32_t row);

/* The row, if it has the summary of that incarnation; or NULL. */
const uint8_t *task_summary(const struct task *task, uint32_t row, uint32_t generation);

/* Another row with the same contents, for a block of that generation. */
void task_copy_summary(const struct task *task, const uint8_t *from, uint8_t *to,
                       uint32_t generation);

double task_setting(const struct task *task, enum kvd_setting which);
void task_leave(struct task *task); /* its rooms, and its sketch */

/* ---- resting (rests.c) ----------------------------------------------------------------------- */

/*
 * A kind of job is written as if it ran to its end, and says what it goes through; when that is a
 * piece, it rests in here, and others have their turns. What is staged, and the GPU's memory that
 * it works in, are its own meanwhile; its stream is empty.
 */
void task_spend(struct task *task, uint64_t bytes);

/*
 * What a launch of the GPU's kernels goes through at most, or as little as it can: some 0.3 ms.
 * Behind each one the job may rest.
 */
uint64_t task_launch_bytes(const struct task *task);

/* threads_share, as many at once as a piece has room for; each goes through so many bytes. */
void task_share(struct task *task, uint32_t n, uint64_t bytes, threads_piece *piece, void *data);

/* ---- blocks (staging.c) ---------------------------------------------------------------------- */

/* The item's block, for the processor. NULL: no such block, or in another incarnation. */
uint8_t *task_block(const struct task *task, uint32_t item);

/* Spaces on a GPU: where the item's block is there; 0: no such block. */
bool task_on_device(const struct task *task);
cu_address task_address(const struct task *task, uint32_t item);
/* The blocks' numbers, as kernels take them: GPU_NO_BLOCK where there is none. NULL: no memory. */
uint32_t *task_ids(struct task *task);
/* Writes them into the GPU's memory; what: the job's blocks, of which none may be gone. */
int task_send_ids(struct task *task, cu_address to, const char *what);

/*
 * Before and behind a job: brings what it reads within task_block's reach, and what it wrote back.
 */
enum task_access {
        TASK_NONE,
        TASK_READ,
        TASK_WRITE,
        TASK_PACK, /* writes the items that are KVD_JOB_DEST, reads the others */
};
int task_stage(struct task *task, enum task_access access);
int task_unstage(struct task *task, enum task_access access);

/* ---- blocks, some at a time (batches.c) ------------------------------------------------------ */

/*
 * Does something with blocks first to first + n - 1, which task_block finds meanwhile; the processor
 * does. 0 or negative errno.
 */
typedef int batch_fn(void *data, uint32_t first, uint32_t n);

/*
 * All of the job's, in order: those of the host at once; those of a GPU some at a time, while others
 * come (TASK_READ) or go (TASK_WRITE: they are zeros before). Ends with the first that fails. The
 * job does not rest meanwhile.
 */
int task_batches(struct task *task, enum task_access access, batch_fn *some, void *data);

static inline uint8_t *layer_keys(const struct shape *s, const uint8_t *block, uint32_t layer) {
        return (uint8_t *)block + layer * 2 * s->plane;
}

static inline uint8_t *head_keys(const struct shape *s, const uint8_t *block, uint32_t layer,
                                 uint32_t head) {
        return layer_keys(s, block, layer) + head * s->head_stride * s->element;
}

#endif
