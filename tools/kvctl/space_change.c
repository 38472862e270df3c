/* SPDX-License-Identifier: Apache-2.0 */

/*
 * space create, space set and space delete. Operands are checked before the daemon is asked; a
 * refusal lists the words that are allowed.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/kvd.h"
#include "ipc/base/settings.h"
#include "tools/kvctl/kvctl.h"

#define MEMBER(name) offsetof(struct kvd_msg_space, name)

static int check_name(struct kvctl *kvctl) {
        const char *name = kvctl->args.operand[0];

        if (*name && strlen(name) <= KVD_NAME_MAX)
                return 0;
        return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                          "a space's name has 1 to %d characters, not %zu", KVD_NAME_MAX,
                          strlen(name));
}

/* ---- create ---------------------------------------------------------------------------------- */

static const struct {
        enum flag flag;
        size_t member; /* u32 */
} settings[] = {
        {FLAG_LAYERS, MEMBER(layers)},
        {FLAG_KV_HEADS, MEMBER(kv_heads)},
        {FLAG_HEAD_DIM, MEMBER(head_dim)},
        {FLAG_VOCAB, MEMBER(vocab)},
        {FLAG_BLOCK_TOKENS, MEMBER(block_tokens)},
        {FLAG_LAYER_GROUPS, MEMBER(layer_groups)},
        {FLAG_STATE_WIDTH, MEMBER(state_width)},
        {FLAG_DTYPE, MEMBER(dtype)},
        {FLAG_ORDER, MEMBER(order)},
        {FLAG_ROPE, MEMBER(rope)},
        {FLAG_KIND, MEMBER(kind)},
        {FLAG_KEYS, MEMBER(keys)},
        {FLAG_POLICY, MEMBER(policy)},
};

/* The largest value that the message takes for this member. */
static uint64_t limit_of(size_t member) {
        const struct kvd_msg_info *info = kvd_msg_info(KVD_MSG_space);

        for (uint32_t i = 0; i < info->n_fields; i++)
                if (info->fields[i].offset == offsetof(struct kvd_msg, space) + member)
                        return info->fields[i].limit;
        return UINT32_MAX;
}

static int take_number(struct kvctl *kvctl, enum flag flag, size_t member, uint32_t *ret) {
        const struct args *args = &kvctl->args;
        uint64_t value = args->word[flag] ? (unsigned)args->word[flag] : args->number[flag];
        uint64_t limit = limit_of(member);

        if (value > limit)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL, "--%s takes at most %llu",
                                  flags[flag].name, (unsigned long long)limit);
        *ret = (uint32_t)value;
        return 0;
}

/* Up to 32 hex digits, highest first. */
static int take_fingerprint(struct kvctl *kvctl, struct kvd_msg_space *request) {
        const char *hex = kvctl->args.text[FLAG_FINGERPRINT];
        char low[17] = "", high[17] = "";
        size_t n = strlen(hex), n_low = MIN(n, (size_t)16);

        if (n == 0 || n > 32 || strspn(hex, "0123456789abcdefABCDEF") != n)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "--fingerprint takes 1 to 32 hex digits, not \"%s\"", hex);
        memcpy(low, hex + n - n_low, n_low);
        memcpy(high, hex, n - n_low);
        request->fingerprint0 = strtoull(low, NULL, 16);
        request->fingerprint1 = strtoull(high, NULL, 16);
        return 0;
}

static void take_opaque(const struct args *args, struct kvd_msg_space *request) {
        request->block_bytes = args->number[FLAG_BLOCK_BYTES];
        if (args_has(args, FLAG_LAYOUT))
                request->layout = kvd_slice_of(args->text[FLAG_LAYOUT]);
}

static int take_settings(struct kvctl *kvctl, struct kvd_msg_space *request) {
        int r = 0;

        for (size_t i = 0; i < ARRAY_SIZE(settings) && r == 0; i++) {
                uint32_t *member = (uint32_t *)((char *)request + settings[i].member);

                if (args_has(&kvctl->args, settings[i].flag))
                        r = take_number(kvctl, settings[i].flag, settings[i].member, member);
        }
        take_opaque(&kvctl->args, request);
        if (r == 0 && kvctl->args.number[FLAG_MAX_BLOCKS] > UINT32_MAX)
                r = kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL, "--max-blocks takes at most %u",
                               UINT32_MAX);
        if (r == 0 && args_has(&kvctl->args, FLAG_FINGERPRINT))
                r = take_fingerprint(kvctl, request);
        request->max_blocks = kvctl->args.number[FLAG_MAX_BLOCKS];
        return r;
}

static const struct column create_columns[] = {
        {"name", NULL, UNIT_NONE},
        {"created", NULL, UNIT_NONE},
};

static int add_created(struct kvctl *kvctl, struct answer *answer,
                       const struct kvd_msg_space_reply *reply) {
        struct table *t = ANSWER_RECORD(answer, "space", create_columns);
        const char *name = kvctl->args.operand[0];

        if (!t)
                return kvctl_out_of_memory(kvctl);
        table_string(t, name);
        table_flag(t, reply->created);
        if (reply->created)
                answer_say(answer, "Space %s is made.", name);
        else
                answer_say(answer, "Space %s exists already, with the same settings.", name);
        return 0;
}

int verb_space_create(struct kvctl *kvctl, struct answer *answer) {
        struct kvd_msg_space request = {.name = kvd_slice_of(kvctl->args.operand[0]),
                                        .domain = kvctl_domain(kvctl),
                                        .create = 2};
        struct kvd_msg_space_reply reply = {0};
        int r = check_name(kvctl);

        if (r == 0)
                r = take_settings(kvctl, &request);
        if (r == 0)
                r = kvctl_call(kvctl, KVD_MSG_space, &request, &reply);
        return r < 0 ? r : add_created(kvctl, answer, &reply);
}

