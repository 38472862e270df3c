/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_CONTEXT_H
#define KVLM_CONTEXT_H

#include "tools/kvlm/pass.h"

/*
 * The keys and values of a bidirectional request, in blocks of one layer each: those of layer l are
 * blocks[l * n_blocks] and following. The prefix fills the first blocks, and the rest begins in a
 * block of its own: nothing is appended to a block that others may share.
 */
struct context {
        uint32_t n_prefix, n_tokens; /* tokens of the prefix, and of the whole request */
        uint32_t block_tokens;
        uint32_t n_blocks; /* blocks per layer */
        uint8_t **blocks;
        uint32_t *slots; /* [n_tokens]: slot of each position */
};

int context_new(const struct config *, const struct block_shape *, uint32_t n_prefix,
                uint32_t n_tokens, struct context *ret);
void context_release(struct context *); /* does not free the blocks */

/* The view of queries that see only the prefix, or everything. */
struct view context_view(const struct context *, bool prefix_only);

#endif
