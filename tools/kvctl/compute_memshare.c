/* SPDX-License-Identifier: Apache-2.0 */
/* compute: what MemShare compares: bags of words, and blocks */
#include "tools/kvctl/compute.h"

#include <math.h>

#include "kernels/memshare.h"

/* ---- bags ---- */

static int run_bag(struct compute *c) {
        uint64_t n = c->in[0].count;
        uint32_t *ids = compute_scratch(c, n * sizeof *ids);
        uint16_t *counts = compute_scratch(c, n * sizeof *counts);
        struct kvd_bag bag;

        if (!ids || !counts || n > UINT32_MAX)
                return compute_fail(c, "out of memory");
        kvd_bag_make(&bag, c->in[0].data, (uint32_t)n, ids, counts);
        if (compute_make(c, 0, 1, &(uint64_t){bag.n}) < 0 || compute_make(c, 1, 1, &(uint64_t){bag.n}) < 0)
                return -1;
        for (uint32_t i = 0; i < bag.n; i++) {
                ((uint32_t *)c->out[0].data)[i] = ids[i];
                ((uint16_t *)c->out[1].data)[i] = counts[i];
        }
        return 0;
}

static int get_bag(struct compute *c, unsigned first, struct kvd_bag *bag) {
        const uint16_t *counts = c->in[first + 1].data;
        const uint32_t *ids = c->in[first].data;

        *bag = (struct kvd_bag){.ids = ids, .counts = counts, .n = (uint32_t)c->in[first].count};
        for (uint32_t i = 0; i < bag->n; i++) {
                if (i > 0 && ids[i] <= ids[i - 1])
                        return compute_fail(c, "%s is not ascending at %u", c->row->in[first].name, i);
                bag->squares += (double)counts[i] * counts[i];
        }
        return 0;
}

static int run_cosine(struct compute *c) {
        struct kvd_bag a, b;

        if (get_bag(c, 0, &a) < 0 || get_bag(c, 2, &b) < 0)
                return -1;
        *(double *)c->out[0].data = kvd_bag_cosine(&a, &b);
        return 0;
}

/* ---- blocks ---- */

static int get_shape(struct compute *c, struct kvd_memshare_shape *shape) {
        bool nhd = compute_choice(c, "order") == 1;
        uint64_t outer = compute_size(c, "outer"), inner = compute_size(c, "inner");

        *shape = (struct kvd_memshare_shape){
                .layers = (uint32_t)compute_size(c, "layers"),
                .heads = (uint32_t)(nhd ? inner : outer),
                .tokens = (uint32_t)(nhd ? outer : inner),
                .dim = (uint32_t)compute_size(c, "dim"),
                .order = nhd ? KVD_MEMSHARE_NHD : KVD_MEMSHARE_HND,
                .type = c->type,
        };
        if (compute_size(c, "planes") != 2)
                return compute_fail(c, "a block has 2 planes a layer, keys and values");
        if (c->in[0].count == 0)
                return compute_fail(c, "a block has at least one layer, head, token and dimension");
        return 0;
}

static int run_norms(struct compute *c) {
        struct kvd_memshare_shape shape;

        if (get_shape(c, &shape) < 0)
                return -1;
        c->ops->memshare->norms(&shape, c->in[0].data, c->out[0].data);
        return 0;
}

static int run_mean(struct compute *c) {
        struct kvd_memshare_shape shape;

        if (get_shape(c, &shape) < 0 ||
            compute_make(c, 0, 4, (uint64_t[]){shape.layers, 2, shape.heads, shape.dim}) < 0)
                return -1;
        c->ops->memshare->mean(&shape, c->in[0].data, c->out[0].data);
        return 0;
}

/* Cosines and sines of a rotation by delta, from the frequencies of an input, or else those of base. */
static int get_angles(struct compute *c, const struct npy *given, uint32_t dim, const float **cosine,
                      const float **sine, uint32_t *half) {
        uint32_t n = given->data ? (uint32_t)given->count : dim / 2;
        double *frequencies = compute_scratch(c, n * sizeof *frequencies), delta = compute_number(c, "delta");
        float *angles = compute_scratch(c, 2 * (size_t)n * sizeof *angles);

        if (!frequencies || !angles)
                return -1;
        if (delta != floor(delta) || fabs(delta) > 0x1p40)
                return compute_fail(c, "delta is a whole number of positions");
        if (2 * (uint64_t)n > dim)
                return compute_fail(c, "%u frequencies turn more than %u dimensions", n, dim);
        if (!given->data)
                kvd_memshare_frequencies(frequencies, n, compute_number(c, "base"));
        kvd_memshare_angles(given->data ?: frequencies, n, (int64_t)delta, angles, angles + n);
        *cosine = angles;
        *sine = angles + n;
        *half = n;
        return 0;
}

static int run_rotate(struct compute *c) {
        uint32_t n = (uint32_t)compute_size(c, "n"), dim = (uint32_t)compute_size(c, "dim"), half;
        const float *cosine, *sine;

        if (get_angles(c, &c->in[1], dim, &cosine, &sine, &half) < 0)
                return -1;
        c->ops->memshare->rotate(c->out[0].data, dim, c->in[0].data, dim, c->type, n, dim, cosine, sine, half);
        return 0;
}

static int get_order(struct compute *c, const struct npy *order, uint32_t layers, const uint32_t **ret) {
        uint8_t *seen = compute_scratch(c, layers);

        *ret = order->data;
        if (!seen)
                return -1;
        for (uint32_t i = 0; order->data && i < layers; i++) {
                if ((*ret)[i] >= layers || seen[(*ret)[i]]++)
                        return compute_fail(c, "layer_order does not have each layer once");
        }
        return 0;
}

