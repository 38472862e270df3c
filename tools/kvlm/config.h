/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_CONFIG_H
#define KVLM_CONFIG_H

/* The checked contents of config.json of a model with the Llama architecture. */

#include <stdbool.h>
#include <stdint.h>

#include "tools/kvlm/file.h"

struct config {
        uint32_t layers, hidden, ffn;
        uint32_t heads, kv_heads, head_dim; /* kv_heads divides heads, head_dim is even */
        uint32_t vocab, max_positions;
        float norm_eps, rope_theta;
        bool tied;           /* the embedding is also the output matrix */
        bool bidirectional;  /* masked diffusion: every token sees every other */
        uint32_t mask_token; /* of a bidirectional model: stands for an unknown token */
};

int config_read(const struct mapping *file, struct config *ret);

#endif
