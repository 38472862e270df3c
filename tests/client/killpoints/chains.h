/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KILLPOINTS_CHAINS_H
#define KVD_TESTS_KILLPOINTS_CHAINS_H

/*
 * The chains that these tests publish and look up, and what must be in them. Chains come in
 * families of 4 that share their first TRUNK blocks; content is the oracle's function of the
 * tokens, or, in a bidirectional space, of the whole prefix.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/kvd.h"

#define BT 4u
#define TRUNK 10u
#define CHAIN_BLOCKS 40u /* longest: two runs and some blocks */
#define CHAIN_TOKENS (CHAIN_BLOCKS * BT)

extern const struct kvd_geometry chain_geometry; /* blocks of 256 bytes */

void chain_tokens(uint32_t chain, uint32_t n, uint32_t *ret);

/*
 * Fills blocks first to first + n of a chain, of which tokens[0..n_tokens) is all that is to be in
 * them.
 */
void chain_fill(const uint32_t *tokens, uint32_t n_tokens, bool whole, uint32_t first, uint32_t n,
                struct kvd_block *blocks);

/* Bytes that are not what they must be in the chain that a pin holds. */
size_t chain_wrong(const struct kvd_pin *pin, const uint32_t *ids, const uint32_t *tokens,
                   bool whole);

/* Bytes of blocks being filled, or just sealed, that are not what chain_fill made them. */
size_t blocks_wrong(const uint32_t *tokens, uint32_t n_tokens, bool whole, uint32_t first,
                    uint32_t n, const struct kvd_block *blocks);

/* All n blocks, or none and a negative errno. */
int take_blocks(struct kvd_space *space, uint32_t n, struct kvd_block *blocks);

/*
 * Publishes what is missing behind the pin, up to n_tokens. Number of blocks sealed now, or a
 * negative errno.
 */
int chain_publish(struct kvd_space *space, struct kvd_pin *pin, const uint32_t *tokens,
                  uint32_t n_tokens, bool whole);

#endif