static int summarise(struct compute *c, const struct kvd_memshare_shape *shape, struct kvd_memshare_block *block) {
        float *norms = compute_scratch(c, 2 * (size_t)shape->layers * sizeof *norms);
        float *means = compute_scratch(c, kvd_memshare_means(shape) * sizeof *means);

        if (!norms || !means)
                return -1;
        c->ops->memshare->norms(shape, block->data, norms);
        c->ops->memshare->mean(shape, block->data, means);
        block->norms = norms;
        block->means = means;
        return 0;
}

static int run_distance(struct compute *c) {
        static const enum kvd_memshare_metric metrics[] = {KVD_MEMSHARE_RELATIVE, KVD_MEMSHARE_FRO_NORM,
                                                           KVD_MEMSHARE_MEAN_L2};
        struct kvd_memshare_block a = {.data = c->in[0].data}, b = {.data = c->in[1].data};
        struct kvd_memshare_shape shape;
        struct kvd_memshare_query query = {
                .shape = &shape,
                .metric = metrics[compute_choice(c, "metric")],
                .limit = compute_number(c, "limit"),
        };

        if (get_shape(c, &shape) < 0 || get_order(c, &c->in[2], shape.layers, &query.order) < 0 ||
            summarise(c, &shape, &a) < 0 || summarise(c, &shape, &b) < 0)
                return -1;
        if (compute_choice(c, "align") == 1 &&
            get_angles(c, &c->in[3], shape.dim, &query.cosine, &query.sine, &query.half) < 0)
                return -1;
        *(double *)c->out[0].data = c->ops->memshare->distance(&query, &a, &b, c->out[1].data);
        *(double *)c->out[2].data = c->ops->memshare->bound(&query, &a, &b);
        return 0;
}

#define BLOCK(name, text) {name, "layers,planes,outer,inner,dim", COMPUTE_NUMBER, text}
#define ORDER {"order", "hnd|nhd", "hnd", "outer and inner are heads and tokens, or tokens and heads"}
#define DELTA(what)                                                                                                   \
        {"delta", NULL, "0", what}, {"base", NULL, "10000", "of the frequencies base^(-2 i / dim), if none are given"}
#define FREQUENCIES                                                                                                   \
        {"frequencies", "half", COMPUTE_IS(NPY_F64) | COMPUTE_OPTIONAL,                                               \
         "radians a position of the pairs (i, i + half); dimensions from 2 half on are not turned"}

const struct compute_row compute_memshare[] = {
        {
                .name = "memshare.bag",
                .text = "the bag of words of a list of tokens",
                .in = {{"tokens", "n", COMPUTE_IS(NPY_U32), "token ids"}},
                .out = {{"ids", "words", NPY_U32, "ascending, each once"},
                        {"counts", "words", NPY_U16, "how often; 65535 and more are 65535"}},
                .run = run_bag,
        },
        {
                .name = "memshare.cosine",
                .text = "the cosine of two bags of words",
                .in = {{"ids_a", "a", COMPUTE_IS(NPY_U32), "as memshare.bag makes them"},
                       {"counts_a", "a", COMPUTE_IS(NPY_U16), ""},
                       {"ids_b", "b", COMPUTE_IS(NPY_U32), ""},
                       {"counts_b", "b", COMPUTE_IS(NPY_U16), ""}},
                .out = {{"cosine", "", NPY_F64, "0 to 1"}},
                .run = run_cosine,
        },
        {
                .name = "memshare.norms",
                .text = "the norms of a block's keys and values, layer by layer",
                .in = {BLOCK("block", "for each layer its keys, then its values")},
                .param = {ORDER},
                .out = {{"norms", "layers,planes", NPY_F32, "Frobenius norms"}},
                .run = run_norms,
        },
        {
                .name = "memshare.mean",
                .text = "the means over a block's tokens",
                .in = {BLOCK("block", "for each layer its keys, then its values")},
                .param = {ORDER},
                .out = {{"means", "layers,planes,heads,dim", NPY_F32, "for each layer its keys', its values'"}},
                .run = run_mean,
        },
        {
                .name = "memshare.rotate",
                .text = "turns rows by delta positions (RoPE, half-split)",
                .in = {{"x", "n,dim", COMPUTE_NUMBER, "queries or keys"}, FREQUENCIES},
                .param = {DELTA("positions; a query that meets a block with delta is turned by -delta")},
                .out = {{"y", "n,dim", NPY_F32, "the turned rows"}},
                .run = run_rotate,
        },
        {
                .name = "memshare.distance",
                .text = "the distance of two blocks",
                .in = {BLOCK("a", "for each layer its keys, then its values"),
                       BLOCK("b", "likewise; where they align, its keys are turned"),
                       {"layer_order", "layers", COMPUTE_IS(NPY_U32) | COMPUTE_OPTIONAL, "in which layers are read"},
                       FREQUENCIES},
                .param = {{"metric", "relative|fro_norm|mean_l2", "relative", "fro_norm is the paper's"},
                          {"limit", NULL, "inf", "a distance above it is inf, and not all layers are read"},
                          {"align", "none|rope", "none", "rope: b's keys are turned by delta before"},
                          DELTA("position of a minus position of b"),
                          ORDER},
                .out = {{"distance", "", NPY_F64, "mean over the layers"},
                        {"layers", "", NPY_U32, "how many were read"},
                        {"bound", "", NPY_F64, "what norms and means alone say: not above the distance"}},
                .run = run_distance,
        },
        {.name = NULL},
};
