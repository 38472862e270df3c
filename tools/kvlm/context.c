/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The positions of a diffusion request: a stored prefix, and the rest after it. The rest begins in
 * a block of its own, so that stored blocks are never written.
 */

#include "tools/kvlm/context.h"

#include <errno.h>
#include <stdlib.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

int context_new(const struct config *c, const struct block_shape *s, uint32_t n_prefix,
                uint32_t n_tokens, struct context *ret) {
        uint32_t gap = ALIGN_UP(n_prefix, s->tokens) - n_prefix,
                 n_blocks = DIV_UP(n_tokens + gap, s->tokens);
        struct context context = {n_prefix, n_tokens, s->tokens, n_blocks, NULL, NULL};

        context.blocks = calloc((size_t)c->layers * n_blocks, sizeof *context.blocks);
        context.slots = calloc(n_tokens, sizeof *context.slots);
        if (!context.blocks || !context.slots) {
                context_release(&context);
                return refuse(-ENOMEM, "out of memory for a request of %u tokens", n_tokens);
        }
        for (uint32_t i = 0; i < n_tokens; i++)
                context.slots[i] = i < n_prefix ? i : i + gap;
        *ret = context;
        return 0;
}

void context_release(struct context *c) {
        free(c->blocks);
        free(c->slots);
        *c = (struct context){0};
}

/*
 * Slots that a prefix leaves unused in its last block must not be seen. If there are any, the other
 * slots are listed one by one.
 */
struct view context_view(const struct context *c, bool prefix_only) {
        uint32_t n_seen = prefix_only ? c->n_prefix : c->n_tokens;
        bool gap = n_seen > c->n_prefix && c->n_prefix % c->block_tokens != 0;

        return (struct view){
                .blocks = c->blocks,
                .n_blocks = c->n_blocks,
                .slots = c->slots,
                .n_keys = c->slots[n_seen - 1] + 1,
                .chosen = gap ? c->slots : NULL,
                .n_chosen = gap ? n_seen : 0,
        };
}
