/* SPDX-License-Identifier: Apache-2.0 */
/* compute: labels, critical tokens and who shares them (HShare) */
#include "tools/kvctl/compute.h"

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/hshare.h"

/* ---- labels ---- */

static int run_channels(struct compute *c) {
        uint32_t dim = (uint32_t)compute_size(c, "dim"), n = (uint32_t)compute_size(c, "channels");
        uint32_t group = (uint32_t)compute_size(c, "group");

        if (n > dim || n > KVD_LABEL_CHANNELS_MAX || dim > UINT16_MAX)
                return compute_fail(c, "%u channels of %u dimensions", n, dim);
        c->ops->hshare->weigh(c->out[1].data, c->in[0].data, (size_t)group * dim, group, c->in[1].data, dim, c->type,
                              (uint32_t)compute_size(c, "tokens"), dim);
        kvd_label_channels(c->out[1].data, dim, n, c->out[0].data);
        return 0;
}

static int check_channels(struct compute *c, const uint16_t *channels) {
        uint64_t n = compute_size(c, "channels");

        if (n == 0 || n > KVD_LABEL_CHANNELS_MAX)
                return compute_fail(c, "a label has 1 to %u channels", KVD_LABEL_CHANNELS_MAX);
        for (uint64_t i = 0; i < n; i++)
                if (channels[i] >= compute_size(c, "dim"))
                        return compute_fail(c, "there is no dimension %u", channels[i]);
        return 0;
}

static int run_label(struct compute *c) {
        uint32_t n = (uint32_t)compute_size(c, "channels"), dim = (uint32_t)compute_size(c, "dim");
        uint64_t tokens = compute_size(c, "tokens");

        if (check_channels(c, c->in[1].data) < 0 ||
            compute_make(c, 0, 2, (uint64_t[]){tokens, kvd_label_bytes(n)}) < 0)
                return -1;
        c->ops->hshare->label(c->out[0].data, c->in[0].data, dim, c->type, (uint32_t)tokens, c->in[1].data, n);
        return 0;
}

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

static int run_scores(struct compute *c) {
        uint64_t tokens = compute_size(c, "tokens"), n = compute_size(c, "n") * tokens;
        uint64_t bytes = compute_size(c, "bytes"), first = compute_whole(c, "first");
        uint64_t dim = compute_size(c, "dim"), queries = compute_size(c, "queries");
        uint32_t channels = (uint32_t)compute_size(c, "channels");
        struct kvd_label_query *labels = compute_scratch(c, queries * sizeof *labels);
        const uint8_t *const *blocks = get_table(c, tokens * bytes);

        if (!labels || !blocks || check_channels(c, c->in[2].data) < 0)
                return -1;
        if (bytes != kvd_label_bytes(channels) || tokens == 0)
                return compute_fail(c, "a label of %u channels has %zu bytes", channels, kvd_label_bytes(channels));
        if (first > n || n > UINT32_MAX)
                return compute_fail(c, "the table has not as many positions");
        if (compute_make(c, 0, 2, (uint64_t[]){queries, n - first}) < 0)
                return -1;
        for (uint64_t g = 0; g < queries; g++)
                c->ops->hshare->query(labels + g, (const float *)c->in[3].data + g * dim, c->in[2].data, channels);
        c->ops->hshare->scores(c->out[0].data, n - first, blocks, 0, (uint32_t)tokens, channels, labels,
                               (uint32_t)queries, (uint32_t)first, (uint32_t)(n - first));
        return 0;
}

/* ---- critical tokens ---- */

static int run_aggregate(struct compute *c) {
        uint32_t n = (uint32_t)compute_size(c, "n"), group = (uint32_t)compute_size(c, "group");
        float *scores = compute_scratch(c, npy_bytes(&c->in[0]));

        if (!scores || group == 0 || !(compute_number(c, "scale") > 0.0))
                return scores ? compute_fail(c, "at least one query head, and a scale above 0") : -1;
        memcpy(scores, c->in[0].data, npy_bytes(&c->in[0]));
        c->ops->hshare->aggregate(c->out[0].data, scores, n, n, group, (float)compute_number(c, "scale"),
                                  compute_choice(c, "how") == 0 ? KVD_AGGREGATE_SUM : KVD_AGGREGATE_MAX);
        return 0;
}

