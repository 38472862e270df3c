/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_MEMSHARE_H
#define KVD_KERNELS_MEMSHARE_H

/*
 * MemShare's two similarities (section 3 of the paper): of reasoning steps, by the words they
 * share, and of blocks, by the distance of their keys and values. What is computed here is never
 * stored into a block: where the position of a block's tokens changes, readers rotate their
 * queries.
 *
 * Sums of squares are fp32 over at most 1024 elements, in four chains of lanes, and fp64 beyond;
 * the order is fixed, so that a distance has the same bits in every variant.
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
        const uint32_t *ids;    /* ascending, each once */
        const uint16_t *counts; /* how often; 65535 and more are 65535 */
        uint32_t n;
        double squares; /* sum of the squares of the counts */
};

/*
 * Makes a bag of a list of tokens. ids and counts have room for n_tokens and belong to the caller,
 * and so do bag's pointers. Takes n log n steps, and no other memory.
 */
void kvd_bag_make(struct kvd_bag *bag, const uint32_t *tokens, uint32_t n_tokens, uint32_t *ids,
                  uint16_t *counts);

/* Cosine of the count vectors, 0 to 1; 1 for equal bags, 0 if one is empty. */
double kvd_bag_cosine(const struct kvd_bag *a, const struct kvd_bag *b);

/* ---- stage 2: blocks ---- */

/*
 * Blocks of whole layers: for each layer a plane of K, then one of V, as in client/kvd.h; layer
 * groups as layers.
 */
struct kvd_memshare_shape {
        uint32_t layers, heads, tokens, dim;
        enum kvd_number type;
};

struct kvd_memshare_block {
        const void *data;
        /* NULL, or what norms() found: rejects without reading; needed by KVD_MEMSHARE_RELATIVE */
        const float *norms;
};

/* d is the sum over K and V of a layer, halved; a distance is the mean of d over the layers. */
enum kvd_memshare_metric {
        /* Frobenius norm of the difference / (tokens heads): the paper's */
        KVD_MEMSHARE_FRO_NORM = 1,
        KVD_MEMSHARE_MEAN_L2 = 2,  /* mean over tokens and heads of the difference's norm */
        KVD_MEMSHARE_RELATIVE = 3, /* Frobenius norm of the difference / sqrt(norm a norm b) */
};

struct kvd_memshare_query {
        const struct kvd_memshare_shape *shape;
        enum kvd_memshare_metric metric;
        double limit;          /* distances above it need not be known; INFINITY: all are */

        /*
         * b's keys are rotated before they are compared: angles of pairs (i, i + half), i < half;
         * half 0: as is
         */
        const float *cosine, *sine;
        uint32_t half; /* 2 half <= dim; elements beyond are not rotated */
};

struct kvd_memshare_ops {
        /*
         * The distance of two blocks, or INFINITY if it is above the limit, or if there is a NaN in
         * what was read.
         */
        double (*distance)(const struct kvd_memshare_query *q, const struct kvd_memshare_block *a,
                           const struct kvd_memshare_block *b);

        /* out[2 l] and out[2 l + 1]: Frobenius norms of layer l's K and V */
        void (*norms)(const struct kvd_memshare_shape *shape, const void *block, float *out);
};

extern const struct kvd_memshare_ops kvd_memshare_scalar, kvd_memshare_avx2, kvd_memshare_avx512;

/*
 * Angles of a rotation by delta positions (any sign), frequencies[i] in radians a position,
 * computed in fp64.
 */
void kvd_memshare_angles(const double *frequencies, uint32_t half, int64_t delta, float *cosine,
                         float *sine);

/* The usual frequencies: base^(-i / half) */
void kvd_memshare_frequencies(double *frequencies, uint32_t half, double base);

#ifdef __cplusplus
}
#endif

#endif
