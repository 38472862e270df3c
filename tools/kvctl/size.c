/* SPDX-License-Identifier: Apache-2.0 */

/*
 * size: how large a pool should be. Whole blocks that all requests share are counted once, the rest
 * for each request. Blocks have the geometry that a space of the model would have, and the index is
 * laid out as the daemon would do it.
 */

#include <errno.h>

#include "ipc/base/layout.h"
#include "tools/kvctl/kvctl.h"
#include "tools/kvctl/model_config.h"

#define BLOCK_TOKENS 16u /* a space's default */

struct need {
        struct kvd_shape shape;
        uint64_t context, users, shared; /* tokens, requests, tokens that begin all requests */
        uint64_t shared_blocks, own_blocks, alone_blocks; /* of all; of each; of each, unshared */
};

/* ---- the model ------------------------------------------------------------------------------- */

static int take_dtype(struct kvctl *kvctl, const struct model_config *model, uint32_t *ret) {
        int given = kvctl->args.word[FLAG_DTYPE];

        *ret = given ? (uint32_t)given : model->dtype;
        if (*ret)
                return 0;
        return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                          "%s does not name the type of the cache's elements: say --dtype",
                          kvctl->args.operand[0]);
}

static int take_shape(struct kvctl *kvctl, struct kvd_shape *ret) {
        const struct args *args = &kvctl->args;
        struct model_config model;
        const char *why = NULL;
        int r = model_config_read(args->operand[0], &model, &kvctl->why);

        if (r < 0) {
                kvctl->exit = KVCTL_NO;
                return r;
        }
        *ret = (struct kvd_shape){.layers = model.layers,
                                  .kv_heads = model.kv_heads,
                                  .head_dim = model.head_dim,
                                  .vocab = 1};
        ret->block_tokens = args_has(args, FLAG_BLOCK_TOKENS) ?
                                    (uint32_t)MIN(args->number[FLAG_BLOCK_TOKENS], UINT32_MAX) :
                                    BLOCK_TOKENS;
        r = take_dtype(kvctl, &model, &ret->dtype);
        if (r == 0 && kvd_shape_normalise(ret, &why) < 0)
                r = kvctl_fail(kvctl, KVCTL_NO, -EINVAL, "no space can hold this model: %s", why);
        return r;
}

/* ---- requests -------------------------------------------------------------------------------- */

#define MOST_TOKENS (UINT64_C(1) << 32)
#define MOST_USERS (UINT64_C(1) << 20)

static int take_requests(struct kvctl *kvctl, struct need *n) {
        const struct args *args = &kvctl->args;

        n->context = args->number[FLAG_CONTEXT];
        n->users = args_has(args, FLAG_USERS) ? args->number[FLAG_USERS] : 1;
        n->shared = args->number[FLAG_SHARED];
        if (!n->context || n->context > MOST_TOKENS || !n->users || n->users > MOST_USERS)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "--context takes 1 to %llu, --users 1 to %llu",
                                  (unsigned long long)MOST_TOKENS, (unsigned long long)MOST_USERS);
        if (n->shared > n->context)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "--shared is a part of --context: at most %llu",
                                  (unsigned long long)n->context);
        return 0;
}

/* Only blocks that are shared whole are counted once. */
static void count_blocks(struct need *n) {
        uint64_t tokens = n->shape.block_tokens;

        n->shared_blocks = n->shared / tokens;
        n->own_blocks = DIV_UP(n->context - n->shared_blocks * tokens, tokens);
        n->alone_blocks = DIV_UP(n->context, tokens);
}

static uint64_t index_bytes(const struct need *n, uint64_t blocks) {
        struct kvd_index ix = {.geometry = n->shape,
                               .capacity = (uint32_t)MIN(blocks, UINT32_MAX / 4),
                               .run_capacity =
                                       kvd_run_capacity(&n->shape,
                                                        (uint32_t)MIN(blocks, UINT32_MAX / 4))};

        kvd_index_lay_out(&ix);
        return ix.size;
}

/* ---- the answer ------------------------------------------------------------------------------ */

static const struct column columns[] = {
        {"layers", "layers", UNIT_COUNT},
        {"kv_heads", "KV heads", UNIT_COUNT},
        {"head_dim", "elements a head", UNIT_COUNT},
        {"dtype", "type", UNIT_NONE},
        {"token_bytes", "a token", UNIT_BYTES},
        {"block_tokens", "tokens a block", UNIT_COUNT},
        {"block_bytes", "a block", UNIT_BYTES},
        {"request_bytes", "a request alone", UNIT_BYTES},
        {"shared_bytes", "what all share, once", UNIT_BYTES},
        {"own_bytes", "the rest of each", UNIT_BYTES},
        {"unshared_bytes", "all, without sharing", UNIT_BYTES},
        {"pool_bytes", "the pool", UNIT_BYTES},
        {"index_bytes", "the index, in addition", UNIT_BYTES},
};

static int add_need(struct kvctl *kvctl, struct answer *answer, const struct need *n) {
        struct table *t = ANSWER_RECORD(answer, "size", columns);
        uint64_t block = kvd_shape_bytes(&n->shape),
                 blocks = n->shared_blocks + n->users * n->own_blocks;

        if (!t)
                return kvctl_out_of_memory(kvctl);
        table_number(t, n->shape.layers);
        table_number(t, n->shape.kv_heads);
        table_number(t, n->shape.head_dim);
        table_string(t, kvd_enum_word(KVD_ENUM_dtype, n->shape.dtype));
        table_number(t, block / n->shape.block_tokens);
        table_number(t, n->shape.block_tokens);
        table_number(t, block);
        table_number(t, n->alone_blocks * block);
        table_number(t, n->shared_blocks * block);
        table_number(t, n->own_blocks * block);
        table_number(t, n->users * n->alone_blocks * block);
        table_number(t, blocks * block);
        table_number(t, index_bytes(n, blocks));
        return 0;
}

static void say(struct answer *answer, const struct need *n) {
        uint64_t blocks = n->shared_blocks + n->users * n->own_blocks,
                 mib = DIV_UP(blocks * kvd_shape_bytes(&n->shape), UINT64_C(1) << 20);

        answer_say(answer, "%llu request%s of %llu tokens, %llu of them in common.",
                   (unsigned long long)n->users, n->users == 1 ? "" : "s",
                   (unsigned long long)n->context, (unsigned long long)n->shared);
        answer_say(answer,
                   "In kvd.conf: pool = %lluM at least; a larger one keeps earlier requests.",
                   (unsigned long long)mib);
}

int verb_size(struct kvctl *kvctl, struct answer *answer) {
        struct need need = {0};
        int r = take_requests(kvctl, &need);

        if (r == 0)
                r = take_shape(kvctl, &need.shape);
        if (r < 0)
                return r;
        count_blocks(&need);
        say(answer, &need);
        return add_need(kvctl, answer, &need);
}
