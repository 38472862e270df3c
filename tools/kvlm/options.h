/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_OPTIONS_H
#define KVLM_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "tools/kvlm/device.h"
#include "tools/kvlm/diffuse.h"
#include "tools/kvlm/pooled.h"
#include "tools/kvlm/sample.h"

enum use_device {
        DEVICE_AUTO,  /* where the pool is */
        DEVICE_NONE,  /* the processor */
        DEVICE_GIVEN, /* a GPU: options.ordinal, or if that is -1 the pool's, or else the first */
};

struct options {
        const char *model;
        const char *socket, *variant; /* NULL: the default */
        char space[64];
        bool share;

        /* what to do: one of these */
        const char *prompts, *text, *tokens, *tokenize;

        const char *document, *logits; /* NULL: none */
        char *stop;
        enum kvd_number kv_type;
        uint32_t max_tokens, chunk, threads;
        /* last tokens of a prompt that are computed one by one, as if they were generated */
        uint32_t decode_tail;
        enum use_device use_device;
        struct device_options device;
        struct sampling sampling;
        bool verify, json, progress;
        struct pooled_options pooled;
        struct diffuse_options diffuse; /* of bidirectional models */
        /* with token ids and a bidirectional model: so many at the beginning are shared */
        uint32_t prefix;
        const char *bicache_table, *profile_out; /* NULL: none */
};

/* 1: go on; 0: --help or --version was printed; -EINVAL: wrong usage, described by refusal(). */
int options_parse(int argc, char **argv, struct options *ret);
void options_release(struct options *);

#endif
