/* SPDX-License-Identifier: Apache-2.0 */
/* compute: attention over blocks */
#include "tools/kvctl/compute.h"

#include <math.h>
#include <string.h>

#include "kernels/attend.h"

/* Pointers for a table of blocks of the first input; -1 is a hole. */
static const uint8_t *const *get_table(struct compute *c, size_t block_bytes) {
        const int32_t *table = c->in[1].data;
        const uint8_t **blocks = compute_scratch(c, c->in[1].count * sizeof *blocks);

        for (uint64_t i = 0; blocks && i < c->in[1].count; i++) {
                if (table[i] < -1 || (table[i] >= 0 && (uint64_t)table[i] >= compute_size(c, "pool"))) {
                        compute_fail(c, "entry %d of the table is not in the pool", table[i]);
                        return NULL;
                }
                blocks[i] = table[i] < 0 ? NULL : (const uint8_t *)c->in[0].data + (size_t)table[i] * block_bytes;
        }
        return blocks;
}

static int get_turns(struct compute *c, struct kvd_attention *a, uint32_t n_blocks) {
        uint32_t half = a->dim / 2, *turn = compute_scratch(c, n_blocks * sizeof *turn);
        float *frequencies = compute_scratch(c, half * sizeof *frequencies);
        float *turns = compute_scratch(c, (size_t)n_blocks * a->dim * sizeof *turns);

        if (!c->in[3].data)
                return 0;
        if (a->dim % 2)
                return compute_fail(c, "an odd dimension cannot be turned");
        if (!turn || !frequencies || !turns)
                return compute_fail(c, "out of memory");
        for (uint32_t i = 0; i < half; i++)
                frequencies[i] = (float)pow(compute_number(c, "base"), -2.0 * i / a->dim);
        kvd_turns(c->in[3].data, n_blocks, frequencies, half, turn, turns, n_blocks);
        a->turn = turn;
        a->turns = turns;
        return 0;
}

/* Sizes and everything that is the same for all heads. */
static int prepare(struct compute *c, struct kvd_attention *a) {
        uint64_t tokens = compute_size(c, "tokens"), n_blocks = compute_size(c, "n"), keys = compute_whole(c, "keys");
        uint64_t heads = compute_size(c, "heads"), queries = compute_size(c, "queries");
        bool causal = compute_choice(c, "mask") == 0;

        keys = keys ? keys : n_blocks * tokens;
        if (compute_size(c, "planes") != 2 || c->in[0].count == 0)
                return compute_fail(c, "a block has 2 planes, keys and values, and some heads and tokens");
        if (keys > n_blocks * tokens || keys > UINT32_MAX || (causal && queries > keys))
                return compute_fail(c, "the table has not as many keys");
        if (compute_size(c, "query_heads") % heads != 0 || compute_size(c, "query_heads") == 0)
                return compute_fail(c, "query heads are not a multiple of heads");
        *a = (struct kvd_attention){
                .ops = c->ops,
                .type = c->type,
                .block_tokens = (uint32_t)tokens,
                .dim = (uint32_t)compute_size(c, "dim"),
                .first = causal ? (uint32_t)(keys - queries) : 0,
                .n_keys = causal ? 0 : (uint32_t)keys,
                .n = (uint32_t)queries,
                .group = (uint32_t)(compute_size(c, "query_heads") / heads),
        };
        a->stride = a->dim;
        a->scale = 1.0f / sqrtf((float)a->dim);
        if (compute_number(c, "scale") > 0.0)
                a->scale = (float)compute_number(c, "scale");
        a->ldq = a->ldo = (size_t)compute_size(c, "query_heads") * a->dim;
        a->blocks = get_table(c, 2 * heads * tokens * a->dim * npy_type_size(c->in[0].type));
        return a->blocks ? get_turns(c, a, (uint32_t)n_blocks) : -1;
}

static int choose(struct compute *c, struct kvd_attention *a, uint32_t head) {
        uint64_t n = c->in[4].data ? compute_size(c, "chosen") : 0;

        if (!c->in[4].data)
                return 0;
        a->chosen = (const uint32_t *)c->in[4].data + head * n;
        a->n_chosen = (uint32_t)n;
        for (uint64_t i = 0; i < n; i++)
                if (a->chosen[i] >= compute_size(c, "n") * a->block_tokens ||
                    (i > 0 && a->chosen[i] <= a->chosen[i - 1]))
                        return compute_fail(c, "chosen positions ascend, and are in the table");
        return 0;
}

