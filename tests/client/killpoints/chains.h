/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_CHAINS_H
#define KVD_TESTS_KILLPOINTS_CHAINS_H

/*
 * The chains that these tests publish and look up, and their contents. Chains come in families of 4
 * that share their first TRUNK blocks. A block's content is the oracle's function of the tokens up
 * to its end, or, in a bidirectional space, of the whole prefix.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/kvd.h"

#define BT 4u
#define TRUNK 10u
#define CHAIN_BLOCKS 40u /* the longest chain: two runs and some blocks */
#define CHAIN_TOKENS (CHAIN_BLOCKS * BT)

extern const struct kvd_geometry chain_geometry; /* blocks of 256 bytes */

void chain_tokens(uint32_t chain, uint32_t n, uint32_t *ret);

/* Fills blocks first to first + n of a chain that consists of tokens[0..n_tokens). */
void chain_fill(const uint32_t *tokens, uint32_t n_tokens, bool whole, uint32_t first, uint32_t n,
                struct kvd_block *blocks);

/* Number of wrong bytes in the chain that a pin holds. */
size_t chain_wrong(const struct kvd_pin *pin, const uint32_t *ids, const uint32_t *tokens,
                   bool whole);

/* Number of wrong bytes in blocks that are being filled, or were just sealed. */
size_t blocks_wrong(const uint32_t *tokens, uint32_t n_tokens, bool whole, uint32_t first,
                    uint32_t n, const struct kvd_block *blocks);

/* Takes n blocks. Returns a negative errno, and takes none, if it cannot get all of them. */
int take_blocks(struct kvd_space *space, uint32_t n, struct kvd_block *blocks);

/*
 * Publishes the blocks missing after the pin, up to n_tokens. Returns the number of blocks sealed,
 * or a negative errno.
 */
int chain_publish(struct kvd_space *space, struct kvd_pin *pin, const uint32_t *tokens,
                  uint32_t n_tokens, bool whole);

#endif
