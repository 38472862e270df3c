/* SPDX-License-Identifier: Apache-2.0 */
/* compute: KeyDiff */
#include "tools/kvctl/compute.h"

#include "kernels/block.h"
#include "kernels/keydiff.h"

static uint32_t size32(const struct compute *c, const char *name) {
        return (uint32_t)compute_size(c, name);
}

/* Dense keys, "heads,tokens,dim": one block that holds all. */
static struct kvd_key_rows dense_keys(struct compute *c, const uint8_t **block) {
        *block = c->in[0].data;
        return (struct kvd_key_rows){.blocks = block, .head_stride = compute_size(c, "tokens") * compute_size(c, "dim"),
                                 .token_stride = compute_size(c, "dim"), .per_block = size32(c, "tokens"),
                                 .heads = size32(c, "heads"), .dim = size32(c, "dim"), .type = c->type};
}

static int check_keys(struct compute *c) {
        if (c->in[0].count == 0 || compute_size(c, "tokens") > UINT32_MAX)
                return compute_fail(c, "there are no keys, or too many");
        return 0;
}

/* Scores of keys, with the anchors that were given or with their own. */
static int score_keys(struct compute *c, const struct kvd_key_rows *keys, uint32_t n, const float *given,
                      float *scores) {
        float *scratch = compute_scratch(c, kvd_keydiff_scratch(keys) * sizeof *scratch);
        float *anchors = compute_scratch(c, (size_t)keys->heads * keys->dim * sizeof *anchors);
        uint32_t *counts = compute_scratch(c, keys->heads * sizeof *counts);

        if (!scratch || !anchors || !counts)
                return -1;
        c->ops->keydiff->anchor(anchors, counts, keys, 0, n, scratch);
        for (uint32_t h = 0; h < keys->heads; h++)
                for (uint32_t d = 0; d < keys->dim; d++)
                        anchors[h * keys->dim + d] /= (float)(counts[h] ? counts[h] : 1);
        c->ops->keydiff->score(scores, n, keys, 0, n, given ? given : anchors, scratch);
        return 0;
}

/* ---- dense ------------------------------------------------------------------------------------------------------ */

static int run_anchor(struct compute *c) {
        const uint8_t *block;
        struct kvd_key_rows keys;
        float *scratch;

        if (check_keys(c) < 0)
                return -1;
        keys = dense_keys(c, &block);
        scratch = compute_scratch(c, kvd_keydiff_scratch(&keys) * sizeof *scratch);
        if (!scratch)
                return -1;
        c->ops->keydiff->anchor(c->out[0].data, c->out[1].data, &keys, 0, keys.per_block, scratch);
        return 0;
}

static int run_score(struct compute *c) {
        const uint8_t *block;
        struct kvd_key_rows keys;

        if (check_keys(c) < 0)
                return -1;
        keys = dense_keys(c, &block);
        return score_keys(c, &keys, keys.per_block, c->in[1].data, c->out[0].data);
}

static int run_pairwise(struct compute *c) {
        const uint8_t *block;
        struct kvd_key_rows keys;
        float *scratch;

        if (check_keys(c) < 0)
                return -1;
        keys = dense_keys(c, &block);
        scratch = compute_scratch(c, (size_t)keys.per_block * keys.dim * sizeof *scratch);
        for (uint32_t h = 0; scratch && h < keys.heads; h++)
                c->ops->keydiff->pairwise((float *)c->out[0].data + (size_t)h * keys.per_block, &keys, h,
                                          keys.per_block, scratch);
        return scratch ? 0 : -1;
}

static int run_keep(struct compute *c) {
        uint64_t tokens = compute_size(c, "tokens"), n = compute_size(c, "n") < tokens ? compute_size(c, "n") : tokens;
        uint64_t shape[2] = {compute_size(c, "heads"), n};
        float *scores = compute_scratch(c, shape[0] * tokens * sizeof *scores);
        uint32_t *scratch = compute_scratch(c, tokens * sizeof *scratch);
        const uint8_t *block;
        struct kvd_key_rows keys;

        if (check_keys(c) < 0 || !scores || !scratch || compute_make(c, 0, 2, shape) < 0)
                return -1;
        keys = dense_keys(c, &block);
        if (score_keys(c, &keys, keys.per_block, NULL, scores) < 0)
                return -1;
        for (uint64_t h = 0; h < shape[0]; h++)
                c->ops->block->topk((uint32_t *)c->out[0].data + h * n, scores + h * tokens, (uint32_t)tokens,
                                    (uint32_t)n, true, scratch);
        return 0;
}

