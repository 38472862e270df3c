/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_SKETCH_H
#define KVD_KERNELS_SKETCH_H

/*
 * A count sketch of vectors (KVReviver, section 4.1): what is left of tokens whose keys and values
 * were let go. It has rows (3 in the paper) of columns cells; a cell is the sum of the vectors that
 * were hashed to it, and a query is the median of one cell a row. Keys and values are two parts
 * that share their places.
 *
 * All of it is linear: insertion with weight -1 of the very vector that was inserted takes it out
 * again, up to fp32 rounding, which is why cells are fp32 whatever the vectors are. Inserting the
 * estimate of a query with weight -1 (the paper's Algorithm 3) takes parts of other tokens along:
 * only the paper's profile does it.
 *
 * A NaN in a cell stays in it. A query that meets a NaN in any row answers NaN there, as numpy's
 * median does.
 */

#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVD_SKETCH_ROWS_MAX 8

/* ---- places: which cells a token has ---- */

/*
 * For each row, h is a polynomial of degree 3 in the ordinal, modulo 2^61 - 1 (4-wise independent;
 * one of degree 1 would spread consecutive ordinals more evenly than chance does, and the paper's
 * bounds are for chance).
 *
 * uniform      column floor(h * columns / 2^61): the paper's profile
 * permutation  ordinal u has column pi(u mod columns), pi a permutation keyed by salt, row and u / columns: tokens
 *              collide only with those of other rounds, and the first round is exact
 *
 * The signs are the two lowest bits of h, one for keys and one for values: were they the same, the
 * errors of a token's key and value would be correlated.
 */
enum kvd_sketch_family { KVD_SKETCH_UNIFORM = 1, KVD_SKETCH_PERMUTATION = 2 };

struct kvd_sketch_hash {
        enum kvd_sketch_family family;
        uint32_t rows;    /* 1 to KVD_SKETCH_ROWS_MAX */
        uint32_t columns; /* 1 to 2^30 */
        uint64_t salt;    /* of this sketch: others' collisions cannot be foretold */
};

#define KVD_SKETCH_COLUMN 0x3fffffffu /* a place: its column, */
#define KVD_SKETCH_KEY_SIGN (1u << 30) /* and whether the key */
#define KVD_SKETCH_VALUE_SIGN (1u << 31) /* or the value is negated */

/* places[i * rows + r] = the place of ordinals[i] in row r. */
void kvd_sketch_place(const struct kvd_sketch_hash *hash, const uint64_t *ordinals, uint32_t n,
                      uint32_t *places);

/* ---- parts: what lies in the cells ---- */

struct kvd_sketch_part {
        float *cells;  /* cell (row, column) is at cells + (row * columns + column) * stride */
        /* floats from cell to cell; more than dim where a cell has many heads and this is one */
        size_t stride;
        uint32_t rows, columns;
        uint32_t dim;
        /* 0 (the paper's keys), KVD_SKETCH_KEY_SIGN or KVD_SKETCH_VALUE_SIGN (values, always) */
        uint32_t sign;
        const float
                *mean; /* NULL, or dim numbers: taken off what is inserted, added to what is found.
                          Frozen while anything is in the sketch: linearity depends on it */
};

/*
 * Vector i is slot i % per_block of blocks[i / per_block], at offset bytes, stride elements a slot.
 */
struct kvd_sketch_vectors {
        uint8_t *const *blocks; /* only a query writes to them */
        size_t offset;
        size_t stride;
        uint32_t per_block;
        enum kvd_number type;
};

struct kvd_sketch_ops {
        /*
         * cell = fma(weight * sign, x - mean, cell) for each row of each vector, in order; weight
         * is 1 or -1.
         */
        void (*insert)(const struct kvd_sketch_part *part, const uint32_t *places, uint32_t n,
                       const struct kvd_sketch_vectors *x, float weight);

        /*
         * x = shrink * median over rows of sign * cell, + mean, rounded to x's type; shrink 1:
         * none.
         */
        void (*query)(const struct kvd_sketch_part *part, const uint32_t *places, uint32_t n,
                      const struct kvd_sketch_vectors *x, float shrink);
};

extern const struct kvd_sketch_ops kvd_sketch_scalar, kvd_sketch_avx2, kvd_sketch_avx512;

#ifdef __cplusplus
}
#endif

#endif
