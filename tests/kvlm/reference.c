/* SPDX-License-Identifier: Apache-2.0 */

/* A Llama model straight from its definition: the reference for kvlm's logits. */

#include "tests/kvlm/reference.h"

#include <math.h>
#include <string.h>

static const float *weights(const struct reference *s, uint32_t layer, const char *name) {
        return model_weights(s->m, "model.layers.%u.%s.weight", layer, name);
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

/* Attention of n rows from row from on. */
static double *attend(const struct reference *s, uint32_t layer, const double *q, uint32_t from,
                      uint32_t n, uint32_t n_keys) {
        const struct shape *p = &s->m->shape;
        uint32_t dim = p->head_dim, q_width = p->heads * dim, kv_width = p->kv_heads * dim;
        double *y = folder_memory(sizeof *y * n * q_width),
               *weight = folder_memory(sizeof *y * n_keys);

        for (uint32_t i = 0; i < n * p->heads; i++) {
                uint32_t head = i % p->heads, at = head / (p->heads / p->kv_heads) * dim;
                const double *query = q + i / p->heads * q_width + head * dim;
                uint32_t seen = s->causal ? from + i / p->heads + 1 : n_keys;
                double total = 0.0;

                for (uint32_t j = 0; j < seen; j++) {
                        double dot = 0.0;

                        for (uint32_t e = 0; e < dim; e++)
                                dot += query[e] * s->k[layer][j * kv_width + at + e];
                        weight[j] = exp(dot / sqrt(dim));
                        total += weight[j];
                }
                for (uint32_t j = 0; j < seen; j++)
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

static void attention_part(struct reference *s, uint32_t layer, uint32_t from, uint32_t to,
                           uint32_t n_keys) {
        const struct shape *p = &s->m->shape;
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
        y = attend(s, layer, q, from, n, n_keys);
        add(x, multiply(weights(s, layer, "self_attn.o_proj"), y, n, q_width, p->hidden),
            (size_t)n * p->hidden);
}

static void ffn_part(struct reference *s, uint32_t layer, uint32_t from, uint32_t to) {
        const struct shape *p = &s->m->shape;
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

void reference_layers(struct reference *s, uint32_t layer, uint32_t end, uint32_t from, uint32_t to,
                      uint32_t n_keys) {
        for (; layer < end; layer++) {
                attention_part(s, layer, from, to, n_keys);
                ffn_part(s, layer, from, to);
        }
}

struct reference reference_new(const struct random_model *m, uint32_t n, bool causal) {
        const struct shape *p = &m->shape;
        struct reference s = {.m = m, .n = n, .causal = causal};

        s.x = folder_memory(sizeof *s.x * n * p->hidden);
        for (uint32_t l = 0; l < p->layers; l++) {
                s.k[l] = folder_memory(sizeof *s.x * n * p->kv_heads * p->head_dim);
                s.v[l] = folder_memory(sizeof *s.x * n * p->kv_heads * p->head_dim);
        }
        return s;
}

void reference_embed(struct reference *s, const uint32_t *tokens, uint32_t from, uint32_t to) {
        const float *embedding = model_weights(s->m, "model.embed_tokens.weight");
        uint32_t hidden = s->m->shape.hidden;

        for (uint32_t i = from; i < to; i++)
                for (uint32_t j = 0; j < hidden; j++)
                        s->x[i * hidden + j] = (double)embedding[tokens[i] * hidden + j];
}

double *reference_logits(const struct reference *s, uint32_t from) {
        const struct shape *p = &s->m->shape;
        const double *x = s->x + from * p->hidden;
        uint32_t n = s->n - from;

        return multiply(model_weights(s->m,
                                      p->tied ? "model.embed_tokens.weight" : "lm_head.weight"),
                        norm(model_weights(s->m, "model.norm.weight"), x, n, p->hidden), n,
                        p->hidden, p->vocab);
}
