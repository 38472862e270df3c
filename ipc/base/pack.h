/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_PACK_H
#define KVD_BASE_PACK_H

/*
 * The format of a run's n tokens: 16 bits each, plus 0, 1, 2, 4 or 8 high bits as the space's
 * vocabulary needs, so that a lookup reads as little as half of the memory. If 24 bits are too few,
 * or the vocabulary is unknown (0), tokens are not packed.
 *
 *      words 0 to n/2 - 1      word i has the low halves of tokens i and i + n/2
 *      the words after them    high bits, in the same halves: of the words 8 j to 8 j + 7 in bits
 *                              b (j mod 16/b) to b (j mod 16/b) + b - 1 of the halves of the
 *                              words 8 (j div 16/b) on, for b bits; unused bits are 0
 *
 * Packed tokens are compared and hashed; nothing unpacks them.
 */

#include "ipc/base/geometry.h"

#define KVD_RUN_TOKENS_MOST (16u * KVD_MAX_PLANE_TOKENS)
#define KVD_PACKED_MOST (KVD_RUN_TOKENS_MOST * 3 / 4) /* maximum u32 words of packed tokens */

/* u32 words of n packed tokens; n is a multiple of 16 */
uint32_t kvd_packed_words(const struct kvd_shape *shape, uint32_t n);

/*
 * Packs n tokens into room, which has kvd_packed_words. Returns room; tokens, if they are not
 * packed; NULL, if one is outside of the vocabulary.
 */
const uint32_t *kvd_pack(const struct kvd_shape *shape, const uint32_t *tokens, uint32_t n,
                         uint32_t *room);

#endif
