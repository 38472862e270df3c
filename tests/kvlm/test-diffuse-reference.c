/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/kvlm/test-diffuse.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/kvlm/reference.h"

const struct random_model *diffusion_model(const char *name, const struct shape *shape,
                                           uint32_t seed) {
        const struct random_model *m = folder_model(name, shape, seed);
        char path[128], text[1024];

        snprintf(path, sizeof path, "%s/config.json", name);
        snprintf(text, sizeof text,
                 "{\"model_type\": \"kvlm_diffusion\", \"attention\": \"bidirectional\", "
                 "\"mask_token_id\": %d,\n"
                 "\"num_hidden_layers\": %u, \"hidden_size\": %u, \"num_attention_heads\": %u,\n"
                 "\"num_key_value_heads\": %u, \"head_dim\": %u, \"intermediate_size\": %u, "
                 "\"vocab_size\": %u,\n"
                 "\"max_position_embeddings\": 4096, \"rms_norm_eps\": 1e-5, \"rope_theta\": "
                 "10000.0,\n"
                 "\"tie_word_embeddings\": %s}\n",
                 MASK, shape->layers, shape->hidden, shape->heads, shape->kv_heads, shape->head_dim,
                 shape->ffn, shape->vocab, shape->tied ? "true" : "false");
        folder_write_text(path, text);
        return m;
}

/*
 * Fixes the masked position whose best token is the most certain. Called repeatedly with the same
 * logits.
 */
static void fix_one(const struct denoising *d, const double *logits, const uint32_t *before,
                    uint32_t *region) {
        uint32_t vocab = d->m->shape.vocab, where = UINT32_MAX, what = 0;
        double surest = -INFINITY;

        for (uint32_t i = 0; i < d->length; i++) {
                const double *row = logits + i * vocab;
                uint32_t best = 0;
                double others = 0.0;

                if (before[i] != MASK || region[i] != MASK)
                        continue;
                for (uint32_t t = 0; t < vocab; t++)
                        best = t != MASK && row[t] > row[best] ? t : best;
                for (uint32_t t = 0; t < vocab; t++)
                        others += t != MASK && t != best ? exp(row[t] - row[best]) : 0.0;
                if (-log(others) > surest) {
                        surest = -log(others);
                        where = i;
                        what = best;
                }
        }
        region[where] = what;
}

static void fix_tokens(const struct denoising *d, uint32_t i, const double *logits,
                       uint32_t *region) {
        uint32_t n = d->length / d->steps + (i < d->length % d->steps);
        uint32_t *before = folder_memory(d->length * sizeof *before);

        memcpy(before, region, d->length * sizeof *before);
        while (n-- > 0)
                fix_one(d, logits, before, region);
}

/* Computes step i, from 0. states: the prefix's hidden states after layer b. */
static void compute(struct reference *s, const struct denoising *d, const uint32_t *tokens,
                    uint32_t i, const double *states) {
        uint32_t n_layers = d->m->shape.layers, m = d->n_prefix;

        if (d->b == 0) {
                reference_embed(s, tokens, 0, s->n);
                reference_layers(s, 0, n_layers, 0, s->n, s->n);
                return;
        }
        reference_embed(s, tokens, m, s->n);
        if (i % d->delta != 0) {
                reference_layers(s, 0, n_layers, m, s->n, s->n);
                return;
        }
        reference_layers(s, 0, d->b, m, s->n, s->n);
        memcpy(s->x, states, sizeof *states * m * d->m->shape.hidden);
        reference_layers(s, d->b, n_layers, 0, s->n, s->n);
}

/*
 * Computes the prefix alone: fills keys and values of the first b layers, and returns the hidden
 * states.
 */
static double *prefix_states(struct reference *s, const struct denoising *d) {
        size_t bytes = sizeof *s->x * d->n_prefix * d->m->shape.hidden;
        double *states = folder_memory(bytes);

        reference_embed(s, d->tokens, 0, d->n_prefix);
        reference_layers(s, 0, d->b, 0, d->n_prefix, d->n_prefix);
        return memcpy(states, s->x, bytes);
}

static uint32_t *masked_tokens(const struct denoising *d) {
        uint32_t *tokens = folder_memory((d->n + d->length) * sizeof *tokens);

        memcpy(tokens, d->tokens, d->n * sizeof *tokens);
        for (uint32_t i = 0; i < d->length; i++)
                tokens[d->n + i] = MASK;
        return tokens;
}

struct denoised reference_denoise(const struct denoising *d) {
        struct reference s = reference_new(d->m, d->n + d->length, false);
        size_t numbers = (size_t)d->length * d->m->shape.vocab;
        uint32_t *tokens = masked_tokens(d);
        struct denoised result = {folder_memory(sizeof(double) * numbers * d->steps),
                                  tokens + d->n};
        double *states = NULL;

        if (d->b > 0)
                states = prefix_states(&s, d);
        for (uint32_t i = 0; i < d->steps; i++) {
                compute(&s, d, tokens, i, states);
                memcpy(result.logits + i * numbers, reference_logits(&s, d->n),
                       numbers * sizeof(double));
                fix_tokens(d, i, result.logits + i * numbers, result.tokens);
        }
        return result;
}

/* ---- similarities ---- */

static double cosine(const double *a, const double *b, size_t n) {
        double ab = 0.0, aa = 0.0, bb = 0.0;

        for (size_t i = 0; i < n; i++) {
                ab += a[i] * b[i];
                aa += a[i] * a[i];
                bb += b[i] * b[i];
        }
        return ab / sqrt(aa * bb);
}

/* Joins keys and values into one vector. */
static double *joined(const double *k, const double *v, size_t n) {
        double *both = folder_memory(2 * n * sizeof *both);

        memcpy(both, k, n * sizeof *k);
        memcpy(both + n, v, n * sizeof *v);
        return both;
}

struct similarity reference_similarity(const struct denoising *d) {
        struct reference alone = reference_new(d->m, d->n + d->length, false),
                         whole = reference_new(d->m, d->n + d->length, false);
        uint32_t width = d->m->shape.kv_heads * d->m->shape.head_dim, m = d->n_prefix,
                 n_layers = d->m->shape.layers;
        size_t n = (size_t)m * width;
        struct similarity result = {0};

        reference_embed(&alone, d->tokens, 0, m);
        reference_layers(&alone, 0, n_layers, 0, m, m);
        reference_embed(&whole, masked_tokens(d), 0, whole.n);
        reference_layers(&whole, 0, n_layers, 0, whole.n, whole.n);
        for (uint32_t l = 0; l < n_layers; l++) {
                result.flat[l] = cosine(joined(alone.k[l], alone.v[l], n),
                                        joined(whole.k[l], whole.v[l], n), 2 * n);
                for (uint32_t i = 0; i < m; i++)
                        result.token_mean[l] +=
                                (cosine(alone.k[l] + i * width, whole.k[l] + i * width, width) +
                                 cosine(alone.v[l] + i * width, whole.v[l] + i * width, width)) /
                                (2.0 * m);
        }
        return result;
}
