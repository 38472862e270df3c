/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_PROCESS_WORKER_SKETCH_H
#define KVD_DAEMON_PROCESS_WORKER_SKETCH_H

/*
 * A job's sketch, with its tokens' places. Whole blocks go in and out: their tokens have ordinals
 * one after the other, each layer's keys and values of each head are a part of the cells, and the
 * parts are shared out to the threads.
 */

#include "daemon/process/worker/task.h"
#include "kernels/sketch.h"

struct sketch_member {
        uint8_t *block;        /* resident, or its exact copy; NULL: not in this */
        uint32_t *places;      /* [token][row] */
        uint32_t n_tokens;
};

struct sketch_use {
        struct task *task;
        struct kvd_sketch_header *header;
        struct kvd_sketch_hash hash;
        float *mean, *keys, *values; /* in the sketch's memory */
        struct sketch_member *members; /* one for each item */
        uint32_t first, n; /* items that what is done next is about; all of them, at first */
};

/*
 * -ESTALE: a worker died while it wrote to the sketch. -EPROTO: the job has none. Only who changes
 * it may begin it.
 */
int sketch_open(struct task *task, struct sketch_use *use);

/* Item i takes part, with this block. -ENOMEM. */
int sketch_add(struct sketch_use *use, uint32_t i, uint8_t *block);
/* What follows is about these items; blocks of those that take part may lie elsewhere now. */
void sketch_look_at(struct sketch_use *use, uint32_t first, uint32_t n);

/* From begin to end the sketch is marked as being changed by this job. */
void sketch_begin(struct sketch_use *use);
void sketch_end(struct sketch_use *use, int64_t tokens); /* more than before */

/*
 * The first that enter a sketch decide how it hashes and what is taken off their keys: the mean of
 * all that take part, which has to be known before one of them is inserted.
 */
bool sketch_wants_mean(const struct sketch_use *use);
int sketch_add_to_mean(struct sketch_use *use);      /* -ENOMEM; what is there when all were added */
void sketch_freeze_mean(struct sketch_use *use);
void sketch_insert(struct sketch_use *use);
void sketch_remove(struct sketch_use *use);          /* the blocks as they are in it */
/* what it says of the items itself (blocks: any) */
int sketch_remove_estimates(struct sketch_use *use);
void sketch_query(struct sketch_use *use);           /* into the blocks */
void sketch_clear(struct sketch_use *use);

uint64_t sketch_tokens(const struct sketch_use *use); /* of all members, looked at or not */

#endif
