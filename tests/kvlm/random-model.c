/* SPDX-License-Identifier: Apache-2.0 */

/* Writes small models of random weights, as a trainer would. */

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "ipc/base/util.h"
#include "kernels/ops.h"
#include "tests/kvlm/folder.h"
#include "tests/lib/mark.h"

static uint32_t state;

static float random_float(float spread) {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        return (float)((double)state / 2147483648.0 - 1.0) * spread;
}

static enum kvd_number number(const char *type) {
        return strcmp(type, "F32") == 0 ? KVD_NUMBER_F32 :
               strcmp(type, "F16") == 0 ? KVD_NUMBER_F16 :
                                          KVD_NUMBER_BF16;
}

static void add_weights(struct random_model *m, uint32_t rows, uint32_t columns, const char *format,
                        ...) {
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        size_t n = (size_t)MAX(rows, 1) * columns;
        float *data = folder_memory(n * sizeof *data);
        uint16_t *rounded = folder_memory(n * sizeof *rounded);
        char *name = folder_memory(128);
        va_list args;

        va_start(args, format);
        vsnprintf(name, 128, format, args);
        va_end(args);
        /* norms near 1; matrices scaled so that activations neither vanish nor explode */
        for (size_t i = 0; i < n; i++)
                data[i] = rows ? random_float(2.0f / sqrtf((float)columns)) :
                                 1.0f + random_float(0.3f);
        if (number(m->shape.type) != KVD_NUMBER_F32) {
                ops->narrow(rounded, data, n, number(m->shape.type));
                ops->widen(data, rounded, n, number(m->shape.type));
        }
        ck_assert_uint_lt(m->n, ARRAY_SIZE(m->weights));
        m->weights[m->n++] = (struct weights){name, rows, columns, data};
}

static void add_layer(struct random_model *m, uint32_t layer) {
        const struct shape *s = &m->shape;
        const struct {
                const char *name;
                uint32_t rows, columns;
        } parts[] = {
                {"input_layernorm", 0, s->hidden},
                {"self_attn.q_proj", s->heads * s->head_dim, s->hidden},
                {"self_attn.k_proj", s->kv_heads * s->head_dim, s->hidden},
                {"self_attn.v_proj", s->kv_heads * s->head_dim, s->hidden},
                {"self_attn.o_proj", s->hidden, s->heads * s->head_dim},
                {"post_attention_layernorm", 0, s->hidden},
                {"mlp.gate_proj", s->ffn, s->hidden},
                {"mlp.up_proj", s->ffn, s->hidden},
                {"mlp.down_proj", s->hidden, s->ffn},
        };

        for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
                add_weights(m, parts[i].rows, parts[i].columns, "model.layers.%u.%s.weight", layer,
                            parts[i].name);
}

const float *model_weights(const struct random_model *m, const char *format, ...) {
        char name[128];
        va_list args;

        va_start(args, format);
        vsnprintf(name, sizeof name, format, args);
        va_end(args);
        for (uint32_t i = 0; i < m->n; i++)
                if (strcmp(m->weights[i].name, name) == 0)
                        return m->weights[i].data;
        ck_abort_msg("no weights %s", name);
}

void folder_config(const char *name, const struct shape *s) {
        char path[128], text[1024];

        snprintf(path, sizeof path, "%s/config.json", name);
        snprintf(text, sizeof text,
                 "{\"model_type\": \"llama\", \"hidden_act\": \"silu\",\n"
                 "\"num_hidden_layers\": %u, \"hidden_size\": %u,\n"
                 "\"num_attention_heads\": %u, \"num_key_value_heads\": %u, \"head_dim\": %u,\n"
                 "\"intermediate_size\": %u, \"vocab_size\": %u, \"max_position_embeddings\": "
                 "4096,\n"
                 "\"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0, \"rope_scaling\": null,\n"
                 "\"tie_word_embeddings\": %s, \"attention_bias\": false, \"eos_token_id\": [2]}\n",
                 s->layers, s->hidden, s->heads, s->kv_heads, s->head_dim, s->ffn, s->vocab,
                 s->tied ? "true" : "false");
        folder_write_text(path, text);
}

