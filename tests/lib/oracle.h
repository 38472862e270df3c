/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_LIB_ORACLE_H
#define KVD_TESTS_LIB_ORACLE_H

/*
 * Content as a function of its key: every byte of a block follows from the space and the tokens up
 * to the block's end. So a reader can check any byte by itself.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Seed of the block that ends with tokens[n - 1] in a chain, or in a whole prefix (bidirectional: n
 * is all of it).
 */
uint64_t oracle_seed(uint64_t space, const uint32_t *tokens, uint32_t n);

void oracle_fill(uint8_t *block, size_t bytes, uint64_t seed);

/* Number of bytes that differ. */
size_t oracle_wrong(const uint8_t *block, size_t bytes, uint64_t seed);

/* A small deterministic generator. */
struct random {
        uint64_t state;
};
uint32_t random_below(struct random *r, uint32_t n);

#endif
