/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Loads a model by running the same list of weights twice: first to add up their memory, then to
 * fill it. A loader without memory only counts.
 */

#include "tools/kvlm/model.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"
#include "tools/kvlm/safetensors.h"

enum { ROWS_AT_ONCE = 16 };

struct loader {
        const struct kvd_ops *ops;
        const struct safetensors *file;
        float *memory; /* NULL: only count */
        float *rows;   /* ROWS_AT_ONCE rows of the widest matrix */
        size_t used;   /* floats */
        int layer;     /* layer whose tensors are read; -1: the model's own */
};

/* Memory for n floats, aligned to a cache line. */
static float *take(struct loader *l, size_t n) {
        float *at = l->memory ? l->memory + l->used : NULL;

        l->used += ALIGN_UP(n, 64 / sizeof(float));
        return at;
}

static int find(const struct loader *l, const char *name, uint32_t rows, uint32_t columns,
                struct tensor *ret) {
        char full[128];

        if (l->layer < 0)
                snprintf(full, sizeof full, "%s.weight", name);
        else
                snprintf(full, sizeof full, "model.layers.%d.%s.weight", l->layer, name);
        return safetensors_find(l->file, full, rows, columns, ret);
}

/* Loads a tensor without packing; rows 0: a vector. */
static int load_plain(struct loader *l, const char *name, uint32_t rows, uint32_t columns,
                      const float **ret) {
        float *to = take(l, (size_t)MAX(rows, 1) * columns);
        struct tensor t;
        int r = find(l, name, rows, columns, &t);

        if (r == 0 && to)
                tensor_read(&t, l->ops, 0, t.rows, to);
        *ret = to;
        return r;
}

static int pack(struct loader *l, const char *name, uint32_t rows, uint32_t columns, float *to,
                uint32_t first) {
        struct tensor t;
        int r = find(l, name, rows, columns, &t);

        for (uint32_t i = 0, n; r == 0 && to && i < rows; i += n) {
                n = MIN(ROWS_AT_ONCE, rows - i);
                tensor_read(&t, l->ops, i, n, l->rows);
                l->ops->pack(to, first + i, l->rows, columns, n, columns);
        }
        return r;
}

struct part {
        const char *name;
        uint32_t rows;
};

/* Packs matrices of equal width into one, one below the other. */
static int load_packed(struct loader *l, uint32_t columns, uint32_t n, const struct part *parts,
                       const float **ret) {
        uint32_t rows = 0;
        float *to;

        for (uint32_t i = 0; i < n; i++)
                rows += parts[i].rows;
        *ret = to = take(l, kvd_packed_floats(rows, columns));
        rows = 0;
        for (uint32_t i = 0; i < n; i++) {
                int r = pack(l, parts[i].name, parts[i].rows, columns, to, rows);

                if (r < 0)
                        return r;
                rows += parts[i].rows;
        }
        return 0;
}

static int load_layer(struct loader *l, const struct config *c, struct layer *layer) {
        const uint32_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
        const struct part qkv[] = {{"self_attn.q_proj", q},
                                   {"self_attn.k_proj", kv},
                                   {"self_attn.v_proj", kv}};
        const struct part output = {"self_attn.o_proj", c->hidden},
                          down = {"mlp.down_proj", c->hidden};
        const struct part gate_up[] = {{"mlp.gate_proj", c->ffn}, {"mlp.up_proj", c->ffn}};
        int r;

        r = load_plain(l, "input_layernorm", 0, c->hidden, &layer->attention_norm);
        if (r < 0)
                return r;
        r = load_packed(l, c->hidden, 3, qkv, &layer->qkv);
        if (r < 0)
                return r;
        r = load_packed(l, q, 1, &output, &layer->output);
        if (r < 0)
                return r;
        r = load_plain(l, "post_attention_layernorm", 0, c->hidden, &layer->ffn_norm);
        if (r < 0)
                return r;
        r = load_packed(l, c->hidden, 2, gate_up, &layer->gate_up);
        if (r < 0)
                return r;
        return load_packed(l, c->ffn, 1, &down, &layer->down);
}

static int load_weights(struct loader *l, struct model *m) {
        const struct config *c = &m->config;
        const struct part head = {c->tied ? "model.embed_tokens" : "lm_head", c->vocab};
        int r;

        l->used = 0;
        l->layer = -1;
        r = load_plain(l, "model.embed_tokens", c->vocab, c->hidden, &m->embedding);
        if (r < 0)
                return r;
        r = load_plain(l, "model.norm", 0, c->hidden, &m->norm);
        if (r < 0)
                return r;
        r = load_packed(l, c->hidden, 1, &head, &m->head);
        for (l->layer = 0; r == 0 && l->layer < (int)c->layers; l->layer++)
                r = load_layer(l, c, m->layers + l->layer);
        return r;
}

static int allocate(struct loader *l, struct model *m) {
        const struct config *c = &m->config;
        size_t widest = MAX(MAX(c->hidden, c->ffn), c->heads * c->head_dim);

        l->memory = aligned_alloc(64, l->used * sizeof(float));
        l->rows = malloc(ROWS_AT_ONCE * widest * sizeof(float));
        m->weights = l->memory;
        if (!l->memory || !l->rows)
                return refuse(-ENOMEM, "out of memory for a model of %zu MiB",
                              l->used * sizeof(float) >> 20);
        memset(l->memory, 0, l->used * sizeof(float)); /* panels may exceed a matrix's rows */
        return 0;
}

static void take_fingerprint(struct model *m, const struct mapping *weights,
                             const struct mapping *config) {
        XXH3_state_t state;
        XXH128_hash_t hash;

        XXH3_128bits_reset(&state);
        XXH3_128bits_update(&state, weights->data, weights->size);
        XXH3_128bits_update(&state, config->data, config->size);
        hash = XXH3_128bits_digest(&state);
        m->fingerprint[0] = hash.low64;
        m->fingerprint[1] = hash.high64;
}

static int load(struct model *m, const char *directory, const struct kvd_ops *ops,
                struct safetensors *file) {
        struct loader l = {.ops = ops, .file = file};
        struct mapping config = {0};
        int r = map_file(directory, "config.json", &config);

        if (r < 0)
                return r;
        r = config_read(&config, &m->config);
        if (r == 0)
                r = safetensors_open(directory, file);
        if (r == 0)
                take_fingerprint(m, &file->file, &config);
        unmap(&config);
        if (r < 0)
                return r;

        m->layers = calloc(m->config.layers, sizeof *m->layers);
        if (!m->layers)
                return refuse(-ENOMEM, "out of memory");
        r = load_weights(&l, m);
        if (r == 0)
                r = allocate(&l, m);
        if (r == 0)
                r = load_weights(&l, m);
        free(l.rows);
        return r;
}

int model_load(const char *directory, const struct kvd_ops *ops, struct model **ret) {
        struct model *m = calloc(1, sizeof *m);
        struct safetensors file = {0};
        int r = m ? load(m, directory, ops, &file) : refuse(-ENOMEM, "out of memory");

        safetensors_close(&file);
        if (r < 0) {
                model_free(m);
                return r;
        }
        *ret = m;
        return 0;
}

void model_drop_weights(struct model *m) {
        free(m->layers);
        free(m->weights);
        *m = (struct model){.config = m->config,
                            .fingerprint = {m->fingerprint[0], m->fingerprint[1]}};
}

struct model *model_free(struct model *m) {
        if (!m)
                return NULL;
        free(m->layers);
        free(m->weights);
        free(m);
        return NULL;
}
