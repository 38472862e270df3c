/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_DIFFUSE_H
#define KVLM_DIFFUSE_H

/*
 * One request to a masked-diffusion model: from a prompt and a row of masks to text, with or
 * without BiCache.
 */

#include <signal.h>
#include <stdio.h>

#include "tools/kvlm/bicache_entry.h"
#include "tools/kvlm/bicache_table.h"
#include "tools/kvlm/tokenizer.h"

enum bicache_mode {
        BICACHE_SPACE, /* on or off, as the space's settings say */
        BICACHE_OFF,   /* all layers of the prefix are computed in every step */
        /* all are reused for ever, as a causal cache would: what BiCache is compared with */
        BICACHE_NAIVE,
        BICACHE_ON,    /* shallow layers are, deep ones are computed anew now and then */
};

struct diffuse_options {
        uint32_t length; /* tokens to generate */
        uint32_t steps;  /* 0: one a token */
        enum bicache_mode bicache;
        uint32_t depth;  /* instead of a table: so many shallow layers; 0: see table */
        /* steps from one refresh of the deep layers to the next; 0: as the space says */
        uint32_t refresh;
        /* profiling cuts each request at every so many percent; 0: at its own prefix only */
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
        const char *stop;               /* ends the text and is not part of it; "": nothing does */
        const volatile sig_atomic_t *interrupted;
        bool verify;
};

struct diffuse_request {
        const uint32_t *tokens;
        uint32_t n_tokens, n_prefix; /* the first n_prefix of them are shared */
        /* NULL, or where the logits of all positions of the answer go, [steps][length][vocab] */
        FILE *logits;
};

struct diffuse_result {
        char *text;
        size_t text_size;
        uint32_t *tokens; /* [length] */
        uint32_t length, prompt_tokens, prefix_tokens;
        uint32_t steps, refreshes;
        enum bicache_mode mode; /* that was used: not BICACHE_SPACE */
        uint32_t depth, ratio;  /* b, and r in percent */
        uint32_t found, made;   /* layers of the entry */
        uint32_t reused_tokens; /* of the prefix: those whose first layers were there */
        bool refused;           /* the pool or the daemon let us down */
        uint64_t shared_bytes, private_bytes; /* of the entry, as far as it was used */
        uint64_t deep_bytes;                  /* the request's own keys and values of the prefix */
        uint64_t verified_bytes, wrong_bytes;
        double entry_ms, total_ms; /* until the entry was there; until the end */
};

/*
 * What a prefix's share is a share of: as the table at hand was made, or as the space says (NULL:
 * there is none).
 */
enum kvd_ratio diffuse_ratio(const struct diffuser *, kvd_space *);

/* -EINVAL, -E2BIG: the request is none for this model and these options. */
int diffuse_check(const struct diffuser *, const struct diffuse_request *);

/* -EINTR */
int diffuse(const struct diffuser *, const struct diffuse_request *, struct diffuse_result *ret);
void diffuse_result_release(struct diffuse_result *);

#endif
