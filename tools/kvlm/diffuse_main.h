/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DIFFUSE_MAIN_H
#define KVLM_DIFFUSE_MAIN_H

/* Answers all prompts of a run with a bidirectional model. */

#include <signal.h>
#include <stdio.h>

#include "tools/kvlm/model.h"
#include "tools/kvlm/options.h"
#include "tools/kvlm/prompts.h"
#include "tools/kvlm/tokenizer.h"

enum { DIFFUSE_BLOCK_TOKENS = 16 };

struct diffuse_parts { /* the parts that main has already set up */
        const struct options *options;
        const struct kvd_ops *ops;
        const struct model *model;
        const struct tokenizer *tokenizer;
        struct prompts *prompts;
        FILE *logits; /* NULL if none */
        uint64_t fingerprint[2];
        const volatile sig_atomic_t *interrupted;
};

/* 0, or 1 if some prompt failed; -EINTR, or an error that ends the run. */
int diffuse_all(const struct diffuse_parts *);

#endif
