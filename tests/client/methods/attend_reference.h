/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_ATTEND_REFERENCE_H
#define KVD_TESTS_ATTEND_REFERENCE_H

/*
 * Attention by its definition, in double precision, over keys and values that were never in a
 * block.
 */

#include <stdint.h>

#include "client/kvd_attend.h"

struct history { /* of one layer; rows [position][kv_heads][head_dim] */
        const struct kvd_geometry *geometry;
        float *k, *v;
};

/* A row of dim numbers as a space of that dtype stores it; with small numbers only. */
void reference_round(float *row, uint32_t dim, uint32_t dtype);

/* The same of a key. */
void reference_round_key(float *row, uint32_t dim, uint32_t dtype);

/* The result of one query head at a position. */
void reference_attend(const struct history *h, uint32_t position, const struct kvd_heads *heads,
                      uint32_t head, const float *q, double *out);

#endif
