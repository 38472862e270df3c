/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DEVICE_OPTIONS_H
#define KVLM_DEVICE_OPTIONS_H

#include "tools/kvlm/device.h"

enum use_device {
        DEVICE_AUTO,  /* where the pool is */
        DEVICE_NONE,  /* the processor */
        DEVICE_GIVEN, /* a GPU: options.ordinal, or if that is -1 the pool's, or else the first */
};

struct device_choice {
        enum use_device use;
        struct device_options options;
};

#define DEVICE_DEFAULTS {.options.ordinal = -1}

#define DEVICE_OPTIONS(value) \
        {"device", required_argument, NULL, value}, \
        {"matmul", required_argument, NULL, value}, \
        {"decode", required_argument, NULL, value}

#define DEVICE_HELP \
        "  --device WHERE       cpu, cuda or cuda:N; auto (default): where the daemon's pool is\n" \
        "  --matmul TYPE        on a GPU: weights and products in f32 (default), tf32 or bf16\n" \
        "  --decode HOW         on a GPU: fast (default), or exact: what is generated has the bits of a prompt\n"

int device_option(struct device_choice *, const char *name, const char *value); /* -EINVAL */

#endif
