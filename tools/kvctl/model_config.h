/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_MODEL_CONFIG_H
#define KVCTL_MODEL_CONFIG_H

/* The shape of a model's cache, from a config.json as Hugging Face transformers writes it. */

#include "ipc/base/why.h"

struct model_config {
        char type[40]; /* model_type; empty if missing */
        uint32_t layers, kv_heads, head_dim;
        uint32_t dtype; /* KVD_dtype_*; 0 if missing, or if no space has that type */
};

/*
 * path: the file, or its folder. 0; -EOPNOTSUPP for a cache that no engine shares through kvd
 * (sliding windows, recurrent layers, latent attention); -EINVAL if it cannot be read.
 */
int model_config_read(const char *path, struct model_config *ret, struct kvd_why *why);

#endif