/* ---- in blocks -------------------------------------------------------------------------------------------------- */

/* A pool "pool,heads,tokens,dim" (hnd) or "pool,tokens,heads,dim" (nhd; the sizes swap) and a table of its blocks. */
static int pool_keys(struct compute *c, struct kvd_key_rows *ret) {
        bool nhd = compute_choice(c, "order") == 1;
        uint64_t heads = compute_size(c, nhd ? "b" : "a"), tokens = compute_size(c, nhd ? "a" : "b");
        uint64_t dim = compute_size(c, "dim"), n = compute_size(c, "n");
        size_t bytes = heads * tokens * dim * npy_type_size(c->in[0].type);
        const uint8_t **blocks = compute_scratch(c, n * sizeof *blocks);
        const int32_t *index = c->in[1].data;

        if (c->in[0].count == 0 || n == 0 || n * tokens > UINT32_MAX)
                return compute_fail(c, "there are no keys, or too many");
        for (uint64_t i = 0; blocks && i < n; i++) {
                if (index[i] < -1 || (index[i] >= 0 && (uint64_t)index[i] >= compute_size(c, "pool")))
                        return compute_fail(c, "entry %d of the table is not in the pool", index[i]);
                blocks[i] = index[i] < 0 ? NULL : (const uint8_t *)c->in[0].data + (size_t)index[i] * bytes;
        }
        *ret = (struct kvd_key_rows){.blocks = blocks, .head_stride = nhd ? dim : tokens * dim,
                                 .token_stride = nhd ? heads * dim : dim, .per_block = (uint32_t)tokens,
                                 .heads = (uint32_t)heads, .dim = (uint32_t)dim, .type = c->type};
        return blocks ? 0 : -1;
}

static int run_sums(struct compute *c) {
        uint32_t n = size32(c, "n"), *counts;
        struct kvd_key_rows keys;
        uint64_t shape[3];
        float *scratch;

        if (pool_keys(c, &keys) < 0)
                return -1;
        shape[0] = n;
        shape[1] = keys.heads;
        shape[2] = keys.dim;
        scratch = compute_scratch(c, kvd_keydiff_scratch(&keys) * sizeof *scratch);
        if (!scratch || compute_make(c, 0, 3, shape) < 0 || compute_make(c, 1, 2, shape) < 0)
                return -1;
        counts = c->out[1].data;
        for (uint32_t b = 0; b < n; b++)
                c->ops->keydiff->anchor((float *)c->out[0].data + (size_t)b * keys.heads * keys.dim,
                                        counts + (size_t)b * keys.heads, &keys, b * keys.per_block,
                                        (b + 1) * keys.per_block, scratch);
        return 0;
}

static int run_paged(struct compute *c) {
        struct kvd_key_rows keys;
        uint64_t shape[2];

        if (pool_keys(c, &keys) < 0)
                return -1;
        shape[0] = keys.heads;
        shape[1] = compute_size(c, "n") * keys.per_block;
        if (compute_make(c, 0, 2, shape) < 0)
                return -1;
        if (c->in[2].data && (compute_size(c, "heads") != keys.heads))
                return compute_fail(c, "the anchors are not of as many heads as the blocks");
        return score_keys(c, &keys, (uint32_t)shape[1], c->in[2].data, c->out[0].data);
}

static int run_blocks(struct compute *c) {
        uint64_t heads = compute_size(c, "heads"), tokens = compute_size(c, "tokens");
        uint64_t per_block = compute_size(c, "per_block"), shape[2];

        if (per_block == 0 || per_block > UINT32_MAX || tokens > UINT32_MAX || heads > UINT32_MAX)
                return compute_fail(c, "per_block is at least 1");
        shape[0] = heads;
        shape[1] = (tokens + per_block - 1) / per_block;
        if (compute_make(c, 0, 1, shape + 1) < 0 || compute_make(c, 1, 2, shape) < 0)
                return -1;
        c->ops->keydiff->blocks(c->out[0].data, c->out[1].data, c->in[0].data, tokens, (uint32_t)heads,
                                (uint32_t)tokens, (uint32_t)per_block);
        return 0;
}

