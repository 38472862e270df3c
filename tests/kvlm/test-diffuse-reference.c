/* SPDX-License-Identifier: Apache-2.0 */

#include "tests/kvlm/test-diffuse.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct state {
        const struct denoising *d;
        uint32_t n;           /* prompt and region */
        double *x;            /* [n][hidden] */
        double *k[16], *v[16]; /* per layer: [n][kv_heads * head_dim] */
};

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

/* ---- one layer, rows [from, to) ---- */

static const float *weights(const struct state *s, uint32_t layer, const char *name) {
        return model_weights(s->d->m, "model.layers.%u.%s.weight", layer, name);
}

static double *multiply(const float *matrix, const double *x, uint32_t n, uint32_t n_in,
                        uint32_t n_out) {
        double *y = folder_memory(sizeof *y * n * n_out);

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t o = 0; o < n_out; o++)
                        for (uint32_t j = 0; j < n_in; j++)
                                y[i * n_out + o] += (double)matrix[o * n_in + j] * x[i * n_in + j];
        return y;
}

static double *norm(const float *w, const double *x, uint32_t n, uint32_t hidden) {
        double *y = folder_memory(sizeof *y * n * hidden);

        for (uint32_t i = 0; i < n; i++) {
                double squares = 0.0;

                for (uint32_t j = 0; j < hidden; j++)
                        squares += x[i * hidden + j] * x[i * hidden + j];
                for (uint32_t j = 0; j < hidden; j++)
                        y[i * hidden + j] = x[i * hidden + j] / sqrt(squares / hidden + 1e-5) *
                                            (double)w[j];
        }
        return y;
}

static void rotate(double *x, uint32_t first, uint32_t n, uint32_t heads, uint32_t dim) {
        for (uint32_t i = 0; i < n * heads; i++)
                for (uint32_t j = 0; j < dim / 2; j++) {
                        double angle = (first + i / heads) / pow(10000.0, 2.0 * j / dim);
                        double low = x[i * dim + j], high = x[i * dim + j + dim / 2];

                        x[i * dim + j] = low * cos(angle) - high * sin(angle);
                        x[i * dim + j + dim / 2] = high * cos(angle) + low * sin(angle);
                }
}

/* Attention in which every row sees all keys. */
static double *attend(const struct state *s, uint32_t layer, const double *q, uint32_t n,
                      uint32_t n_keys) {
        const struct shape *p = &s->d->m->shape;
        uint32_t dim = p->head_dim, q_width = p->heads * dim, kv_width = p->kv_heads * dim;
        double *y = folder_memory(sizeof *y * n * q_width),
               *weight = folder_memory(sizeof *y * n_keys);

        for (uint32_t i = 0; i < n * p->heads; i++) {
                uint32_t head = i % p->heads, at = head / (p->heads / p->kv_heads) * dim;
                const double *query = q + i / p->heads * q_width + head * dim;
                double total = 0.0;

                for (uint32_t j = 0; j < n_keys; j++) {
                        double dot = 0.0;

                        for (uint32_t e = 0; e < dim; e++)
                                dot += query[e] * s->k[layer][j * kv_width + at + e];
                        weight[j] = exp(dot / sqrt(dim));
                        total += weight[j];
                }
                for (uint32_t j = 0; j < n_keys; j++)
                        for (uint32_t e = 0; e < dim; e++)
                                y[i * dim + e] += weight[j] / total *
                                                  s->v[layer][j * kv_width + at + e];
        }
        return y;
}

static void add(double *x, const double *change, size_t n) {
        for (size_t i = 0; i < n; i++)
                x[i] += change[i];
}

static void attention_part(struct state *s, uint32_t layer, uint32_t from, uint32_t to,
                           uint32_t n_keys) {
        const struct shape *p = &s->d->m->shape;
        uint32_t n = to - from, q_width = p->heads * p->head_dim,
                 kv_width = p->kv_heads * p->head_dim;
        double *x = s->x + from * p->hidden;
        double *y = norm(weights(s, layer, "input_layernorm"), x, n, p->hidden);
        double *q = multiply(weights(s, layer, "self_attn.q_proj"), y, n, p->hidden, q_width);
        double *k = multiply(weights(s, layer, "self_attn.k_proj"), y, n, p->hidden, kv_width);
        double *v = multiply(weights(s, layer, "self_attn.v_proj"), y, n, p->hidden, kv_width);

        rotate(q, from, n, p->heads, p->head_dim);
        rotate(k, from, n, p->kv_heads, p->head_dim);
        memcpy(s->k[layer] + from * kv_width, k, sizeof *k * n * kv_width);
        memcpy(s->v[layer] + from * kv_width, v, sizeof *v * n * kv_width);
        y = attend(s, layer, q, n, n_keys);
        add(x, multiply(weights(s, layer, "self_attn.o_proj"), y, n, q_width, p->hidden),
            (size_t)n * p->hidden);
}