void folder_vocabulary(const char *name, uint32_t n) {
        static const char *const pieces[] = {" the",    "the",   "th",         "e",
                                             " ",       "\\n",   "\\n\\n",     "\\\\",
                                             "\\t",     "ab",    "abcd",       "\\xc3\\xa9",
                                             " theory", "\\x00", "\\xFF\\xfe", "0"};
        char path[128], *text = folder_memory(n * 16 + 64), *at = text;

        at = print_to(at, "<pad>\n<bos>\n<eos>\n<unk>\n");
        for (uint32_t byte = 0; byte < 256; byte++)
                at = print_to(at, "<0x%02X>\n", byte);
        for (uint32_t i = 260; i < n; i++)
                at = i < 260 + ARRAY_SIZE(pieces) ? print_to(at, "%s\n", pieces[i - 260]) :
                                                    print_to(at, "piece%u\n", i);
        snprintf(path, sizeof path, "%s/vocab.txt", name);
        folder_write_text(path, text);
}

/* The header's length is a multiple of 8 only by chance: readers must not rely on alignment. */
static void write_safetensors(const struct random_model *m, const char *path) {
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        enum kvd_number type = number(m->shape.type);
        size_t element = type == KVD_NUMBER_F32 ? 4 : 2, offset = 0;
        char *header = folder_memory(256 * (m->n + 1)), *at = header;
        FILE *f = fopen(path, "we");
        uint64_t size;

        ck_assert_ptr_nonnull(f);
        at = print_to(at, "{\"__metadata__\": {\"format\": \"pt\"}");
        for (uint32_t i = 0; i < m->n; i++) {
                const struct weights *w = m->weights + i;
                size_t bytes = (size_t)MAX(w->rows, 1) * w->columns * element;

                at = print_to(at, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", w->name, m->shape.type);
                at = w->rows ? print_to(at, "%u,%u]", w->rows, w->columns) :
                               print_to(at, "%u]", w->columns);
                at = print_to(at, ",\"data_offsets\":[%zu,%zu]}", offset, offset + bytes);
                offset += bytes;
        }
        at = print_to(at, "}");
        size = (uint64_t)(at - header);
        fwrite(&size, sizeof size, 1, f);
        fwrite(header, 1, size, f);
        for (uint32_t i = 0; i < m->n; i++) {
                size_t n = (size_t)MAX(m->weights[i].rows, 1) * m->weights[i].columns;
                uint16_t *rounded = folder_memory(n * sizeof *rounded);

                if (type != KVD_NUMBER_F32)
                        ops->narrow(rounded, m->weights[i].data, n, type);
                fwrite(type == KVD_NUMBER_F32 ? (const void *)m->weights[i].data : rounded, element,
                       n, f);
        }
        ck_assert_int_eq(fclose(f), 0);
}

const struct random_model *folder_model(const char *name, const struct shape *shape,
                                        uint32_t seed) {
        struct random_model *m = folder_memory(sizeof *m);
        char path[128];

        state = seed * 2654435761u + 1;
        m->shape = *shape;
        add_weights(m, shape->vocab, shape->hidden, "model.embed_tokens.weight");
        for (uint32_t layer = 0; layer < shape->layers; layer++)
                add_layer(m, layer);
        add_weights(m, 0, shape->hidden, "model.norm.weight");
        if (!shape->tied)
                add_weights(m, shape->vocab, shape->hidden, "lm_head.weight");

        ck_assert_int_eq(mkdir(folder_path(name), 0700), 0);
        snprintf(path, sizeof path, "%s/model.safetensors", name);
        write_safetensors(m, folder_path(path));
        folder_config(name, shape);
        folder_vocabulary(name, shape->vocab);
        return m;
}
