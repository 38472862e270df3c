/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_MEMSHARE_H
#define KVD_KERNELS_MEMSHARE_H

/*
 * MemShare's two similarities (algorithm 1 of the paper): of reasoning steps, by the words they
 * share (stage 1), and of blocks, by the distance of their keys and values (stage 2). Nothing is
 * ever written into a block: where the position of a block's tokens changes, readers rotate their
 * queries.
 *
 * Sums of squares are fp32 over at most 1024 elements, in four chains of lanes, and fp64 beyond.
 * The order is fixed, so that a distance has the same bits in every variant.
 */

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- stage 1: bags of words ---- */

struct kvd_bag {
        const uint32_t *ids;    /* strictly ascending */
        const uint16_t *counts; /* occurrences of each id, saturated at 65535 */
        uint32_t n;
        double squares; /* sum of the squares of the counts */
};

/*
 * Makes a bag from a list of tokens. ids and counts have room for n_tokens each. They belong to the
 * caller, and the bag points into them. Takes O(n log n) steps and allocates no memory.
 */
void kvd_bag_make(struct kvd_bag *bag, const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids,
                  uint16_t *counts);

/* Cosine of the count vectors, 0 to 1; exactly 1 for equal bags, 0 if one is empty. */
double kvd_bag_cosine(const struct kvd_bag *a, const struct kvd_bag *b);

/* ---- stage 2: blocks ---- */

/*
 * Blocks that hold all layers: for each layer a plane of K, then one of V, as in client/kvd.h.
 * Layer groups count as layers. tokens: per block; dim: elements of a head.
 */
struct kvd_memshare_shape {
        uint32_t layers, heads, tokens, dim;
        enum kvd_number type;
};

struct kvd_memshare_block {
        const void *data;
        /*
         * NULL, or the result of norms(): allows rejecting without reading; KVD_MEMSHARE_RELATIVE
         * needs it
         */
        const float *norms;
};

/*
 * For each layer, d is the mean of the following over K and V; the distance is the mean of d over
 * the layers.
 */
enum kvd_memshare_metric {
        /* Frobenius norm of the difference / (tokens * heads): the paper's metric */
        KVD_MEMSHARE_FRO_NORM = 1,
        KVD_MEMSHARE_MEAN_L2 = 2,  /* mean over tokens and heads of the norm of the difference */
        KVD_MEMSHARE_RELATIVE = 3, /* Frobenius norm of the difference / sqrt(norm a * norm b) */
};

struct kvd_memshare_query {
        const struct kvd_memshare_shape *shape;
        enum kvd_memshare_metric metric;
        double limit; /* distances above it are reported as INFINITY; INFINITY: no limit */

        /*
         * b's keys are rotated before they are compared, pair (i, i + half) by the angle with
         * cosine[i] and sine[i], i < half. half 0: not rotated.
         */
        const float *cosine, *sine;
        uint32_t half; /* 2 half <= dim; elements beyond are not rotated */
};

struct kvd_memshare_ops {
        /* The distance of two blocks, or INFINITY if it is above the limit or if a NaN was read. */
        double (*distance)(const struct kvd_memshare_query *q, const struct kvd_memshare_block *a,
                           const struct kvd_memshare_block *b);

        /* out[2 l] and out[2 l + 1] = Frobenius norms of layer l's K and V */
        void (*norms)(const struct kvd_memshare_shape *shape, const void *block, float *out);
};

extern const struct kvd_memshare_ops kvd_memshare_scalar, kvd_memshare_avx2, kvd_memshare_avx512,
        kvd_memshare_neon;

/*
 * Cosines and sines of a rotation by delta positions (any sign), frequencies[i] in radians per
 * position, i < half. Computed in fp64.
 */
void kvd_memshare_angles(const double *frequencies, uint32_t half, int64_t delta, float *cosine,
                         float *sine);

/* The usual frequencies: base^(-i / half) */
void kvd_memshare_frequencies(double *frequencies, uint32_t half, double base);

#ifdef __cplusplus
}
#endif

#endif