/* ---- set ------------------------------------------------------------------------------------- */

static const struct column set_columns[] = {
        {"space", NULL, UNIT_NONE},
        {"key", NULL, UNIT_NONE},
        {"value", NULL, UNIT_NONE},
};

static int set_one(struct kvctl *kvctl, const char *pair, bool check) {
        const char *equals = strchr(pair, '=');
        char key[64];
        struct kvd_msg_space_set request = {.space = kvd_slice_of(kvctl->args.operand[0]),
                                            .domain = kvctl_domain(kvctl),
                                            .check = check};
        struct kvd_msg_space_set_reply reply;

        if (!equals || equals == pair || equals - pair >= (ptrdiff_t)sizeof key)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "\"%s\" is not a setting; write KEY=VALUE, as in policy=fifo",
                                  pair);
        snprintf(key, sizeof key, "%.*s", (int)(equals - pair), pair);
        request.key = kvd_slice_of(key);
        request.value = kvd_slice_of(equals + 1);
        return kvctl_call(kvctl, KVD_MSG_space_set, &request, &reply);
}

/* Refuses a key that is set twice, because it would not be clear which value counts. */
static int check_once(struct kvctl *kvctl, unsigned i) {
        const struct args *args = &kvctl->args;
        size_t n = strcspn(args->operand[i], "=");

        for (unsigned k = 1; k < i; k++)
                if (strncmp(args->operand[k], args->operand[i], n + 1) == 0)
                        return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL, "\"%.*s\" is set twice",
                                          (int)MIN(n, (size_t)64), args->operand[i]);
        return 0;
}

/* All or nothing: the daemon accepts every setting before the first one changes. */
static int set_all(struct kvctl *kvctl) {
        const struct args *args = &kvctl->args;
        int r = 0;

        for (unsigned i = 1; i < args->n_operands && r == 0; i++) {
                r = check_once(kvctl, i);
                if (r == 0)
                        r = set_one(kvctl, args->operand[i], true);
        }
        for (unsigned i = 1; i < args->n_operands && r == 0; i++)
                r = set_one(kvctl, args->operand[i], false);
        return r;
}

static void fill_setting(struct table *t, const char *space, const char *pair) {
        const char *equals = strchr(pair, '=');

        table_string(t, space);
        table_text(t, pair, (size_t)(equals - pair));
        table_string(t, equals + 1);
}

static bool is_of_a_method(const char *pair) {
        char key[64];

        snprintf(key, sizeof key, "%.*s", (int)strcspn(pair, "="), pair);
        return kvd_setting_by_name(key) >= 0;
}

int verb_space_set(struct kvctl *kvctl, struct answer *answer) {
        struct table *t = ANSWER_ROWS(answer, "settings", set_columns);
        const struct args *args = &kvctl->args;
        int r = t ? check_name(kvctl) : kvctl_out_of_memory(kvctl);
        bool of_a_method = false;

        if (r == 0)
                r = set_all(kvctl);
        for (unsigned i = 1; i < args->n_operands && r == 0; i++) {
                fill_setting(t, args->operand[0], args->operand[i]);
                answer_say(answer, "%s: %s", args->operand[0], args->operand[i]);
                of_a_method |= is_of_a_method(args->operand[i]);
        }
        if (of_a_method) {
                answer_say(answer, "kvlm and programs that call kvd_methods.h follow this;");
                answer_say(answer,
                           "of the engines, transformers in place does, and vLLM on CPUs if "
                           "asked to: kvd-methods(7).");
        }
        return r;
}

/* ---- delete ---------------------------------------------------------------------------------- */

static const struct column delete_columns[] = {
        {"name", NULL, UNIT_NONE},
        {"deleted", NULL, UNIT_NONE},
};

#define ERASURE_MS 30000
#define LOOK_AGAIN_MS 10

/* A space gone from memory may still be in the file. It is deleted once it cannot come back. */
static int wait_for_erasure(struct kvctl *kvctl, const struct kvd_msg_space_delete *request) {
        struct kvd_msg_space_delete_reply reply;

        for (int ms = 0; ms < ERASURE_MS; ms += LOOK_AGAIN_MS) {
                int r = kvctl_next(kvctl, KVD_MSG_space_delete, request, &reply);

                if (r < 0)
                        return r;
                if (r == 0 || !reply.erasing)
                        return 0;
                usleep(LOOK_AGAIN_MS * 1000);
        }
        return kvctl_fail(kvctl, KVCTL_NO, -ETIMEDOUT,
                          "the space is gone from memory, but the file may still have it; see "
                          "kvctl tiers and the log");
}

int verb_space_delete(struct kvctl *kvctl, struct answer *answer) {
        const char *name = kvctl->args.operand[0];
        struct kvd_msg_space_delete request = {.space = kvd_slice_of(name),
                                               .domain = kvctl_domain(kvctl),
                                               .force = args_has(&kvctl->args, FLAG_FORCE)};
        struct kvd_msg_space_delete_reply reply;
        struct table *t = ANSWER_RECORD(answer, "space", delete_columns);
        int r = t ? check_name(kvctl) : kvctl_out_of_memory(kvctl);

        if (r == 0)
                r = kvctl_call(kvctl, KVD_MSG_space_delete, &request, &reply);
        if (r == 0 && reply.erasing)
                r = wait_for_erasure(kvctl, &request);
        if (r < 0)
                return r;
        table_string(t, name);
        table_flag(t, true);
        answer_say(answer, "Space %s is deleted.", name);
        return 0;
}
