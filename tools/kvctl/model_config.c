/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads a model's config.json. Names of fields depend on the model's family and age. A model of
 * text and images has an inner object for its language model. Missing values are derived from
 * others, as in transformers.
 */

#include "tools/kvctl/model_config.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "ipc/base/enums.h"
#include "ipc/base/util.h"

/* ---- fields ---------------------------------------------------------------------------------- */

static const char *const layers[] = {"num_hidden_layers", "n_layer", "n_layers", "num_layers",
                                     NULL};
static const char *const heads[] = {"num_attention_heads", "n_head", "n_heads", NULL};
static const char *const kv_heads[] = {"num_key_value_heads", "num_kv_heads", NULL};
static const char *const widths[] = {"hidden_size", "n_embd", "d_model", NULL};
static const char *const head_dims[] = {"head_dim", NULL};
static const char *const dtypes[] = {"dtype", "torch_dtype", NULL};
static const char *const parts[] = {"text_config", "llm_config", "language_config", NULL};

/* The first of these names that has a value. */
static json_t *member(const json_t *config, const char *const *names) {
        json_t *value = NULL;

        for (; *names && (!value || json_is_null(value)); names++)
                value = json_object_get(config, *names);
        return json_is_null(value) ? NULL : value;
}

/* 0: the field is missing, or not a number that a model can have. */
static uint32_t number(const json_t *config, const char *const *names) {
        json_int_t n = json_integer_value(member(config, names));

        return n > 0 && n <= UINT16_MAX * 16 ? (uint32_t)n : 0;
}

/* 0: a type that no space has */
static uint32_t dtype_of(const char *name) {
        static const struct {
                const char *name;
                uint32_t dtype;
        } names[] = {{"float32", KVD_dtype_f32},
                     {"float16", KVD_dtype_f16},
                     {"bfloat16", KVD_dtype_bf16},
                     {"int8", KVD_dtype_i8}};

        for (size_t i = 0; name && i < ARRAY_SIZE(names); i++)
                if (strcmp(name, names[i].name) == 0)
                        return names[i].dtype;
        return 0;
}

/* ---- layers that engines do not share -------------------------------------------------------- */

static bool slides(const json_t *config) {
        json_t *window = json_object_get(config, "sliding_window"),
               *use = json_object_get(config, "use_sliding_window");

        return json_is_integer(window) && !json_is_false(use) &&
               !json_object_get(config, "layer_types");
}

/* The type of the first layer without full attention; NULL if none. */
static const char *other_layer(const json_t *config) {
        json_t *types = json_object_get(config, "layer_types"), *type;
        size_t i;

        json_array_foreach(types, i, type) if (json_is_string(type) &&
                                               strcmp(json_string_value(type), "full_attention") !=
                                                       0) return json_string_value(type);
        return NULL;
}

static const char *not_shared(const json_t *config) {
        if (json_is_integer(json_object_get(config, "kv_lora_rank")))
                return "latent attention (kv_lora_rank)";
        if (slides(config))
                return "sliding windows (sliding_window)";
        return other_layer(config);
}

/* ---- the whole ------------------------------------------------------------------------------- */

static int take(const char *path, const json_t *config, struct model_config *ret,
                struct kvd_why *why) {
        const char *other = not_shared(config);
        uint32_t n_heads = number(config, heads);

        if (other)
                return kvd_refuse(why, -EOPNOTSUPP,
                                  "%s: layers with %s; engines share full attention only", path,
                                  other);
        ret->layers = number(config, layers);
        ret->kv_heads = number(config, kv_heads) ?: n_heads;
        ret->head_dim = number(config, head_dims);
        if (!ret->head_dim && n_heads)
                ret->head_dim = number(config, widths) / n_heads;
        if (ret->layers && ret->kv_heads && ret->head_dim)
                return 0;
        return kvd_refuse(why, -EINVAL, "%s does not say how many %s the model has", path,
                          !ret->layers   ? "layers (num_hidden_layers)" :
                          !ret->kv_heads ? "KV heads (num_key_value_heads)" :
                                           "elements a head (head_dim)");
}

static json_t *load(const char *path, struct kvd_why *why) {
        _cleanup_(freep) char *inside = NULL;
        json_error_t error;
        struct stat st;
        json_t *config;

        if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
                if (asprintf(&inside, "%s/config.json", path) < 0) {
                        kvd_refuse(why, -ENOMEM, "out of memory");
                        return NULL;
                }
                path = inside;
        }
        config = json_load_file(path, 0, &error);
        if (config && json_is_object(config))
                return config;
        json_decref(config);
        if (!config && json_error_code(&error) == json_error_cannot_open_file)
                kvd_refuse(why, -ENOENT, "%s", error.text); /* begins with the path */
        else
                kvd_refuse(why, -EINVAL, "%s: %s", path, config ? "no JSON object" : error.text);
        return NULL;
}

int model_config_read(const char *path, struct model_config *ret, struct kvd_why *why) {
        json_auto_t *config = load(path, why);
        const json_t *part;
        const char *type;

        if (!config)
                return -EINVAL;
        *ret = (struct model_config){0};
        type = json_string_value(json_object_get(config, "model_type"));
        snprintf(ret->type, sizeof ret->type, "%s", type ?: "");
        part = member(config, parts);
        ret->dtype = dtype_of(json_string_value(member(part, dtypes)) ?:
                                      json_string_value(member(config, dtypes)));
        return take(path, part ?: config, ret, why);
}
