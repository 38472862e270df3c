/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads a model's config.json member by member. Features that kvlm does not implement are refused
 * by name, because a model that is computed wrongly still answers.
 */

#include "tools/kvlm/config.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"
#include "tools/json.h"

/* Reads a whole number from 1 to most. fallback 0: the member is required. */
static int read_size(const json_t *j, const char *key, uint32_t fallback, uint32_t most,
                     uint32_t *ret) {
        const json_t *member = json_object_get(j, key);
        uint64_t value = fallback;

        if (member && !json_is_null(member) && json_whole(member, &value) < 0)
                return refuse(-EINVAL, "config.json: %s is not a whole number", key);
        if (value == 0 || value > most)
                return refuse(-EINVAL, "config.json: %s is missing or not in 1 to %u", key, most);
        *ret = (uint32_t)value;
        return 0;
}

static int read_sizes(const json_t *j, struct config *c) {
        const struct {
                const char *key;
                uint32_t fallback, most;
                uint32_t *to;
        } sizes[] = {
                {"num_hidden_layers", 0, 1024, &c->layers},
                {"hidden_size", 0, 1 << 20, &c->hidden},
                {"intermediate_size", 0, 1 << 22, &c->ffn},
                {"num_attention_heads", 0, 4096, &c->heads},
                {"vocab_size", 0, 1 << 24, &c->vocab},
                {"max_position_embeddings", 2048, 1 << 24, &c->max_positions},
        };
        int r;

        for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
                r = read_size(j, sizes[i].key, sizes[i].fallback, sizes[i].most, sizes[i].to);
                if (r < 0)
                        return r;
        }
        r = read_size(j, "num_key_value_heads", c->heads, 4096, &c->kv_heads);
        return r < 0 ? r :
                       read_size(j, "head_dim", MAX(c->hidden / c->heads, 1), 4096, &c->head_dim);
}

static int read_float(const json_t *j, const char *key, double fallback, float *ret) {
        const json_t *member = json_object_get(j, key);
        double value = member ? json_number_value(member) : fallback;

        if (member && !json_is_number(member))
                return refuse(-EINVAL, "config.json: %s is not a number", key);
        if (!isfinite(value) || value <= 0.0 || value > 1e12)
                return refuse(-EINVAL, "config.json: %s is not a positive number", key);
        *ret = (float)value;
        return 0;
}

/*
 * Members that change the arithmetic must be absent, or have the values that this engine
 * implements.
 */
static int check_features(const json_t *j) {
        static const char *const off[] = {"attention_bias", "mlp_bias", "rope_scaling",
                                          "quantization_config"};
        const json_t *type = json_object_get(j, "model_type"),
                     *act = json_object_get(j, "hidden_act");

        if (type && !json_says(type, "llama") && !json_says(type, "kvlm_diffusion"))
                return refuse(-ENOTSUP,
                              "config.json: model_type is neither llama nor kvlm_diffusion");
        if (act && !json_says(act, "silu"))
                return refuse(-ENOTSUP, "config.json: hidden_act is not silu");
        for (size_t i = 0; i < ARRAY_SIZE(off); i++) {
                const json_t *member = json_object_get(j, off[i]);

                if (member && !json_is_null(member) && !json_is_false(member))
                        return refuse(-ENOTSUP, "config.json: %s is not supported", off[i]);
        }
        return 0;
}

/* "attention": "bidirectional" makes it a masked-diffusion model, which must have a mask token. */
static int read_attention(const json_t *j, struct config *c) {
        const json_t *attention = json_object_get(j, "attention");
        uint64_t id;

        c->bidirectional = json_says(attention, "bidirectional");
        if (attention && !c->bidirectional && !json_says(attention, "causal"))
                return refuse(-ENOTSUP,
                              "config.json: attention is neither causal nor bidirectional");
        if (!c->bidirectional)
                return 0;
        if (json_whole(json_object_get(j, "mask_token_id"), &id) < 0 || id >= c->vocab)
                return refuse(
                        -EINVAL,
                        "config.json: mask_token_id is missing or not a token id below vocab_size");
        if (c->vocab < 2)
                return refuse(-EINVAL,
                              "config.json: vocab_size leaves no token other than the mask");
        c->mask_token = (uint32_t)id;
        return 0;
}

static int read_members(const json_t *j, struct config *c) {
        int r = check_features(j);

        if (r < 0)
                return r;
        r = read_sizes(j, c);
        if (r < 0)
                return r;
        r = read_float(j, "rms_norm_eps", 1e-6, &c->norm_eps);
        if (r < 0)
                return r;
        r = read_float(j, "rope_theta", 10000.0, &c->rope_theta);
        if (r < 0)
                return r;
        c->tied = json_is_true(json_object_get(j, "tie_word_embeddings"));
        if (c->heads % c->kv_heads != 0)
                return refuse(
                        -EINVAL,
                        "config.json: num_key_value_heads does not divide num_attention_heads");
        if (c->head_dim % 2 != 0)
                return refuse(-EINVAL, "config.json: head_dim is odd");
        return read_attention(j, c);
}

int config_read(const struct mapping *file, struct config *ret) {
        struct config c = {0};
        json_auto_t *j = json_read((const char *)file->data, file->size);
        int r;

        if (!json_is_object(j))
                return refuse(-EINVAL, "config.json is not a JSON object");
        r = read_members(j, &c);
        if (r == 0)
                *ret = c;
        return r;
}
