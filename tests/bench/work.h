/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_WORK_H
#define KVD_BENCH_WORK_H

/* Publishing blocks, as functions of a contender. ctx is the batch, and item is not used. */

#include "tests/bench/kvd_side.h"

#define BATCH_MOST 256u

struct batch {
        struct kvd_side *kvd;
        uint32_t n;          /* blocks of an operation */
        uint64_t next;       /* number of the next block that was never stored */
        const uint8_t *data; /* contents of a block for batch_put; NULL if none */
        size_t bytes;        /* of data */
        struct kvd_pin pin;
        struct kvd_block blocks[BATCH_MOST];
        uint32_t tokens[BATCH_MOST * BLOCK_TOKENS];
};

/* prepare: tokens that were never stored; and blocks for them */
int batch_tokens(void *ctx, uint32_t item);
int batch_blocks(void *ctx, uint32_t item);

/* run. post and take_singly go block by block, as a step of an engine does for several requests */
int batch_take_singly(void *ctx);
int batch_seal(void *ctx);
int batch_post(void *ctx);
int batch_post_and_find(void *ctx); /* posts, and polls until the first of them is found */
int batch_put(void *ctx);           /* takes, fills, seals */
int batch_put_posted(void *ctx);    /* takes, fills and posts one by one; waits for the daemon */

/* finish: unpins sealed blocks; seals blocks that were only taken; waits for posted ones */
int batch_unpin(void *ctx);
int batch_seal_and_unpin(void *ctx);
int batch_let_go(void *ctx);

/* Makes tokens, puts and unpins, as many times. */
int batch_publish(struct batch *batch, uint32_t times);

#endif
