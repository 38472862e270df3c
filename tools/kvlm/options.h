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
        DEVICE_NONE,  /* the CPU */
        DEVICE_GIVEN, /* a GPU: options.ordinal, or if that is -1, the pool's or else the first */
};

struct options {
        const char *model;
        const char *socket, *variant; /* NULL for the default */
        char space[64];
        bool share;

        /* the input: exactly one of these */
        const char *prompts, *text, *tokens, *tokenize;

        const char *document, *logits; /* NULL: none */
        char *stop;
        enum kvd_number kv_type;
        const char *kv_word; /* its word on the command line */
        uint32_t max_tokens, chunk, threads;
        /* number of last tokens of a prompt that are computed one by one, as if generated */
        uint32_t decode_tail;
        enum use_device use_device;
        struct device_options device;
        struct sampling sampling;
        bool verify, json, progress;
        struct pooled_options pooled;
        struct diffuse_options diffuse; /* for bidirectional models */
        /* with token ids and a bidirectional model: number of leading tokens that are shared */
        uint32_t prefix;
        const char *table, *profile_out; /* NULL: none */
};

/* 1: continue; 0: --help or --version was printed; -EINVAL: wrong usage, described by refusal(). */
int options_parse(int argc, char **argv, struct options *ret);
void options_release(struct options *);

#endif
