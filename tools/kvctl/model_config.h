/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_MODEL_CONFIG_H
#define KVCTL_MODEL_CONFIG_H

/* What a model's config.json, as Hugging Face transformers writes it, says of its cache. */

#include "ipc/base/why.h"

struct model_config {
        char type[40];  /* model_type; empty: not said */
        uint32_t layers, kv_heads, head_dim;
        uint32_t dtype; /* KVD_dtype_*; 0: not said, or one that no space has */
};

/*
 * path: the file, or the folder that it lies in. -EOPNOTSUPP for a cache that no engine shares by
 * kvd (sliding windows, recurrent layers, latent attention), -EINVAL, -ENOMEM.
 */
int model_config_read(const char *path, struct model_config *ret, struct kvd_why *why);

#endif