static void ffn_part(struct state *s, uint32_t layer, uint32_t from, uint32_t to) {
        const struct shape *p = &s->d->m->shape;
        uint32_t n = to - from;
        double *x = s->x + from * p->hidden;
        double *y = norm(weights(s, layer, "post_attention_layernorm"), x, n, p->hidden);
        double *gate = multiply(weights(s, layer, "mlp.gate_proj"), y, n, p->hidden, p->ffn);
        double *up = multiply(weights(s, layer, "mlp.up_proj"), y, n, p->hidden, p->ffn);

        for (uint32_t i = 0; i < n * p->ffn; i++)
                gate[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i];
        add(x, multiply(weights(s, layer, "mlp.down_proj"), gate, n, p->ffn, p->hidden),
            (size_t)n * p->hidden);
}

static void layers(struct state *s, uint32_t layer, uint32_t end, uint32_t from, uint32_t to,
                   uint32_t n_keys) {
        for (; layer < end; layer++) {
                attention_part(s, layer, from, to, n_keys);
                ffn_part(s, layer, from, to);
        }
}

static void embed(struct state *s, const uint32_t *tokens, uint32_t from, uint32_t to) {
        const float *embedding = model_weights(s->d->m, "model.embed_tokens.weight");
        uint32_t hidden = s->d->m->shape.hidden;

        for (uint32_t i = from; i < to; i++)
                for (uint32_t j = 0; j < hidden; j++)
                        s->x[i * hidden + j] = (double)embedding[tokens[i] * hidden + j];
}

/* ---- the loop ---- */

static double *region_logits(const struct state *s) {
        const struct random_model *m = s->d->m;
        const double *x = s->x + s->d->n * m->shape.hidden;

        return multiply(model_weights(m, m->shape.tied ? "model.embed_tokens.weight" :
                                                         "lm_head.weight"),
                        norm(model_weights(m, "model.norm.weight"), x, s->d->length,
                             m->shape.hidden),
                        s->d->length, m->shape.hidden, m->shape.vocab);
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
static void compute(struct state *s, const uint32_t *tokens, uint32_t i, const double *states) {
        const struct denoising *d = s->d;
        uint32_t n_layers = d->m->shape.layers, m = d->n_prefix;

        if (d->b == 0) {
                embed(s, tokens, 0, s->n);
                layers(s, 0, n_layers, 0, s->n, s->n);
                return;
        }
        embed(s, tokens, m, s->n);
        if (i % d->delta != 0) {
                layers(s, 0, n_layers, m, s->n, s->n);
                return;
        }
        layers(s, 0, d->b, m, s->n, s->n);
        memcpy(s->x, states, sizeof *states * m * d->m->shape.hidden);
        layers(s, d->b, n_layers, 0, s->n, s->n);
}

/*
 * Computes the prefix alone: fills keys and values of the first b layers, and returns the hidden
 * states.
 */
static double *prefix_states(struct state *s) {
        size_t bytes = sizeof *s->x * s->d->n_prefix * s->d->m->shape.hidden;
        double *states = folder_memory(bytes);

        embed(s, s->d->tokens, 0, s->d->n_prefix);
        layers(s, 0, s->d->b, 0, s->d->n_prefix, s->d->n_prefix);
        return memcpy(states, s->x, bytes);
}

static struct state state_new(const struct denoising *d) {
        const struct shape *p = &d->m->shape;
        struct state s = {.d = d, .n = d->n + d->length};

        s.x = folder_memory(sizeof *s.x * s.n * p->hidden);
        for (uint32_t l = 0; l < p->layers; l++) {
                s.k[l] = folder_memory(sizeof *s.x * s.n * p->kv_heads * p->head_dim);
                s.v[l] = folder_memory(sizeof *s.x * s.n * p->kv_heads * p->head_dim);
        }
        return s;
}

static uint32_t *masked_tokens(const struct denoising *d) {
        uint32_t *tokens = folder_memory((d->n + d->length) * sizeof *tokens);

        memcpy(tokens, d->tokens, d->n * sizeof *tokens);
        for (uint32_t i = 0; i < d->length; i++)
                tokens[d->n + i] = MASK;
        return tokens;
}

struct denoised reference_denoise(const struct denoising *d) {
        struct state s = state_new(d);
        size_t numbers = (size_t)d->length * d->m->shape.vocab;
        uint32_t *tokens = masked_tokens(d);
        struct denoised result = {folder_memory(sizeof(double) * numbers * d->steps),
                                  tokens + d->n};
        double *states = NULL;

        if (d->b > 0)
                states = prefix_states(&s);
        for (uint32_t i = 0; i < d->steps; i++) {
                compute(&s, tokens, i, states);
                memcpy(result.logits + i * numbers, region_logits(&s), numbers * sizeof(double));
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
        struct state alone = state_new(d), whole = state_new(d);
        uint32_t width = d->m->shape.kv_heads * d->m->shape.head_dim, m = d->n_prefix,
                 n_layers = d->m->shape.layers;
        size_t n = (size_t)m * width;
        struct similarity result = {0};

        embed(&alone, d->tokens, 0, m);
        layers(&alone, 0, n_layers, 0, m, m);
        embed(&whole, masked_tokens(d), 0, whole.n);
        layers(&whole, 0, n_layers, 0, whole.n, whole.n);
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
