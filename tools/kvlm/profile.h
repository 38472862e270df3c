/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_PROFILE_H
#define KVLM_PROFILE_H

/*
 * The profile that the table of depths is made from: per layer, how similar the keys and values of a
 * prefix are when it is computed alone and when it is part of the whole request at the first
 * denoising step. Nothing is generated.
 */

#include "tools/kvlm/diffuse.h"

struct profile {
        /*
         * JSON lines: {"r", "def", "prefix_tokens", "tokens", "sim": [per layer], "sim_flat":
         * [...]}
         */
        FILE *out;
        bool given_up; /* the space refused a sample, so it gets no more */
};

int profile_open(const char *path, struct profile *ret); /* appends */
int profile_close(struct profile *);

/*
 * Takes samples of one request: at its own prefix, or at every multiple of options.profile_step
 * percent. They are written to the file and sent to the space, if there is one; its worker computes
 * the similarities itself.
 */
int profile_request(struct profile *, const struct diffuser *, const struct diffuse_request *);

#endif
