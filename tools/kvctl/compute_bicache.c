/* SPDX-License-Identifier: Apache-2.0 */
/* compute: similarities, tables and refreshes (BiCache) */
#include "tools/kvctl/compute.h"

#include <string.h>

#include "kernels/bicache.h"
#include "kernels/btable.h"

/* The inputs of index i and i + 2, summed over heads. */
static struct kvd_products *get_products(struct compute *c, unsigned i) {
        uint32_t tokens = (uint32_t)compute_size(c, "tokens"), dim = (uint32_t)compute_size(c, "dim");
        size_t plane = (size_t)tokens * dim * npy_type_size(c->in[i].type);
        struct kvd_products *products = compute_scratch(c, tokens * sizeof *products);

        for (uint64_t h = 0; products && h < compute_size(c, "heads"); h++)
                c->ops->bicache->products(products, (char *)c->in[i].data + h * plane, dim,
                                          (char *)c->in[i + 2].data + h * plane, dim, c->type, tokens, dim);
        return products;
}

static int run_similarity(struct compute *c) {
        uint32_t tokens = (uint32_t)compute_size(c, "tokens");
        struct kvd_products *keys = get_products(c, 0), *values = get_products(c, 1);

        if (!keys || !values)
                return -1;
        *(double *)c->out[0].data = compute_choice(c, "kind") == 0 ? kvd_similarity_flat(keys, values, tokens) :
                                                                     kvd_similarity_token_mean(keys, values, tokens);
        return 0;
}

static enum kvd_ratio ratio_of(struct compute *c, const char *param) {
        return compute_choice(c, param) == 0 ? KVD_RATIO_INCLUDE_GEN : KVD_RATIO_PROMPT_ONLY;
}

static int run_table(struct compute *c) {
        uint32_t layers = (uint32_t)compute_size(c, "layers");
        struct kvd_bprofile profile = {.n_layers = layers, .tau = (float)compute_number(c, "tau")};
        const uint32_t *percent = c->in[0].data;
        struct kvd_btable table;

        profile.sum = compute_scratch(c, KVD_BTABLE_STEPS * (size_t)layers * sizeof *profile.sum);
        if (!profile.sum)
                return -1;
        for (uint64_t i = 0; i < c->in[0].count; i++)
                if (kvd_bprofile_add(&profile, percent[i], (const float *)c->in[1].data + i * layers) < 0)
                        return compute_fail(c, "request %llu has no percentage up to 100, or no finite similarities",
                                            (unsigned long long)i);
        kvd_btable_build(&profile, compute_choice(c, "estimator") == 0 ? KVD_ESTIMATE_MEAN_FIRST : KVD_ESTIMATE_MEAN_B,
                         &table);
        if (compute_make(c, 0, 2, (uint64_t[]){table.n, 2}) < 0)
                return -1;
        for (uint32_t i = 0; i < table.n; i++) {
                ((uint32_t *)c->out[0].data)[2 * i] = table.steps[i].percent;
                ((uint32_t *)c->out[0].data)[2 * i + 1] = table.steps[i].b;
        }
        return 0;
}

static int run_lookup(struct compute *c) {
        struct kvd_btable table = {.ratio = ratio_of(c, "table_ratio"), .n = (uint32_t)compute_size(c, "steps")};
        const uint32_t *steps = c->in[0].data, *percent = c->in[1].data;
        int b;

        if (compute_size(c, "pair") != 2 || compute_size(c, "steps") > KVD_BTABLE_STEPS)
                return compute_fail(c, "a table has up to %u pairs of percent and b", KVD_BTABLE_STEPS);
        for (uint32_t i = 0; i < table.n; i++)
                table.steps[i] = (struct kvd_bstep){(uint8_t)steps[2 * i], (uint16_t)steps[2 * i + 1]};
        for (uint64_t i = 0; i < c->in[1].count; i++) {
                b = kvd_btable_lookup(&table, ratio_of(c, "ratio"), percent[i]);
                if (b < 0)
                        return compute_fail(c, "the table is for the other kind of ratio");
                ((uint32_t *)c->out[0].data)[i] = (uint32_t)b;
        }
        return 0;
}

