/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/config.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/note.h"
#include "tools/kvlm/json.h"

/* A whole number from 1 to most. fallback 0: it must be there. */
static int read_size(const struct json *j, const char *key, uint32_t fallback, uint32_t most, uint32_t *ret) {
        uint32_t node = json_find(j, 0, key);
        uint64_t value = fallback;

        if (node && j->nodes[node].type != JSON_NULL && json_u64(j, node, &value) < 0)
                return note(-EINVAL, "config.json: %s is not a whole number", key);
        if (value == 0 || value > most)
                return note(-EINVAL, "config.json: %s is missing or not in 1 to %u", key, most);
        *ret = (uint32_t)value;
        return 0;
}

static int read_sizes(const struct json *j, struct config *c) {
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
        return r < 0 ? r : read_size(j, "head_dim", MAX(c->hidden / c->heads, 1), 4096, &c->head_dim);
}

static int read_float(const struct json *j, const char *key, double fallback, float *ret) {
        uint32_t node = json_find(j, 0, key);
        double value = fallback;

        if (node && json_double(j, node, &value) < 0)
                return note(-EINVAL, "config.json: %s is not a number", key);
        if (!isfinite(value) || value <= 0.0 || value > 1e12)
                return note(-EINVAL, "config.json: %s is not a positive number", key);
        *ret = (float)value;
        return 0;
}

/* Members that change the arithmetic must be absent or as this engine computes. */
static int check_features(const struct json *j) {
        static const char *const off[] = {"attention_bias", "mlp_bias", "rope_scaling", "quantization_config"};
        uint32_t type = json_find(j, 0, "model_type"), act = json_find(j, 0, "hidden_act");

        if (type && !json_is(j, type, "llama") && !json_is(j, type, "kvlm_diffusion"))
                return note(-ENOTSUP, "config.json: model_type is neither llama nor kvlm_diffusion");
        if (act && !json_is(j, act, "silu"))
                return note(-ENOTSUP, "config.json: hidden_act is not silu");
        for (size_t i = 0; i < ARRAY_SIZE(off); i++) {
                uint32_t node = json_find(j, 0, off[i]);

                if (node && j->nodes[node].type != JSON_NULL && j->nodes[node].type != JSON_FALSE)
                        return note(-ENOTSUP, "config.json: %s is not supported", off[i]);
        }
        return 0;
}

/* "attention": "bidirectional" makes it a masked-diffusion model, and then there is a mask token. */
static int read_attention(const struct json *j, struct config *c) {
        uint32_t attention = json_find(j, 0, "attention"), mask = json_find(j, 0, "mask_token_id");
        uint64_t id;

        c->bidirectional = attention && json_is(j, attention, "bidirectional");
        if (attention && !c->bidirectional && !json_is(j, attention, "causal"))
                return note(-ENOTSUP, "config.json: attention is neither causal nor bidirectional");
        if (!c->bidirectional)
                return 0;
        if (!mask || json_u64(j, mask, &id) < 0 || id >= c->vocab)
                return note(-EINVAL, "config.json: mask_token_id is missing or not a token id below vocab_size");
        if (c->vocab < 2)
                return note(-EINVAL, "config.json: vocab_size leaves no token beside the mask");
        c->mask_token = (uint32_t)id;
        return 0;
}

static int read_members(const struct json *j, struct config *c) {
        uint32_t tied = json_find(j, 0, "tie_word_embeddings");
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
        c->tied = tied && j->nodes[tied].type == JSON_TRUE;
        if (c->heads % c->kv_heads != 0)
                return note(-EINVAL, "config.json: num_key_value_heads does not divide num_attention_heads");
        if (c->head_dim % 2 != 0)
                return note(-EINVAL, "config.json: head_dim is odd");
        return read_attention(j, c);
}

int config_read(const struct mapping *file, struct config *ret) {
        struct config c = {0};
        struct json j = {0};
        int r = json_parse((const char *)file->data, file->size, &j);

        if (r < 0 || j.nodes[0].type != JSON_OBJECT) {
                json_release(&j);
                return note(-EINVAL, "config.json is not a JSON object");
        }
        r = read_members(&j, &c);
        json_release(&j);
        if (r == 0)
                *ret = c;
        return r;
}
