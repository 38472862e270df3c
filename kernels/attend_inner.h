/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ATTEND_INNER_H
#define KVD_KERNELS_ATTEND_INNER_H

/*
 * Shared by the attention files. Visible positions are numbered in order: column c of the call is
 * its c-th resident (and, if a list is given, chosen) position.
 */

#include "kernels/attend.h"

/* Neighbouring positions in one block; their columns are neighbours as well. */
struct kvd_stretch {
        uint32_t block, position, n;
        uint32_t column;
        uint32_t next; /* where to continue: a block, or an index into the chosen list */
};

/* One past the last position that the call's last token sees. */
uint32_t kvd_attend_keys(const struct kvd_attention *a);

/* Number of positions up to its own that a token sees; 0: all. */
uint32_t kvd_attend_window(const struct kvd_attention *a);

/* Where kvd_attend_next() begins: at the first block of a window, if there is one. */
struct kvd_stretch kvd_attend_begin(const struct kvd_attention *a);

/* Iterates: true for every stretch, then false with column one past the last. */
bool kvd_attend_next(const struct kvd_attention *a, struct kvd_stretch *r);

/* rotated = q, rows of dim floats without gaps, rotated by rotation number rotation > 0. */
void kvd_attend_rotate(const struct kvd_attention *a, float *rotated, const float *q,
                       uint32_t rotation, uint32_t rows);

/* Adds a row's weights p, divided by their total, to the masses of its first n_columns columns. */
void kvd_attend_mass(const struct kvd_attention *a, const float *p, float total,
                     uint32_t n_columns);

#endif
