/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_GENERATE_H
#define KVLM_GENERATE_H

/* Runs one request from tokens to text, and verifies what it reused. */

#include <signal.h>
#include <stdio.h>

#include "tools/kvlm/cache.h"
#include "tools/kvlm/device_forward.h"
#include "tools/kvlm/forward.h"
#include "tools/kvlm/pooled.h"
#include "tools/kvlm/sample.h"
#include "tools/kvlm/tokenizer.h"

struct engine {
        const struct model *model;
        const struct kvd_ops *ops;
        const struct tokenizer *tokenizer;
        struct pass *pass;     /* NULL if the device computes */
        struct device *device; /* NULL if none: blocks are in host memory */
        struct device_forward *device_forward;
        struct cache *cache;
        struct sampler *sampler;
        struct block_shape shape;
        const volatile sig_atomic_t *interrupted;

        uint32_t chunk;
        uint32_t max_tokens;
        const char *stop; /* ends the text and is not part of it; "": none */
        bool verify;
        bool progress;
        uint32_t decode_tail; /* number of last tokens of a prompt that are computed one by one */
        const struct pooled_options *pooled;
};

struct request {
        const uint32_t *tokens;
        uint32_t n_tokens;
        FILE *logits; /* NULL, or receives the logits of every token; then nothing is generated */
};

struct result {
        char *text;
        size_t text_size;
        uint32_t prompt_tokens, reused_tokens, generated_tokens;
        uint32_t shared_blocks, private_blocks, refused;
        double ttft_ms, total_ms;
        /*
         * Time in attention of the first thread: for the prompt's chunks, and for decoded_tokens,
         * including selection and waiting. 0 on a GPU, where it is not measured.
         */
        double prompt_attention_ms, attention_ms;
        uint32_t decoded_tokens; /* computed one by one: generated, and the prompt's tail */
        uint64_t verified_bytes, wrong_bytes;
        struct pooled_stats pooled;
};

/* -EINTR if interrupted */
int generate(const struct engine *, const struct request *, struct result *ret);
void result_release(struct result *);

#endif
