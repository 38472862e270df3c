/* SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <sched.h>

#include "tests/bench/work.h"

int batch_tokens(void *ctx, uint32_t item) {
        struct batch *b = ctx;

        for (uint32_t i = 0; i < b->n; i++)
                block_tokens(b->next++, b->tokens + i * BLOCK_TOKENS);
        return 0;
}

int batch_blocks(void *ctx, uint32_t item) {
        struct batch *b = ctx;

        batch_tokens(ctx, item);
        return take_blocks(b->kvd->space, b->n, b->blocks);
}

int batch_take_singly(void *ctx) {
        struct batch *b = ctx;
        int r = 0;

        for (uint32_t i = 0; i < b->n; i++)
                r |= kvd_alloc(b->kvd->space, 1, &b->blocks[i]) != 1;
        return r;
}

int batch_seal(void *ctx) {
        struct batch *b = ctx;

        return kvd_seal(b->kvd->space, &b->pin, b->n, b->blocks, b->tokens, b->n * BLOCK_TOKENS) ==
                               (int)b->n ?
                       0 :
                       -EIO;
}

int batch_post(void *ctx) {
        struct batch *b = ctx;
        int r = 0;

        for (uint32_t i = 0; i < b->n; i++)
                r |= kvd_post(b->kvd->space, &b->pin, 1, b->blocks + i,
                              b->tokens + i * BLOCK_TOKENS, BLOCK_TOKENS) != 1;
        return r;
}

/* Yields the processor to the daemon until it has published the blocks. */
int batch_post_and_find(void *ctx) {
        struct batch *b = ctx;
        int r = batch_post(ctx);

        for (int64_t found = 0; r == 0 && found < BLOCK_TOKENS; sched_yield()) {
                struct kvd_pin pin = {0};
                uint32_t id;

                found = kvd_lookup(b->kvd->space, 0, b->tokens, BLOCK_TOKENS, &id, 1, &pin);
                kvd_unpin(b->kvd->space, &pin);
                r = found < 0 ? (int)found : 0;
        }
        return r;
}

static int fill_blocks(const struct batch *b, struct kvd_block *blocks, uint32_t n) {
        int r = take_blocks(b->kvd->space, n, blocks);

        for (uint32_t i = 0; r >= 0 && b->data && i < n; i++)
                kvd_copy(blocks[i].data, b->data, b->bytes);
        return r;
}

int batch_put(void *ctx) {
        struct batch *b = ctx;
        int r = fill_blocks(b, b->blocks, b->n);

        return r < 0 ? r : batch_seal(b);
}

int batch_put_posted(void *ctx) {
        struct batch *b = ctx;
        int r = 0;

        for (uint32_t i = 0; r >= 0 && i < b->n; i++) {
                r = fill_blocks(b, b->blocks + i, 1);
                r |= kvd_post(b->kvd->space, &b->pin, 1, b->blocks + i,
                              b->tokens + i * BLOCK_TOKENS, BLOCK_TOKENS) != 1;
        }
        return r ?: kvd_flush(b->kvd->space);
}

int batch_unpin(void *ctx) {
        struct batch *b = ctx;

        kvd_unpin(b->kvd->space, &b->pin);
        return 0;
}

int batch_seal_and_unpin(void *ctx) {
        int r = batch_seal(ctx);

        batch_unpin(ctx);
        return r;
}

int batch_let_go(void *ctx) {
        struct batch *b = ctx;
        int r = kvd_flush(b->kvd->space);

        kvd_free(b->kvd->space, b->n, b->blocks);
        kvd_unpin(b->kvd->space, &b->pin);
        return r;
}

int batch_publish(struct batch *b, uint32_t times) {
        int r = 0;

        for (uint32_t i = 0; i < times && r == 0; i++) {
                batch_tokens(b, 0);
                r = batch_put(b);
                batch_unpin(b);
        }
        return r;
}