static int run(struct compute *c) {
        uint64_t heads = compute_size(c, "heads"), n_blocks = compute_size(c, "n");
        size_t size = npy_type_size(c->in[0].type), plane;
        struct kvd_attention a;

        if (prepare(c, &a) < 0)
                return -1;
        plane = (size_t)a.block_tokens * a.dim * size;
        for (uint32_t h = 0; h < heads; h++) {
                if (choose(c, &a, h) < 0)
                        return -1;
                if (h == 0)
                        a.scratch = compute_scratch(c, kvd_attend_scratch(&a) * sizeof *a.scratch);
                if (!a.scratch)
                        return -1;
                a.k_offset = h * plane;
                a.v_offset = (heads + h) * plane;
                a.q = (const float *)c->in[2].data + (size_t)h * a.group * a.dim;
                a.out = (float *)c->out[0].data + (size_t)h * a.group * a.dim;
                if (c->row->out[1].name) {
                        a.block_mass = (float *)c->out[1].data + h * n_blocks;
                        a.token_mass = (float *)c->out[2].data + h * n_blocks * a.block_tokens;
                }
                kvd_attend(&a);
        }
        return 0;
}

static int run_mass(struct compute *c) {
        uint64_t heads = compute_size(c, "heads"), n = compute_size(c, "n"), tokens = compute_size(c, "tokens");

        if (compute_make(c, 2, 2, (uint64_t[]){heads, n * tokens}) < 0)
                return -1;
        return run(c);
}

#define INPUTS                                                                                                         \
        {"pool", "pool,planes,heads,tokens,dim", COMPUTE_NUMBER, "blocks: keys, then values"},                         \
                {"table", "n", COMPUTE_IS(NPY_I32), "the blocks of the sequence, in order; -1: not resident, masked"}, \
                {"q", "queries,query_heads,dim", COMPUTE_IS(NPY_F32), "query heads in groups, one for each head"}
#define DELTAS                                                                                                         \
        {"deltas", "n", COMPUTE_IS(NPY_I32) | COMPUTE_OPTIONAL,                                                        \
         "how far each block stands from where its keys were made; queries are turned by -delta"}
#define CHOSEN(optional)                                                                                               \
        {"chosen", "heads,chosen", COMPUTE_IS(NPY_U32) | (optional), "the positions that are seen, ascending"}
#define PARAMS                                                                                                         \
        {"mask", "causal|none", "causal", "causal: the queries are the last of the keys, and see those up to theirs"}, \
                {"keys", "whole", "0", "how many of the table's slots hold a token; 0: all"},                          \
                {"scale", NULL, "0", "of scores; 0: 1 / sqrt(dim)"},                                                   \
                {"base", NULL, "10000", "of the frequencies base^(-2 i / dim) by which deltas turn"}
#define RESULT {"y", "queries,query_heads,dim", NPY_F32, "zeros for a query that sees nothing"}

const struct compute_row compute_attend[] = {
        {
                .name = "attend.dense",
                .text = "attention over all tokens of a block table",
                .in = {INPUTS, DELTAS},
                .param = {PARAMS},
                .out = {RESULT},
                .run = run,
        },
        {
                .name = "attend.mass",
                .text = "attention, and how much of it each block and token draws",
                .in = {INPUTS, DELTAS, CHOSEN(COMPUTE_OPTIONAL)},
                .param = {PARAMS},
                .out = {RESULT,
                        {"block_mass", "heads,n", NPY_F32, "sum over queries and their heads"},
                        {"token_mass", "heads,positions", NPY_F32, "likewise, by position"}},
                .run = run_mass,
        },
        {
                .name = "attend.sparse",
                .text = "attention over chosen tokens of a block table",
                .in = {INPUTS, DELTAS, CHOSEN(0)},
                .param = {PARAMS},
                .out = {RESULT},
                .run = run,
        },
        {.name = NULL},
};
