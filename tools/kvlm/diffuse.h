/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DIFFUSE_H
#define KVLM_DIFFUSE_H

/*
 * One request to a masked-diffusion model: turns a prompt and a region of masks into text.
 */

#include <signal.h>
#include <stdio.h>

#include "kernels/btable.h"
#include "tools/kvlm/entry.h"
#include "tools/kvlm/tokenizer.h"

enum reuse {
        REUSE_SPACE, /* on or off, according to the space's settings */
        REUSE_OFF,   /* compute all layers of the prefix in every step */
        /* reuse all layers for ever, as a causal cache would: the baseline */
        REUSE_NAIVE,
        REUSE_ON, /* reuse shallow layers, recompute deep ones every few steps */
};

struct diffuse_options {
        uint32_t length; /* tokens to generate */
        uint32_t steps;  /* 0: one per token */
        enum reuse reuse;
        uint32_t depth; /* number of shallow layers, overriding the table; 0: see table */
        /* steps from one refresh of the deep layers to the next; 0: the space's setting */
        uint32_t refresh;
        /*
         * profiling: sample each request at every multiple of this percentage; 0: at its prefix
         * only
         */
        uint32_t profile_step;
};

struct diffuser {
        const struct model *model;
        const struct tokenizer *tokenizer;
        const struct kvd_ops *ops;
        struct pass *pass;
        struct cache *cache;
        struct block_shape shape;
        struct diffuse_options options;
        const struct kvd_btable *table; /* NULL: none */
        const char *stop;               /* ends the text and is not part of it; "": none */
        const volatile sig_atomic_t *interrupted;
        bool verify;
};

struct diffuse_request {
        const uint32_t *tokens;
        uint32_t n_tokens, n_prefix; /* n_prefix: leading tokens that are shared */
        /* NULL, or receives the logits of all positions of the answer, [steps][length][vocab] */
        FILE *logits;
};

struct diffuse_result {
        char *text;
        size_t text_size;
        uint32_t *tokens; /* [length] */
        uint32_t length, prompt_tokens, prefix_tokens;
        uint32_t steps, refreshes;
        enum reuse mode;        /* the mode that was used: never REUSE_SPACE */
        uint32_t depth, ratio;  /* b, and r in percent */
        uint32_t found, made;   /* layers of the entry that were found, and made */
        uint32_t reused_tokens; /* tokens of the prefix whose shallow layers were found */
        bool refused;           /* the pool or the daemon failed us */
        uint64_t shared_bytes, private_bytes; /* of the part of the entry that was used */
        uint64_t deep_bytes;                  /* the request's own keys and values of the prefix */
        uint64_t verified_bytes, wrong_bytes;
        double entry_ms, total_ms; /* time until the entry was ready, and until the end */
};

/*
 * What the prefix ratio is a fraction of: that of the table in use, or of the space (NULL if there
 * is none).
 */
enum kvd_ratio diffuse_ratio(const struct diffuser *, kvd_space *);

/* -EINVAL or -E2BIG if the request does not suit this model and these options. */
int diffuse_check(const struct diffuser *, const struct diffuse_request *);

/* -EINTR */
int diffuse(const struct diffuser *, const struct diffuse_request *, struct diffuse_result *ret);
void diffuse_result_release(struct diffuse_result *);

#endif
