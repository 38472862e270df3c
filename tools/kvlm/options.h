/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_OPTIONS_H
#define KVLM_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "tools/kvlm/device_options.h"
#include "tools/kvlm/diffuse_options.h"
#include "tools/kvlm/methods.h"
#include "tools/kvlm/pooled_options.h"
#include "tools/kvlm/sample.h"

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
        struct device_choice device;
        struct sampling sampling;
        bool verify, json, progress;
        struct diffuse_options diffuse; /* of bidirectional models */
        struct pooled_options pooled;

        const char *method_values[METHOD_NAMES]; /* as given */
        struct methods methods;
};

/* 1: go on; 0: --help or --version was printed; -EINVAL: wrong usage, described by note_line(). */
int options_parse(int argc, char **argv, struct options *ret);
void options_release(struct options *);

#endif
