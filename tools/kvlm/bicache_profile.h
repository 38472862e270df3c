/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_BICACHE_PROFILE_H
#define KVLM_BICACHE_PROFILE_H

/*
 * What BiCache's table is made from: how alike a prefix's keys and values are, layer by layer, when
 * the prefix is alone and when the whole request is there at the first denoising step. Nothing is
 * generated.
 */

#include "tools/kvlm/diffuse.h"

struct profile {
        /*
         * JSON lines: {"r", "def", "prefix_tokens", "tokens", "sim": [per layer], "sim_flat":
         * [...]}
         */
        FILE *out;
        bool given_up; /* the space did not take a sample: it gets no more */
};

int profile_open(const char *path, struct profile *ret); /* appends */
int profile_close(struct profile *);

/*
 * Samples of one request: at its own prefix, or at every so many percent of it, as
 * options.profile_step says. They go to the file and, where there is one, to the space, whose
 * worker computes the similarities for itself.
 */
int profile_request(struct profile *, const struct diffuser *, const struct diffuse_request *);

#endif
