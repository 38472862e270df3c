/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_KERNELS_BTABLE_H
#define KVD_KERNELS_BTABLE_H

/*
 * BiCache's table: given which fraction r of the input is the shared prefix, the first b layers of
 * the stored prefix are used, and the deeper ones are computed again every delta steps. Built from
 * a profile: how similar each layer's keys and values were, in requests at every r. No memory is
 * allocated here.
 */

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVD_BTABLE_STEPS 101 /* r in percent, 0 to 100 */

/* What r is a fraction of. A table is for one of them and refuses the other. */
enum kvd_ratio { KVD_RATIO_INCLUDE_GEN = 1, KVD_RATIO_PROMPT_ONLY = 2 };

enum kvd_estimator {
        /* the paper: the b of each request (similarity >= tau), their mean, rounded down */
        KVD_ESTIMATE_MEAN_B,
        /* the official code: the similarities' mean, then b (similarity > tau) */
        KVD_ESTIMATE_MEAN_FIRST,
};

/* ---- ratios and refreshes ---- */

/* 100 m / n to the nearest percent, ties to even, as Python's round(); n > 0, m <= n. */
uint32_t kvd_ratio_percent(uint64_t m, uint64_t n);

/* Are the deep layers computed again at denoising step t (from 1)? */
bool kvd_refresh_due(uint32_t t, uint32_t delta);

/* Layers from the first on whose similarity is > tau, or >= tau if so equal. */
uint32_t kvd_layers_alike(const float *similarity, uint32_t n_layers, float tau, bool equal);

/* ---- profile ---- */

struct kvd_bprofile {
        uint32_t n_layers;
        enum kvd_ratio ratio;
        float tau; /* as single as the similarities: exactly tau is exactly tau */
        uint32_t requests[KVD_BTABLE_STEPS];
        uint64_t sum_b[KVD_BTABLE_STEPS]; /* of each request's b, for the paper's estimator */
        /* [KVD_BTABLE_STEPS][n_layers] of similarities; the caller's, zeroed */
        double *sum;
};

/* A request's similarities, by layer. -EINVAL: percent is over 100, or a similarity is no number */
int kvd_bprofile_add(struct kvd_bprofile *profile, uint32_t percent, const float *similarity);

/* ---- table ---- */

struct kvd_btable {
        enum kvd_ratio ratio;
        uint32_t n;
        struct kvd_bstep {
                uint8_t percent;
                uint16_t b;
        } steps[KVD_BTABLE_STEPS]; /* both ascend: what is measured less deep at a greater r is
                                      noise */
};

void kvd_btable_build(const struct kvd_bprofile *profile, enum kvd_estimator estimator,
                      struct kvd_btable *ret);

/* b of the last step at or below percent; 1 if there is none, since layer 1's keys and values see no other token.
 * -EINVAL: the table is for the other kind of ratio */
int kvd_btable_lookup(const struct kvd_btable *table, enum kvd_ratio ratio, uint32_t percent);

#ifdef __cplusplus
}
#endif

#endif
