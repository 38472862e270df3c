/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ATTEND_INNER_H
#define KVD_KERNELS_ATTEND_INNER_H

/*
 * Shared by the attention files. Visible positions are numbered in order: column c of the call is
 * its c-th resident (and, if a list is given, chosen) position.
 */

#include "kernels/attend.h"

/* One past the last position that the call's last token sees. */
uint32_t kvd_attend_keys(const struct kvd_attention *a);

/* Number of positions up to its own that a token sees; 0: all. */
uint32_t kvd_attend_window(const struct kvd_attention *a);

/*
 * Stores the position of each column, and a pointer to its key. Returns the number of columns. A
 * window begins with its first block.
 */
uint32_t kvd_attend_columns(const struct kvd_attention *a, const uint8_t **keys,
                            uint32_t *positions);

/* The block of a position. Most blocks have a power of two of tokens: a division is slow. */
static inline uint32_t kvd_attend_block(const struct kvd_attention *a, uint32_t position) {
        uint32_t tokens = a->block_tokens;

        return tokens & (tokens - 1) ? position / tokens :
                                       position >> (unsigned)__builtin_ctz(tokens);
}

/* rotated = q, rows of dim floats without gaps, rotated by rotation number rotation > 0. */
void kvd_attend_rotate(const struct kvd_attention *a, float *rotated, const float *q,
                       uint32_t rotation, uint32_t rows);

/* Adds the weights of n columns to the masses. */
void kvd_attend_mass(const struct kvd_attention *a, const float *weights, const uint32_t *positions,
                     uint32_t n);

#endif
