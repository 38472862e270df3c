/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_ATTEND_INNER_H
#define KVD_KERNELS_ATTEND_INNER_H

/*
 * Shared by the files of attention. What may be seen is numbered in order: column c of the call is
 * its c-th resident (and chosen) position.
 */

#include "kernels/attend.h"

/* Neighbouring positions in one block; their columns are neighbours, too. */
struct kvd_stretch {
        uint32_t block, position, n;
        uint32_t column;
        uint32_t next; /* where to look on: a block, or a place in the list */
};

/* Positions that the call's last token sees. */
uint32_t kvd_attend_keys(const struct kvd_attention *a);

/* From {0} on: true for every stretch, then false with column one past the last. */
bool kvd_attend_next(const struct kvd_attention *a, struct kvd_stretch *r);

/* rotated = rows of queries of dim, one after the other, by rotation number rotation > 0. */
void kvd_attend_rotate(const struct kvd_attention *a, float *rotated, const float *q,
                       uint32_t rotation, uint32_t rows);

/* A row's weights p, and their total, to the masses of what it sees: the first n_columns. */
void kvd_attend_mass(const struct kvd_attention *a, const float *p, float total,
                     uint32_t n_columns);

#endif
