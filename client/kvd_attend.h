/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_ATTEND_H
#define KVD_ATTEND_H

/*
 * Attention over blocks where they lie, for engines without a paged kernel of their own. Spaces in
 * host memory whose blocks are planes of f32, f16 or bf16; one thread, no system call and, but for
 * the first calls, no allocation.
 *
 *      for each layer
 *              kvd_paged_write        keys and values of the new tokens, into blocks that the caller fills
 *              kvd_paged_attention    of the new tokens' queries, over all positions up to their own
 *
 * Numbers go in and come out as float; what is stored is rounded to the space's dtype, to nearest
 * even. The bits of a result depend on the query and on the keys and values that it sees, and on
 * nothing else: not on how many tokens a call has, nor on where blocks lie, nor on the processor.
 */

/* Installed, <kvd.h> is included before this. */
#ifndef KVD_H
#include "kvd.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/*
 * A sequence's blocks in the order of positions: position p is slot p % block_tokens of blocks[p /
 * block_tokens]. All are of one layer group, pinned or being filled by the caller, and of one
 * daemon: view is that of the pin (kvd_pin.view) or of any of the blocks (kvd_block.view); where
 * the two differ, the daemon was replaced in between.
 */
struct kvd_table {
        const void *view;
        const uint32_t *blocks;
        uint32_t n_blocks;
        uint32_t first; /* position of the first new token */
        uint32_t n;     /* new tokens: positions [first, first + n) */
};

/*
 * Stores the keys and values of the new tokens for a layer (of the whole model): of each
 * [kv_heads][head_dim] floats, ld floats from token to token. -EINVAL: a block there is not being
 * filled (a sealed one is never written to), the table has no room for the positions, or the space
 * has no such planes in host memory.
 */
int kvd_paged_write(kvd_space *space, uint32_t layer, const struct kvd_table *table, const float *k,
                    const float *v, size_t ld);

/*
 * Causal attention: token i sees the positions up to first + i, all of which must have been
 * written. Queries and results are [n][heads][head_dim] floats, ldq and ldo floats from token to
 * token; query head h goes with the KV head h / (heads / kv_heads). Weights are softmax(scale * q .
 * k), scale > 0. -EINVAL: as above, or heads is no multiple of kv_heads, or keys are stored before
 * their rotation (KVD_ROPE_PRE). -ENOMEM: no memory for scores.
 */
int kvd_paged_attention(kvd_space *space, uint32_t layer, const struct kvd_table *table,
                        uint32_t heads, float scale, const float *q, size_t ldq, float *out,
                        size_t ldo);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
