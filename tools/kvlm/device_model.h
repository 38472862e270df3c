/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DEVICE_MODEL_H
#define KVLM_DEVICE_MODEL_H

/*
 * A model on a GPU: matrices row by row ([out][in], of device_number()), vectors in fp32. Has the
 * same members as struct model, with the same matrices joined.
 */

#include "tools/kvlm/device.h"
#include "tools/kvlm/model.h"

struct device_layer {
        cu_address attention_norm, ffn_norm;
        cu_address qkv, output, gate_up, down;
};

struct device_model {
        struct config config;
        struct device_layer *layers;
        cu_address weights; /* contains all weights */
        uint64_t bytes;
        cu_address embedding, norm, head;
};

/* Copies all weights, and waits. -ENOMEM if they do not fit. */
int device_model_new(struct device *, const struct model *, struct device_model **ret);
struct device_model *device_model_free(struct device *, struct device_model *);

#endif
