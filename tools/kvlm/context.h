/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_CONTEXT_H
#define KVLM_CONTEXT_H

#include "tools/kvlm/pass.h"

/*
 * Where keys and values of a bidirectional request lie, in blocks of one layer each: of layer l in
 * blocks[l * n_blocks] and up. The prefix fills the first blocks, what follows it begins in a block
 * of its own: nothing is appended to a block that others may share.
 */
struct context {
        uint32_t n_prefix, n_tokens; /* n_prefix of n_tokens */
        uint32_t block_tokens;
        uint32_t n_blocks;           /* of a layer */
        uint8_t **blocks;
        uint32_t *slots; /* [n_tokens]: of each position */
};

int context_new(const struct config *, const struct block_shape *, uint32_t n_prefix,
                uint32_t n_tokens, struct context *ret);
void context_release(struct context *); /* not the blocks */

/* What queries see: the prefix, or everything. */
struct view context_view(const struct context *, bool prefix_only);

#endif
