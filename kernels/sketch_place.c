/* SPDX-License-Identifier: Apache-2.0 */

/* Hashing is done once per token, for all layers and heads; it needs no special instructions. */

#include "ipc/base/util.h"
#include "kernels/sketch.h"

#define PRIME ((1ull << 61) - 1)

enum { DEGREE = 3, STREAM_ROUND = 4, STEPS = 4 /* rounds of a permutation */ };

/* SplitMix64's output function. */
static uint64_t mix(uint64_t x) {
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
        x = (x ^ x >> 27) * 0x94d049bb133111eb;
        return x ^ x >> 31;
}

/* Number i of a row's stream of random numbers. */
static uint64_t draw(uint64_t salt, uint32_t row, uint64_t i) {
        return mix(mix(salt + 0x9e3779b97f4a7c15 * (row + 1)) + 0x9e3779b97f4a7c15 * (i + 1));
}

/* x mod 2^61 - 1, for x < 2^122 */
static uint64_t reduce(unsigned __int128 x) {
        uint64_t sum = (uint64_t)(x & PRIME) + (uint64_t)(x >> 61);

        return sum >= PRIME ? sum - PRIME : sum;
}

/* c[0] + c[1] u + ... mod 2^61 - 1; the coefficients are from the row's stream */
static uint64_t polynomial(const struct kvd_sketch_hash *hash, uint32_t row, uint64_t u) {
        uint64_t y = 0;

        u = reduce(u);
        for (int i = DEGREE; i >= 0; i--)
                y = reduce((unsigned __int128)y * u + reduce(draw(hash->salt, row, (uint64_t)i)));
        return y;
}

/*
 * A permutation of the numbers below the next power of two, applied until the result is below
 * columns. Each step is invertible, since its factor is odd and its shift is not 0. At most half of
 * the numbers are too large, and since the permutation has cycles, a walk that began at a small
 * number comes back to one.
 */
static uint32_t permuted_column(const struct kvd_sketch_hash *hash, uint32_t row, uint64_t u) {
        uint64_t key = draw(hash->salt, row, STREAM_ROUND) + u / hash->columns;
        uint32_t bits = hash->columns > 1 ? 32 - (uint32_t)__builtin_clz(hash->columns - 1) : 0;
        uint32_t mask = (1u << bits) - 1, x = (uint32_t)(u % hash->columns);
        uint64_t random[STEPS];

        for (int i = 0; i < STEPS; i++)
                random[i] = draw(key, (uint32_t)i, 0);
        do {
                for (int i = 0; i < STEPS; i++) {
                        x = (x * ((uint32_t)random[i] | 1) + (uint32_t)(random[i] >> 32)) & mask;
                        x ^= x >> (bits / 2 + 1);
                }
        } while (x >= hash->columns);
        return x;
}

void kvd_sketch_place(const struct kvd_sketch_hash *hash, const uint64_t *ordinals, uint32_t n,
                      uint32_t *places) {
        for (uint32_t i = 0; i < n; i++)
                for (uint32_t r = 0; r < hash->rows; r++) {
                        uint64_t h = polynomial(hash, r, ordinals[i]);
                        uint32_t column = (uint32_t)((unsigned __int128)h * hash->columns >> 61);

                        if (hash->family == KVD_SKETCH_PERMUTATION)
                                column = permuted_column(hash, r, ordinals[i]);
                        *places++ = (uint32_t)h << 30 | column;
                }
}
