/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Packs tokens into as few bits as the vocabulary needs. A token outside of the vocabulary would be
 * packed like another token, so it is detected.
 */

#include "ipc/base/pack.h"

#include "ipc/base/util.h"
#include "ipc/base/wide.h"

#define AS_THEY_ARE 16u /* bits above the lower 16 */

static uint32_t high_bits(const struct kvd_shape *shape) {
        uint32_t most = (shape->vocab - 1) >> 16, bits = 1;

        while (most >> bits)
                bits *= 2;
        return most ? bits : 0;
}

uint32_t kvd_packed_words(const struct kvd_shape *shape, uint32_t n) {
        uint32_t bits = high_bits(shape);

        return bits == AS_THEY_ARE ? n : n / 2 + 8 * DIV_UP(n / 16 * bits, 16);
}

const uint32_t *kvd_pack(const struct kvd_shape *shape, const uint32_t *tokens, uint32_t n,
                         uint32_t *room) {
        uint32_t bits = high_bits(shape), both = ((1u << bits) - 1) * 0x10001;

        if (bits == AS_THEY_ARE)
                return tokens;
        return kvd_wide_best()->pack(room, tokens, n, bits) & ~both ? NULL : room;
}
