/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_SKETCH_H
#define KVD_KERNELS_SKETCH_H

/*
 * A count sketch of vectors (KVReviver, algorithms 1 and 2): what remains of tokens whose keys and
 * values were evicted. It has rows (3 in the paper) of columns cells. A cell is the sum of the
 * vectors that were hashed to it, and a query is the median over one cell per row. Keys and values
 * are two parts that share their places.
 *
 * All of it is linear: inserting the very vector that was inserted, with weight -1, removes it
 * again, up to fp32 rounding. That is why cells are fp32 whatever the vectors are. Inserting the
 * estimate of a query with weight -1 (the paper's algorithm 3) removes parts of other tokens as
 * well; only the paper's profile does it.
 *
 * A NaN in a cell stays there. A query that meets a NaN in any row returns NaN, as numpy's median
 * does.
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
 * For each row, h is a polynomial of degree 3 in the ordinal, modulo 2^61 - 1. It is 4-wise
 * independent; one of degree 1 would spread consecutive ordinals more evenly than random, and the
 * paper's bounds are for random hashes.
 *
 * uniform      column floor(h * columns / 2^61): the paper's profile
 * permutation  ordinal u has column pi(u mod columns), pi a permutation keyed by salt, row and u / columns: tokens
 *              collide only with those of other rounds, and the first round is exact
 *
 * The signs are the two lowest bits of h, one for keys and one for values. If they were equal, the
 * errors of a token's key and value would be correlated.
 */
enum kvd_sketch_family { KVD_SKETCH_UNIFORM = 1, KVD_SKETCH_PERMUTATION = 2 };

struct kvd_sketch_hash {
        enum kvd_sketch_family family;
        uint32_t rows;    /* 1 to KVD_SKETCH_ROWS_MAX */
        uint32_t columns; /* 1 to 2^30 */
        uint64_t salt;    /* secret of this sketch, so that collisions cannot be predicted */
};

#define KVD_SKETCH_COLUMN 0x3fffffffu    /* a place: bits of its column */
#define KVD_SKETCH_KEY_SIGN (1u << 30)   /* set if the key is negated */
#define KVD_SKETCH_VALUE_SIGN (1u << 31) /* set if the value is negated */

/* places[i * rows + r] = the place of ordinals[i] in row r. */
void kvd_sketch_place(const struct kvd_sketch_hash *hash, const uint64_t *ordinals, uint32_t n,
                      uint32_t *places);

/* ---- parts: the contents of cells ---- */

struct kvd_sketch_part {
        float *cells; /* cell (row, column): dim floats at (row * columns + column) * stride */
        /* floats from cell to cell; more than dim if a cell has several heads */
        size_t stride;
        uint32_t rows, columns;
        uint32_t dim;
        /* 0 (the paper's keys), KVD_SKETCH_KEY_SIGN or KVD_SKETCH_VALUE_SIGN (values, always) */
        uint32_t sign;
        /*
         * NULL, or dim numbers that are subtracted on insertion and added by queries. They must not
         * change while anything is in the sketch: linearity depends on it. Of quantised keys, the
         * sketch has what is stored, a transform (write_key in ops.h), and so has the mean.
         */
        const float *mean;
};

/* Vector i begins at blocks[i / per_block] + offset + i % per_block * stride bytes. */
struct kvd_sketch_vectors {
        uint8_t *const *blocks; /* written to by a query only */
        size_t offset;
        size_t stride;
        uint32_t per_block;
        enum kvd_number type;
};

struct kvd_sketch_ops {
        /*
         * cell = fma(weight * sign, x - mean, cell) for each row of each of n vectors, in order;
         * weight is 1 or -1. places: [n][rows].
         */
        void (*insert)(const struct kvd_sketch_part *part, const uint32_t *places, uint32_t n,
                       const struct kvd_sketch_vectors *x, float weight);

        /*
         * x = shrink * median over rows of (sign * cell) + mean, rounded to x's type. shrink: 1 for
         * none.
         */
        void (*query)(const struct kvd_sketch_part *part, const uint32_t *places, uint32_t n,
                      const struct kvd_sketch_vectors *x, float shrink);
};

extern const struct kvd_sketch_ops kvd_sketch_scalar, kvd_sketch_avx2, kvd_sketch_avx512,
        kvd_sketch_neon;

#ifdef __cplusplus
}
#endif

#endif