static int run_priority(struct compute *c) {
        c->ops->keydiff->priority(c->out[0].data, c->in[0].data, c->in[0].count);
        return 0;
}

#define KEYS {"keys", "heads,tokens,dim", COMPUTE_NUMBER, "one row a token, of each KV head"}
#define POOL {"pool", "pool,a,b,dim", COMPUTE_NUMBER, "blocks of keys: a and b are heads and tokens (hnd), or tokens " \
              "and heads (nhd)"}
#define TABLE {"table", "n", COMPUTE_IS(NPY_I32), "the blocks of the sequence, in order; -1: not there"}
#define ANCHORS {"anchors", "heads,dim", COMPUTE_IS(NPY_F32) | COMPUTE_OPTIONAL,                                       \
                 "mean or sum of directions; left out: of the keys themselves"}
#define ORDER {"order", "hnd|nhd", "hnd", "what lies together in a block: a head's tokens, or a token's heads"}

const struct compute_row compute_keydiff[] = {
        {
                .name = "keydiff.anchor",
                .text = "sum of the directions k / |k| of a head's keys",
                .in = {KEYS},
                .out = {{"sums", "heads,dim", NPY_F32, "divided by counts: the mean direction, KeyDiff's anchor"},
                        {"counts", "heads", NPY_U32, "valid keys: not zero, NaN or infinite"}},
                .run = run_anchor,
        },
        {
                .name = "keydiff.blocks",
                .text = "scores of blocks: mean over heads of the largest over tokens",
                .in = {{"scores", "heads,tokens", COMPUTE_IS(NPY_F32), "of keydiff.score"}},
                .param = {{"per_block", "whole", "16", "tokens of a block"}},
                .out = {{"mean", "blocks", NPY_F32, "over the heads that have a valid key there; -inf: none has"},
                        {"best", "heads,blocks", NPY_F32, "the largest score of each head"}},
                .run = run_blocks,
        },
        {
                .name = "keydiff.keep",
                .text = "the n tokens of each head that point where few others do, ascending",
                .in = {KEYS},
                .param = {{"n", "whole", NULL, "the budget; of equal scores the later token is kept"}},
                .out = {{"kept", "heads,min(n;tokens)", NPY_U32, "token positions"}},
                .run = run_keep,
        },
        {
                .name = "keydiff.paged",
                .text = "keydiff.score of a sequence that lies in blocks",
                .in = {POOL, TABLE, ANCHORS},
                .param = {ORDER},
                .out = {{"scores", "heads,n*tokens", NPY_F32, "-inf for the tokens of blocks that are not there"}},
                .run = run_paged,
        },
        {
                .name = "keydiff.pairwise",
                .text = "minus the sum of a key's cosines with all keys: the same ranking as keydiff.score",
                .in = {KEYS},
                .out = {{"scores", "heads,tokens", NPY_F32, "-inf for keys that are not valid"}},
                .run = run_pairwise,
        },
        {
                .name = "keydiff.priority",
                .text = "(1 + score) / 2, within 0 and 1",
                .in = {{"scores", "heads,tokens", COMPUTE_IS(NPY_F32), "of keydiff.score"}},
                .out = {{"priority", "heads,tokens", NPY_F32, "0 for -inf and NaN"}},
                .run = run_priority,
        },
        {
                .name = "keydiff.score",
                .text = "-cos(anchor, key): the larger, the more a token is kept",
                .in = {KEYS, ANCHORS},
                .out = {{"scores", "heads,tokens", NPY_F32, "-inf for keys that are zero, NaN or infinite"}},
                .run = run_score,
        },
        {
                .name = "keydiff.sums",
                .text = "keydiff.anchor of every block: what adds up to a sequence's anchor",
                .in = {POOL, TABLE},
                .param = {ORDER},
                .out = {{"sums", "n,heads,dim", NPY_F32, "for each entry of the table"},
                        {"counts", "n,heads", NPY_U32, "valid keys"}},
                .run = run_sums,
        },
        {.name = NULL},
};
