/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_SAMPLE_H
#define KVLM_SAMPLE_H

#include <stdint.h>

struct sampling {
        float temperature; /* 0: the most likely token */
        /* keep the most likely tokens up to this share of the probability; 1: all */
        float top_p;
        uint32_t top_k; /* maximum number of tokens; 0: all */
        uint64_t seed;
};

struct sampler;

int sampler_new(const struct sampling *, uint32_t vocab, struct sampler **ret);
struct sampler *sampler_free(struct sampler *);
void sampler_restart(struct sampler *); /* from the seed: equal prompts give equal text */
uint32_t sampler_pick(struct sampler *, const float *logits);

#endif
