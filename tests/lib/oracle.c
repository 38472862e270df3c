/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/oracle.h"

#include <string.h>

static uint64_t mix(uint64_t x) {
        x ^= x >> 30;
        x *= UINT64_C(0xbf58476d1ce4e5b9);
        x ^= x >> 27;
        x *= UINT64_C(0x94d049bb133111eb);
        return x ^ x >> 31;
}

uint64_t oracle_seed(uint64_t space, const uint32_t *tokens, uint32_t n) {
        uint64_t h = mix(space + 1);

        for (uint32_t i = 0; i < n; i++)
                h = mix(h * 3 + tokens[i] + 1);
        return h;
}

static uint64_t word(uint64_t seed, size_t i) {
        return seed * (2 * i + 1) ^ i << 17;
}

void oracle_fill(uint8_t *block, size_t bytes, uint64_t seed) {
        for (size_t i = 0; i < bytes / 8; i++) {
                uint64_t w = word(seed, i);

                memcpy(block + i * 8, &w, 8);
        }
}

size_t oracle_wrong(const uint8_t *block, size_t bytes, uint64_t seed) {
        size_t wrong = 0;

        for (size_t i = 0; i < bytes / 8; i++) {
                uint64_t w = word(seed, i);

                if (memcmp(block + i * 8, &w, 8) != 0)
                        wrong += 8;
        }
        return wrong;
}

uint32_t random_below(struct random *r, uint32_t n) {
        r->state += UINT64_C(0x9e3779b97f4a7c15);
        return (uint32_t)(mix(r->state) >> 32) % n;
}
