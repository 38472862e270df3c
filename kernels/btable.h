/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_BTABLE_H
#define KVD_KERNELS_BTABLE_H

/*
 * BiCache's table (sections 5.1 and 5.2 of the paper): if a fraction r of the input is the shared
 * prefix, the first b layers of the stored prefix are used, and the deeper ones are recomputed
 * every delta steps. It is built from a profile: how similar the keys and values of each layer
 * were, in requests at every r. No memory is allocated here.
 */

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVD_BTABLE_STEPS 101 /* r in percent, 0 to 100 */

/*
 * What r is a fraction of: the input with or without the tokens to generate. A table is for one of
 * them; looking up the other fails.
 */
enum kvd_ratio { KVD_RATIO_INCLUDE_GEN = 1, KVD_RATIO_PROMPT_ONLY = 2 };

enum kvd_estimator {
        /* the paper: b of each request (similarity >= tau), then their mean, rounded down */
        KVD_ESTIMATE_MEAN_B,
        /* the official code: mean of the similarities, then b (similarity > tau) */
        KVD_ESTIMATE_MEAN_FIRST,
};

/* ---- ratios and refreshes ---- */

/* 100 m / n, rounded to the nearest integer, ties to even, as Python's round(); n > 0, m <= n. */
uint32_t kvd_ratio_percent(uint64_t m, uint64_t n);

/* Whether the deep layers are recomputed at denoising step t (from 1): (t - 1) % delta == 0. */
bool kvd_refresh_due(uint32_t t, uint32_t delta);

/* Number of leading layers whose similarity is > tau, or >= tau if equal is true. */
uint32_t kvd_layers_alike(const float *similarity, uint32_t n_layers, float tau, bool equal);

/* ---- profile ---- */

struct kvd_bprofile {
        uint32_t n_layers;
        enum kvd_ratio ratio;
        float tau; /* fp32 like the similarities, so that comparing for equality is exact */
        uint32_t requests[KVD_BTABLE_STEPS];
        uint64_t sum_b[KVD_BTABLE_STEPS]; /* sum of each request's b, for the paper's estimator */
        /* sums of similarities, [KVD_BTABLE_STEPS][n_layers]; caller's memory, zeroed */
        double *sum;
};

/*
 * Adds one request's similarities, [n_layers]. 0, or -EINVAL if percent is over 100 or a similarity
 * is not finite.
 */
int kvd_bprofile_add(struct kvd_bprofile *profile, uint32_t percent, const float *similarity);

/* ---- table ---- */

struct kvd_btable {
        enum kvd_ratio ratio;
        uint32_t n;
        struct kvd_bstep {
                uint8_t percent;
                uint16_t b;
        } steps[KVD_BTABLE_STEPS]; /* both ascend: a smaller b at a larger r is noise */
};

void kvd_btable_build(const struct kvd_bprofile *profile, enum kvd_estimator estimator,
                      struct kvd_btable *ret);

/*
 * Returns b of the last step at or below percent, or 1 if there is none: layer 1's keys and values
 * do not depend on other tokens. -EINVAL if the table is for the other kind of ratio.
 */
int kvd_btable_lookup(const struct kvd_btable *table, enum kvd_ratio ratio, uint32_t percent);

#ifdef __cplusplus
}
#endif

#endif