static int run_select(struct compute *c) {
        uint64_t then = compute_size(c, "n"), now = compute_whole(c, "now");
        struct kvd_window w = {(uint32_t)compute_whole(c, "sinks"), (uint32_t)compute_whole(c, "recent"),
                               (uint32_t)compute_whole(c, "middle")};
        uint32_t from, n, m = 0, *middle, *scratch, *all;

        now = now ? now : then;
        if (now < then || now > UINT32_MAX)
                return compute_fail(c, "now is not before the tokens were chosen");
        scratch = compute_scratch(c, 3 * then * sizeof *scratch);
        middle = compute_scratch(c, then * sizeof *middle);
        all = compute_scratch(c, now * sizeof *all);
        if (!scratch || !middle || !all)
                return -1;
        n = kvd_window_middle(&w, (uint32_t)then, &from);
        if (n > 0)
                m = c->ops->hshare->top(middle, (const float *)c->in[0].data + from, n, w.middle, from, scratch);
        n = kvd_window_positions(&w, middle, m, (uint32_t)then, (uint32_t)now, all);
        if (compute_make(c, 0, 1, (uint64_t[]){n}) < 0)
                return -1;
        memcpy(c->out[0].data, all, n * sizeof *all);
        return 0;
}

/* ---- sharing ---- */

static int run_overlap(struct compute *c) {
        uint64_t items = compute_size(c, "items");
        uint32_t rows = (uint32_t)compute_size(c, "rows"), words = (uint32_t)compute_size(c, "words");
        uint32_t *counts = compute_scratch(c, (items + 1) * rows * sizeof *counts), *both = counts + items * rows;
        const uint64_t *bits = c->in[0].data;
        size_t size = (size_t)rows * words;
        float *similarity = c->out[0].data;

        if (!counts)
                return -1;
        for (uint64_t i = 0; i < items; i++) {
                c->ops->hshare->overlap(counts + i * rows, bits + i * size, bits + i * size, rows, words);
                for (uint64_t j = 0; j < i; j++) {
                        c->ops->hshare->overlap(both, bits + i * size, bits + j * size, rows, words);
                        similarity[i * items + j] = (float)kvd_share_similarity(both, counts + i * rows,
                                                                                counts + j * rows, rows);
                }
        }
        return 0;
}

static int run_share(struct compute *c) {
        uint64_t n = compute_size(c, "n"), k = compute_whole(c, "k");
        float *scratch = compute_scratch(c, n * sizeof *scratch);

        if (!scratch || compute_size(c, "n2") != n)
                return scratch ? compute_fail(c, "similarity is not square") : -1;
        if (compute_number(c, "ratio") >= 0.0)
                k = kvd_share_count(compute_number(c, "ratio"), (uint32_t)n);
        kvd_share_plan(c->in[0].data, (uint32_t)n, (uint32_t)MIN(k, n), (enum kvd_share)compute_choice(c, "algo"),
                       c->out[0].data, scratch);
        return 0;
}

static int run_check(struct compute *c) {
        uint64_t n = compute_size(c, "n");
        const uint32_t *source = c->in[0].data;

        for (uint64_t i = 0; i < n; i++)
                if (source[i] >= n)
                        return compute_fail(c, "%u is none of %llu", source[i], (unsigned long long)n);
        *(uint32_t *)c->out[0].data = kvd_share_check(source, (uint32_t)n);
        return 0;
}

static int run_chooses(struct compute *c) {
        uint64_t layers = compute_size(c, "layers"), heads = compute_size(c, "heads");
        uint64_t queries = compute_whole(c, "queries"), first = compute_whole(c, "first");
        uint64_t every = compute_whole(c, "every");
        uint8_t *out;

        if (every == 0 || compute_make(c, 0, 3, (uint64_t[]){queries, layers, heads}) < 0)
                return every ? -1 : compute_fail(c, "every is 1 or more queries");
        out = c->out[0].data;
        for (uint64_t t = 0; t < queries; t++)
                for (uint32_t l = 0; l < layers; l++)
                        for (uint32_t h = 0; h < heads; h++)
                                *out++ = kvd_share_chooses(c->in[0].data, c->in[1].data, (uint32_t)heads, l, h,
                                                           (uint32_t)(first + t), (uint32_t)every);
        return 0;
}

#define CHANNELS {"channels", "channels", COMPUTE_IS(NPY_U16), "dimensions"}