static int run_ratio(struct compute *c) {
        const uint64_t *prefix = c->in[0].data, *input = c->in[1].data;

        for (uint64_t i = 0; i < c->in[0].count; i++) {
                if (input[i] == 0 || prefix[i] > input[i])
                        return compute_fail(c, "a prefix of %llu of %llu tokens", (unsigned long long)prefix[i],
                                            (unsigned long long)input[i]);
                ((uint32_t *)c->out[0].data)[i] = kvd_ratio_percent(prefix[i], input[i]);
        }
        return 0;
}

static int run_refresh(struct compute *c) {
        uint64_t steps = compute_whole(c, "steps"), delta = compute_whole(c, "delta");
        uint32_t n = 0;

        if (delta == 0 || delta > UINT32_MAX || steps > UINT32_MAX)
                return compute_fail(c, "delta is 1 or more steps");
        if (compute_make(c, 0, 1, (uint64_t[]){kvd_refresh_count((uint32_t)steps, (uint32_t)delta)}) < 0)
                return -1;
        for (uint32_t t = 1; t <= steps; t++)
                if (kvd_refresh_due(t, (uint32_t)delta))
                        ((uint32_t *)c->out[0].data)[n++] = t;
        return 0;
}

#define KV(name, text) {name, "heads,tokens,dim", COMPUTE_NUMBER, text}
#define RATIO(name, text) {name, "include_gen|prompt_only", "include_gen", text}

const struct compute_row compute_bicache[] = {
        {
                .name = "bicache.similarity",
                .text = "how alike two computations of a layer's keys and values are",
                .in = {KV("keys", "computed alone"), KV("values", "computed alone"),
                       KV("keys_ref", "computed with the whole input"), KV("values_ref", "likewise")},
                .param = {{"kind", "flat|token_mean", "token_mean",
                           "flat (paper): one vector of all; token_mean (official code): each token's, then the mean"}},
                .out = {{"similarity", "", NPY_F64, "cosine"}},
                .run = run_similarity,
        },
        {
                .name = "bicache.table",
                .text = "the table from r to b, from a profile's similarities",
                .in = {{"percent", "requests", COMPUTE_IS(NPY_U32), "each request's r"},
                       {"similarity", "requests,layers", COMPUTE_IS(NPY_F32), "by layer"}},
                .param = {{"tau", NULL, "0.97", "threshold"},
                          {"estimator", "mean_first|mean_b", "mean_first",
                           "mean_b (paper): mean of each request's b, similarity >= tau; mean_first (official code): b "
                           "of the mean similarity, > tau"}},
                .out = {{"table", "steps,pair", NPY_U32, "percent and b, both ascending"}},
                .run = run_table,
        },
        {
                .name = "bicache.lookup",
                .text = "how many layers a table lets be used",
                .in = {{"table", "steps,pair", COMPUTE_IS(NPY_U32), "as bicache.table makes it"},
                       {"percent", "n", COMPUTE_IS(NPY_U32), "r"}},
                .param = {RATIO("table_ratio", "what the table's r is a fraction of"), RATIO("ratio", "the request's")},
                .out = {{"b", "n", NPY_U32, "1 below the first step"}},
                .run = run_lookup,
        },
        {
                .name = "bicache.ratio",
                .text = "r in percent, ties to even",
                .in = {{"prefix", "n", COMPUTE_IS(NPY_U64), "tokens"}, {"input", "n", COMPUTE_IS(NPY_U64), "tokens"}},
                .out = {{"percent", "n", NPY_U32, "0 to 100"}},
                .run = run_ratio,
        },
        {
                .name = "bicache.refresh",
                .text = "the denoising steps at which the deep layers are computed again",
                .param = {{"steps", "whole", NULL, "of denoising"}, {"delta", "whole", "16", "from one to the next"}},
                .out = {{"due", "refreshes", NPY_U32, "steps, from 1"}},
                .run = run_refresh,
        },
        {.name = NULL},
};
