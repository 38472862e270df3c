/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A Llama model straight from its definition, in double precision and without a cache: the
 * reference for kvlm's logits.
 */

#include <math.h>
#include <string.h>

#include "tests/kvlm/folder.h"

struct text {
        const struct random_model *m;
        uint32_t n; /* tokens */
};

/* y[t] = matrix x[t] for every token */
static double *multiply(const struct text *t, const float *matrix, const double *x, uint32_t n_in,
                        uint32_t n_out) {
        double *y = folder_memory(sizeof *y * t->n * n_out);

        for (uint32_t i = 0; i < t->n; i++)
                for (uint32_t o = 0; o < n_out; o++)
                        for (uint32_t k = 0; k < n_in; k++)
                                y[i * n_out + o] += (double)matrix[o * n_in + k] * x[i * n_in + k];
        return y;
}

static double *norm(const struct text *t, const float *w, const double *x) {
        uint32_t hidden = t->m->shape.hidden;
        double *y = folder_memory(sizeof *y * t->n * hidden);

        for (uint32_t i = 0; i < t->n; i++) {
                double squares = 0.0;

                for (uint32_t d = 0; d < hidden; d++)
                        squares += x[i * hidden + d] * x[i * hidden + d];
                for (uint32_t d = 0; d < hidden; d++)
                        y[i * hidden + d] = x[i * hidden + d] / sqrt(squares / hidden + 1e-5) *
                                            (double)w[d];
        }
        return y;
}

static void rotate(const struct text *t, double *x, uint32_t heads) {
        uint32_t dim = t->m->shape.head_dim, half = dim / 2;

        for (uint32_t i = 0; i < t->n; i++)
                for (uint32_t h = 0; h < heads; h++)
                        for (uint32_t d = 0; d < half; d++) {
                                double *low = x + (i * heads + h) * dim + d, *high = low + half,
                                       old = *low;
                                double angle = i / pow(10000.0, 2.0 * d / dim);

                                *low = old * cos(angle) - *high * sin(angle);
                                *high = *high * cos(angle) + old * sin(angle);
                        }
}

static double dot(const double *a, const double *b, uint32_t n) {
        double sum = 0.0;

        for (uint32_t i = 0; i < n; i++)
                sum += a[i] * b[i];
        return sum;
}

/* Attention of one query head of token i. */
static void attend_token(const struct text *t, uint32_t i, uint32_t h, const double *q,
                         const double *k, const double *v, double *to) {
        const struct shape *s = &t->m->shape;
        uint32_t kv = h / (s->heads / s->kv_heads);
        double *weight = folder_memory(sizeof *weight * t->n), total = 0.0;

        for (uint32_t j = 0; j <= i; j++) {
                weight[j] = exp(dot(q + (i * s->heads + h) * s->head_dim,
                                    k + (j * s->kv_heads + kv) * s->head_dim, s->head_dim) /
                                sqrt(s->head_dim));
                total += weight[j];
        }
        for (uint32_t j = 0; j <= i; j++)
                for (uint32_t d = 0; d < s->head_dim; d++)
                        to[d] += weight[j] / total * v[(j * s->kv_heads + kv) * s->head_dim + d];
}

static double *attend(const struct text *t, const double *q, const double *k, const double *v) {
        const struct shape *s = &t->m->shape;
        double *y = folder_memory(sizeof *y * t->n * s->heads * s->head_dim);

        for (uint32_t i = 0; i < t->n; i++)
                for (uint32_t h = 0; h < s->heads; h++)
                        attend_token(t, i, h, q, k, v, y + (i * s->heads + h) * s->head_dim);
        return y;
}

static void add(const struct text *t, double *x, const double *change) {
        for (uint32_t i = 0; i < t->n * t->m->shape.hidden; i++)
                x[i] += change[i];
}

static const float *layer_weights(const struct text *t, uint32_t layer, const char *name) {
        return model_weights(t->m, "model.layers.%u.%s.weight", layer, name);
}

static void attention_part(const struct text *t, uint32_t layer, double *x) {
        const struct shape *s = &t->m->shape;
        uint32_t q_width = s->heads * s->head_dim, kv_width = s->kv_heads * s->head_dim;
        double *y = norm(t, layer_weights(t, layer, "input_layernorm"), x);
        double *q = multiply(t, layer_weights(t, layer, "self_attn.q_proj"), y, s->hidden, q_width);
        double *k = multiply(t, layer_weights(t, layer, "self_attn.k_proj"), y, s->hidden,
                             kv_width);
        double *v = multiply(t, layer_weights(t, layer, "self_attn.v_proj"), y, s->hidden,
                             kv_width);

        rotate(t, q, s->heads);
        rotate(t, k, s->kv_heads);
        add(t, x,
            multiply(t, layer_weights(t, layer, "self_attn.o_proj"), attend(t, q, k, v), q_width,
                     s->hidden));
}

static void ffn_part(const struct text *t, uint32_t layer, double *x) {
        const struct shape *s = &t->m->shape;
        double *y = norm(t, layer_weights(t, layer, "post_attention_layernorm"), x);
        double *gate = multiply(t, layer_weights(t, layer, "mlp.gate_proj"), y, s->hidden, s->ffn);
        double *up = multiply(t, layer_weights(t, layer, "mlp.up_proj"), y, s->hidden, s->ffn);

        for (uint32_t i = 0; i < t->n * s->ffn; i++)
                gate[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i];
        add(t, x, multiply(t, layer_weights(t, layer, "mlp.down_proj"), gate, s->ffn, s->hidden));
}

double *reference_logits(const struct random_model *m, const uint32_t *tokens, uint32_t n) {
        const struct shape *s = &m->shape;
        const struct text t = {m, n};
        const float *embedding = model_weights(m, "model.embed_tokens.weight");
        double *x = folder_memory(sizeof *x * n * s->hidden);

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t d = 0; d < s->hidden; d++)
                        x[i * s->hidden + d] = (double)embedding[tokens[i] * s->hidden + d];
        for (uint32_t layer = 0; layer < s->layers; layer++) {
                attention_part(&t, layer, x);
                ffn_part(&t, layer, x);
        }
        return multiply(&t, s->tied ? embedding : model_weights(m, "lm_head.weight"),
                        norm(&t, model_weights(m, "model.norm.weight"), x), s->hidden, s->vocab);
}