const struct compute_row compute_hshare[] = {
        {
                .name = "hshare.channels",
                .text = "the dimensions that matter most for q . k, from a calibration run",
                .in = {{"q", "tokens,group,dim", COMPUTE_IS(NPY_F32), "the query heads of one KV head"},
                       {"k", "tokens,dim", COMPUTE_NUMBER, "at the same positions"}},
                .param = {{"channels", "whole", "32", "how many"}},
                .out = {{"channels", "channels", NPY_U16, "ascending"},
                        {"weights", "dim", NPY_F32, "sum of |q k| over tokens and query heads"}},
                .run = run_channels,
        },
        {
                .name = "hshare.label",
                .text = "the labels of keys: a few channels at 4 bit",
                .in = {{"k", "tokens,dim", COMPUTE_NUMBER, "keys of one head"}, CHANNELS},
                .out = {{"labels", "tokens,bytes", NPY_U8,
                         "codes, two a byte, the even channel below; then least and step as f16"}},
                .run = run_label,
        },
        {
                .name = "hshare.scores",
                .text = "estimates of q . k from labels",
                .in = {{"labels", "pool,tokens,bytes", COMPUTE_IS(NPY_U8), "of one head, by block"},
                       {"table", "n", COMPUTE_IS(NPY_I32), "the blocks of the sequence, in order; -1: none, -inf"},
                       CHANNELS,
                       {"q", "queries,dim", COMPUTE_IS(NPY_F32), "query heads"}},
                .param = {{"first", "whole", "0", "position to start at"}},
                .out = {{"scores", "queries,positions", NPY_F32, "from first to the table's end"}},
                .run = run_scores,
        },
        {
                .name = "hshare.aggregate",
                .text = "one score a token for the query heads of a KV head",
                .in = {{"scores", "group,n", COMPUTE_IS(NPY_F32), "of each query head"}},
                .param = {{"how", "sum|max", "sum", "of the heads' softmaxes; one head's scores stay as they are"},
                          {"scale", NULL, "1", "of scores before the softmax"}},
                .out = {{"score", "n", NPY_F32, ""}},
                .run = run_aggregate,
        },
        {
                .name = "hshare.select",
                .text = "the critical tokens: sinks, the top of the middle, and what is recent",
                .in = {{"scores", "n", COMPUTE_IS(NPY_F32), "of all tokens; only the middle's are looked at"}},
                .param = {{"sinks", "whole", "16", "x, at the start"},
                          {"recent", "whole", "64", "y, at the end"},
                          {"middle", "whole", "432", "z, of the others"},
                          {"now", "whole", "0", "tokens by now, all recent that came after the scores; 0: none did"}},
                .out = {{"positions", "chosen", NPY_U32, "ascending"}},
                .run = run_select,
        },
        {
                .name = "hshare.overlap",
                .text = "how alike sets of tokens are, item by item",
                .in = {{"bits", "items,rows,words", COMPUTE_IS(NPY_U64),
                        "layers or heads; a row is a set (of a query and head), bit i of word w is token 64 w + i"}},
                .out = {{"similarity", "items,items", NPY_F32,
                         "|A and B| / max(|A|, |B|), mean over rows; below the diagonal"}},
                .run = run_overlap,
        },
        {
                .name = "hshare.share",
                .text = "who uses whose critical tokens",
                .in = {{"similarity", "n,n2", COMPUTE_IS(NPY_F32), "square; read below the diagonal"}},
                .param = {{"k", "whole", "0", "how many share"},
                          {"ratio", NULL, "-1", "instead of k: the fraction that does not, from 0"},
                          {"algo", "greedy|greedy_root|star", "greedy_root",
                           "as printed, as in the official code, or by what all get"}},
                .out = {{"source", "n", NPY_U32, "itself, or an earlier one"}},
                .run = run_share,
        },
        {
                .name = "hshare.check",
                .text = "whether a plan of sharing may be used",
                .in = {{"source", "n", COMPUTE_IS(NPY_U32), "as hshare.share makes it"}},
                .out = {{"wrong", "", NPY_U32, "the first whose source is later or shares itself; n if none"}},
                .run = run_check,
        },
        {
                .name = "hshare.chooses",
                .text = "who chooses critical tokens of its own, query by query",
                .in = {{"layer_source", "layers", COMPUTE_IS(NPY_U32), ""},
                       {"head_source", "layers,heads", COMPUTE_IS(NPY_U32), "in the same layer"}},
                .param = {{"queries", "whole", NULL, "how many"},
                          {"first", "whole", "0", "tokens at the first query"},
                          {"every", "whole", "1", "queries that share among each other"}},
                .out = {{"chooses", "lengths,layers,heads", NPY_U8, "1 or 0"}},
                .run = run_chooses,
        },
        {.name = NULL},
};
