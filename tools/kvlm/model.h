/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_MODEL_H
#define KVLM_MODEL_H

/*
 * A model in memory: matrices packed for the kernels (kernels/ops.h), vectors unpacked, all
 * float32. Matrices with the same input are joined into one: q, k and v, one below the other, and
 * gate and up.
 */

#include "kernels/ops.h"
#include "tools/kvlm/config.h"

struct layer {
        const float *attention_norm, *ffn_norm;
        const float *qkv, *output, *gate_up, *down;
};

struct model {
        struct config config;
        uint64_t fingerprint[2]; /* of weights and configuration */
        float *weights;          /* contains all of the following */
        struct layer *layers;
        const float *embedding, *norm;
        const float *head; /* packed */
};

int model_load(const char *directory, const struct kvd_ops *ops, struct model **ret);
struct model *model_free(struct model *);
/* frees the weights once they are copied elsewhere; keeps the configuration */
void model_drop_weights(struct model *);

#endif
