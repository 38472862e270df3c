/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_FORWARD_H
#define KVLM_FORWARD_H

/*
 * Runs a chunk of a causal sequence through all layers: on the CPU here, on a GPU in
 * device_forward.h.
 */

#include "tools/kvlm/pass.h"

struct step {
        struct view view;       /* of the whole sequence */
        const uint32_t *tokens; /* [n], at positions first and up */
        uint32_t first, n;
        bool decoding;   /* these tokens were generated: device_forward.h */
        float *logits;   /* NULL if not wanted */
        bool all_logits; /* logits of every token [n][vocab], not of the last one [vocab] */
};

int forward_step(struct pass *, uint32_t layers, const struct step *); /* -ENOMEM */

#endif
