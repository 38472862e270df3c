/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/bench/chains.h"
#include "tests/bench/harness.h"

struct chains chains_plan(uint64_t blocks) {
        uint64_t per_trunk = TRUNK_BLOCKS + TRUNK_CHAINS * (CHAIN_BLOCKS - TRUNK_BLOCKS);
        uint64_t trunks = blocks / per_trunk ? blocks / per_trunk : 1;

        return (struct chains){.n_chains = (uint32_t)(trunks * TRUNK_CHAINS),
                               .n_blocks = trunks * per_trunk};
}

/* Number of a chain's i-th block: first all trunks, then the chains' own blocks. */
static uint64_t chain_block(const struct chains *chains, uint32_t chain, uint32_t i) {
        uint64_t trunks = chains->n_chains / TRUNK_CHAINS;

        if (i < TRUNK_BLOCKS)
                return (uint64_t)(chain / TRUNK_CHAINS) * TRUNK_BLOCKS + i;
        return trunks * TRUNK_BLOCKS + (uint64_t)chain * (CHAIN_BLOCKS - TRUNK_BLOCKS) +
               (i - TRUNK_BLOCKS);
}

void block_tokens(uint64_t block, uint32_t ret[BLOCK_TOKENS]) {
        uint64_t random = mix64(block + 1);

        for (uint32_t i = 0; i < BLOCK_TOKENS; i++)
                ret[i] = (uint32_t)(((next_random(&random) >> 32) * VOCABULARY) >> 32);
}

struct block_key block_key(uint64_t block) {
        return (struct block_key){.lo = mix64(2 * block + 1), .hi = mix64(~block)};
}

void chain_tokens(const struct chains *chains, uint32_t chain, uint32_t ret[CHAIN_TOKENS]) {
        for (uint32_t i = 0; i < CHAIN_BLOCKS; i++)
                block_tokens(chain_block(chains, chain, i), ret + i * BLOCK_TOKENS);
}

void chain_keys(const struct chains *chains, uint32_t chain, struct block_key ret[CHAIN_BLOCKS]) {
        for (uint32_t i = 0; i < CHAIN_BLOCKS; i++)
                ret[i] = block_key(chain_block(chains, chain, i));
}
