/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_SKETCH_H
#define KVD_DAEMON_PROCESS_WORKER_SKETCH_H

/*
 * A job's sketch, and the places of its tokens in it. Whole blocks are inserted and removed: a
 * block's tokens have consecutive ordinals. The keys and values of each layer and head are a part
 * of the cells, and the threads share out the parts.
 */

#include "daemon/process/worker/task.h"
#include "kernels/sketch.h"

struct sketch_member {
        uint8_t *block;   /* resident block, or its exact copy; NULL if not a member */
        uint32_t *places; /* [token][row] */
        uint32_t n_tokens;
};

struct sketch_use {
        struct task *task;
        struct kvd_sketch_header *header;
        struct kvd_sketch_hash hash;
        float *mean, *keys, *values;   /* in the sketch's memory */
        struct sketch_member *members; /* one for each item */
        uint32_t first, n; /* items that the next calls process; all of them by default */
};

/* 0; -ESTALE: a worker died while it wrote to the sketch; -EPROTO: the job has none; -ENOMEM. */
int sketch_open(struct task *task, struct sketch_use *use);

/* Makes item i a member, with this block. 0 or -ENOMEM. */
int sketch_add(struct sketch_use *use, uint32_t i, uint8_t *block);
/* The next calls process these items. Updates the addresses of members' blocks (task_block). */
void sketch_look_at(struct sketch_use *use, uint32_t first, uint32_t n);

/* From begin to end the sketch is marked as being changed by this job. */
void sketch_begin(struct sketch_use *use);
void sketch_end(struct sketch_use *use, int64_t tokens); /* tokens: added, less those removed */

/*
 * If keys are centred, the mean of the first members' keys is subtracted from all keys. It must be
 * known before the first of them is inserted.
 */
bool sketch_wants_mean(const struct sketch_use *use);
int sketch_add_to_mean(struct sketch_use *use); /* 0 or -ENOMEM; call it for all members */
void sketch_freeze_mean(struct sketch_use *use);
void sketch_insert(struct sketch_use *use);
void sketch_remove(struct sketch_use *use); /* blocks must be as they were inserted */
/* removes the sketch's own estimates of the members, not their blocks; 0 or -ENOMEM */
int sketch_remove_estimates(struct sketch_use *use);
void sketch_query(struct sketch_use *use); /* writes estimates to the blocks */
void sketch_clear(struct sketch_use *use);

uint64_t sketch_tokens(const struct sketch_use *use); /* of all members, not only items looked at */

#endif
