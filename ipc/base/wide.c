/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Compiled once for each instruction set: the compiler and XXH3 choose vector instructions at
 * compile time, and key.c chooses a variant at run time.
 */

#include "ipc/base/wide.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static struct kvd_key hash(const void *data, size_t bytes, const uint8_t *secret) {
        XXH128_hash_t h = XXH3_128bits_withSecret(data, bytes, secret, KVD_SECRET_BYTES);

        return (struct kvd_key){h.low64, h.high64};
}

static uint32_t pack(uint32_t *to, const uint32_t *tokens, uint32_t n, uint32_t high_bits) {
        typedef uint32_t words __attribute__((vector_size(32), aligned(4), may_alias));
        const words *first = (const words *)tokens, *second = first + n / 16;
        words *low = (words *)to, *high = low + n / 16, full = {0}, seen = {0};
        uint32_t shift = 0, any = 0;

        for (uint32_t i = 0; i < n / 16; i++) {
                words both = first[i] >> 16 | (second[i] & 0xffff0000);

                low[i] = (first[i] & 0xffff) | second[i] << 16;
                seen |= both;
                full |= both << shift;
                shift += high_bits;
                if (shift == 16) {
                        *high++ = full;
                        full = (words){0};
                        shift = 0;
                }
        }
        if (shift)
                *high = full;
        for (uint32_t i = 0; i < 8; i++)
                any |= seen[i];
        return any;
}

const struct kvd_wide KVD_WIDE_NAME = {hash, pack};
