/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_KVLM_TEST_DIFFUSE_H
#define KVD_TESTS_KVLM_TEST_DIFFUSE_H

/*
 * Masked diffusion with and without BiCache in double precision, by the control flow of the
 * official code.
 */

#include "tests/kvlm/folder.h"

enum { MASK = 3 };

/* A random model whose attention is bidirectional. */
const struct random_model *diffusion_model(const char *name, const struct shape *, uint32_t seed);

struct denoising {
        const struct random_model *m;
        const uint32_t *tokens; /* [n], of which the first n_prefix are shared */
        uint32_t n, n_prefix;
        uint32_t length, steps;
        uint32_t b, delta; /* b 0: everything is computed in every step */
};

struct denoised {
        double *logits;   /* [steps][length][vocab], before the step's tokens are fixed */
        uint32_t *tokens; /* [length] */
};

struct denoised reference_denoise(const struct denoising *); /* valid until folder_remove() */

/*
 * How similar a layer's keys and values of the prefix are, computed alone and within the whole
 * input at the first step: [layers].
 */
struct similarity {
        double flat[16], token_mean[16];
};

struct similarity reference_similarity(const struct denoising *);

#endif
