/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLM_GENERATE_H
#define KVLM_GENERATE_H

/* One request from tokens to text, and the proof that what it reused was right. */

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
        struct pass *pass; /* NULL: the device computes */
        struct device *device;   /* NULL: there is none, and blocks are in host memory */
        struct device_forward *device_forward;
        struct cache *cache;
        struct sampler *sampler;
        struct block_shape shape;
        const volatile sig_atomic_t *interrupted;

        uint32_t chunk;
        uint32_t max_tokens;
        const char *stop; /* ends the text and is not part of it; "": nothing does */
        bool verify;
        bool progress;
        uint32_t decode_tail; /* last tokens of a prompt that are computed one by one */
        const struct pooled_options *pooled;
};

struct request {
        const uint32_t *tokens;
        uint32_t n_tokens;
        FILE *logits; /* NULL, or where the logits of every token go; then nothing is generated */
};

struct result {
        char *text;
        size_t text_size;
        uint32_t prompt_tokens, reused_tokens, generated_tokens;
        uint32_t shared_blocks, private_blocks, refused;
        double ttft_ms, total_ms;
        double prompt_attention_ms,
                attention_ms; /* by the first thread: of the prompt's chunks, and of decoded_tokens,
                                 selection and waiting included. Not measured on a GPU: 0 */
        uint32_t decoded_tokens; /* computed one by one: generated ones, and the prompt's tail */
        uint64_t verified_bytes, wrong_bytes;
        struct pooled_stats pooled;
};

/* -EINTR: interrupted */
int generate(const struct engine *, const struct request *, struct result *ret);
void result_release(struct result *);

#endif
