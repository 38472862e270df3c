/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_CHAINS_H
#define KVD_BENCH_CHAINS_H

/*
 * The contents of the cache: chains of 128 blocks of 16 tokens. Sixteen chains share a trunk (a
 * system prompt, an agent's instructions) of 64 blocks, and each has 64 blocks of its own. Tokens
 * and keys of a block are computed from its number, not stored, so that a lookup takes no more room
 * in the processor's caches than it would with a real caller.
 */

#include <stdint.h>

#define BLOCK_TOKENS 16u
#define CHAIN_BLOCKS 128u
#define CHAIN_TOKENS (CHAIN_BLOCKS * BLOCK_TOKENS)
#define TRUNK_BLOCKS 64u
#define TRUNK_CHAINS 16u
#define VOCABULARY 128256u

struct chains {
        uint32_t n_chains;
        uint64_t n_blocks; /* distinct ones, at most the number requested */
};

/* A key for the peers: 16 bytes, already hashed. */
struct block_key {
        uint64_t lo, hi;
};

struct chains chains_plan(uint64_t blocks);
void chain_tokens(const struct chains *chains, uint32_t chain, uint32_t ret[CHAIN_TOKENS]);
void chain_keys(const struct chains *chains, uint32_t chain, struct block_key ret[CHAIN_BLOCKS]);

/*
 * Blocks are numbered 0 to n_blocks - 1. Numbers above that give tokens and keys that are in no
 * cache.
 */
void block_tokens(uint64_t block, uint32_t ret[BLOCK_TOKENS]);
struct block_key block_key(uint64_t block);

#endif
