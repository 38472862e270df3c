/* SPDX-License-Identifier: Apache-2.0 */
/* compute: count sketches (KVReviver) */
#include "tools/kvctl/compute.h"

#include <string.h>

#include "kernels/sketch.h"

/* The hash of a row's parameters; rows and columns are a shape's or parameters. */
static int get_hash(struct compute *c, struct kvd_sketch_hash *hash) {
        uint64_t rows = compute_size(c, "rows"), columns = compute_size(c, "columns");

        if (rows < 1 || rows > KVD_SKETCH_ROWS_MAX)
                return compute_fail(c, "a sketch has 1 to %u rows, not %llu", KVD_SKETCH_ROWS_MAX,
                                    (unsigned long long)rows);
        if (columns < 1 || columns > KVD_SKETCH_COLUMN + 1u)
                return compute_fail(c, "a sketch has 1 to 2^30 columns, not %llu", (unsigned long long)columns);
        *hash = (struct kvd_sketch_hash){
                compute_choice(c, "hash") ? KVD_SKETCH_UNIFORM : KVD_SKETCH_PERMUTATION,
                (uint32_t)rows,
                (uint32_t)columns,
                compute_whole(c, "salt"),
        };
        return 0;
}

static int get_places(struct compute *c, const struct npy *ordinals, uint32_t **places) {
        struct kvd_sketch_hash hash;
        int r = get_hash(c, &hash);

        if (r < 0)
                return r;
        if (ordinals->count > UINT32_MAX)
                return compute_fail(c, "%llu tokens are too many", (unsigned long long)ordinals->count);
        *places = compute_scratch(c, ordinals->count * hash.rows * sizeof **places);
        if (!*places)
                return -1;
        kvd_sketch_place(&hash, ordinals->data, (uint32_t)ordinals->count, *places);
        return 0;
}

static struct kvd_sketch_part get_part(const struct compute *c, void *cells, const struct npy *mean) {
        static const uint32_t signs[] = {0, KVD_SKETCH_KEY_SIGN, KVD_SKETCH_VALUE_SIGN};
        uint32_t dim = (uint32_t)compute_size(c, "dim");

        return (struct kvd_sketch_part){
                .cells = cells,
                .stride = dim,
                .rows = (uint32_t)compute_size(c, "rows"),
                .columns = (uint32_t)compute_size(c, "columns"),
                .dim = dim,
                .sign = signs[compute_choice(c, "sign")],
                .mean = mean->data,
        };
}

/* n vectors of dim numbers that lie one after the other, as one block. */
static struct kvd_sketch_vectors one_block(struct compute *c, uint8_t **block, enum kvd_number type) {
        return (struct kvd_sketch_vectors){block, 0, compute_size(c, "dim"), UINT32_MAX, type};
}

static int run_hash(struct compute *c) {
        int8_t *key = c->out[1].data, *value = c->out[2].data;
        uint32_t *column = c->out[0].data, *places;
        int r = get_places(c, &c->in[0], &places);

        for (uint64_t i = 0; r == 0 && i < c->out[0].count; i++) {
                column[i] = places[i] & KVD_SKETCH_COLUMN;
                key[i] = places[i] & KVD_SKETCH_KEY_SIGN ? -1 : 1;
                value[i] = places[i] & KVD_SKETCH_VALUE_SIGN ? -1 : 1;
        }
        return r;
}

static int add(struct compute *c, float weight) {
        struct kvd_sketch_part part = get_part(c, c->out[0].data, &c->in[3]);
        uint8_t *block = c->in[2].data;
        struct kvd_sketch_vectors vectors = one_block(c, &block, c->type);
        uint32_t *places;
        int r = get_places(c, &c->in[1], &places);

        if (r < 0)
                return r;
        memcpy(c->out[0].data, c->in[0].data, npy_bytes(&c->in[0]));
        c->ops->sketch->insert(&part, places, (uint32_t)compute_size(c, "n"), &vectors, weight);
        return 0;
}

static int run_insert(struct compute *c) {
        return add(c, 1.0f);
}

static int run_delete(struct compute *c) {
        return add(c, -1.0f);
}

/* One token after the other: each estimate is what the deletions before it left. */
static int run_delete_estimate(struct compute *c) {
        struct kvd_sketch_part part = get_part(c, c->out[0].data, &c->in[2]);
        uint8_t *block = compute_scratch(c, part.dim * sizeof(float));
        struct kvd_sketch_vectors vectors = one_block(c, &block, KVD_NUMBER_F32);
        uint32_t *places, n = (uint32_t)compute_size(c, "n");
        int r = get_places(c, &c->in[1], &places);

        if (r < 0 || !block)
                return -1;
        memcpy(c->out[0].data, c->in[0].data, npy_bytes(&c->in[0]));
        for (uint32_t i = 0; i < n; i++, places += part.rows) {
                c->ops->sketch->query(&part, places, 1, &vectors, 1.0f);
                c->ops->sketch->insert(&part, places, 1, &vectors, -1.0f);
        }
        return 0;
}

static int run_query(struct compute *c) {
        struct kvd_sketch_part part = get_part(c, c->in[0].data, &c->in[2]);
        double load = compute_number(c, "tokens") / ((double)part.rows * part.columns);
        uint8_t *block = c->out[0].data;
        struct kvd_sketch_vectors vectors = one_block(c, &block, KVD_NUMBER_F32);
        uint32_t *places;
        int r = get_places(c, &c->in[1], &places);

        if (r < 0)
                return r;
        if (!(load >= 0) || !(compute_number(c, "shrink") >= 0))
                return compute_fail(c, "tokens and shrink are not negative");
        c->ops->sketch->query(&part, places, (uint32_t)compute_size(c, "n"), &vectors,
                              kvd_sketch_shrink(compute_number(c, "shrink"), load));
        return 0;
}

static int run_median(struct compute *c) {
        uint64_t rows = compute_size(c, "rows"), n = compute_size(c, "n");

        if (rows < 1 || rows > KVD_SKETCH_ROWS_MAX)
                return compute_fail(c, "a sketch has 1 to %u rows, not %llu", KVD_SKETCH_ROWS_MAX,
                                    (unsigned long long)rows);
        c->ops->sketch->median(c->out[0].data, c->in[0].data, n, (uint32_t)rows, n);
        return 0;
}

#define HASH                                                                                                          \
        {"hash", "permutation|uniform", "permutation", "collisions only between rounds of columns tokens, or any"},   \
                {"salt", "whole", "0", "of the sketch"}
#define SIGN                                                                                                          \
        {"sign", "none|key|value", "none", "none: the paper's keys; else the token's sign for keys, or for values"}
#define CELLS {"cells", "rows,columns,dim", COMPUTE_IS(NPY_F32), "the sketch; 1 to 8 rows"}
#define ORDINALS {"ordinals", "n", COMPUTE_IS(NPY_U64), "numbers of the tokens: 0, 1, 2, ... for permutation"}
#define VECTORS {"vectors", "n,dim", COMPUTE_NUMBER, "their keys or values"}
#define MEAN {"mean", "dim", COMPUTE_IS(NPY_F32) | COMPUTE_OPTIONAL, "the centre, taken off before and added after"}
#define AFTERWARDS {"cells", "rows,columns,dim", NPY_F32, "the sketch afterwards"}

const struct compute_row compute_sketch[] = {
        {
                .name = "sketch.hash",
                .text = "the column and the signs of tokens in each row",
                .in = {ORDINALS},
                .param = {HASH, {"rows", "whole", "3", "1 to 8"}, {"columns", "whole", NULL, "1 to 2^30"}},
                .out = {{"columns", "n,rows", NPY_U32, "columns"},
                        {"key", "n,rows", NPY_I8, "signs of keys, -1 or 1"},
                        {"value", "n,rows", NPY_I8, "signs of values"}},
                .run = run_hash,
        },
        {
                .name = "sketch.insert",
                .text = "adds tokens to a sketch",
                .in = {CELLS, ORDINALS, VECTORS, MEAN},
                .param = {HASH, SIGN},
                .out = {AFTERWARDS},
                .run = run_insert,
        },
        {
                .name = "sketch.delete",
                .text = "takes tokens out of a sketch, by the vectors that were inserted",
                .in = {CELLS, ORDINALS, VECTORS, MEAN},
                .param = {HASH, SIGN},
                .out = {AFTERWARDS},
                .run = run_delete,
        },
        {
                .name = "sketch.delete_estimate",
                .text = "takes tokens out by what a query finds of them: the paper's, harms others",
                .in = {CELLS, ORDINALS, MEAN},
                .param = {HASH, SIGN},
                .out = {AFTERWARDS},
                .run = run_delete_estimate,
        },
        {
                .name = "sketch.query",
                .text = "estimates of tokens: the median over the rows",
                .in = {CELLS, ORDINALS, MEAN},
                .param = {HASH, SIGN,
                          {"shrink", NULL, "0", "divides by 1 + shrink load; 1.35 has the least squared error"},
                          {"tokens", NULL, "0", "how many are in the sketch, for the load"}},
                .out = {{"vectors", "n,dim", NPY_F32, "the estimates"}},
                .run = run_query,
        },
        {
                .name = "sketch.median",
                .text = "the median of each column; NaN where there is a NaN in it",
                .in = {{"x", "rows,n", COMPUTE_IS(NPY_F32), "1 to 8 rows"}},
                .out = {{"median", "n", NPY_F32, "of an even number the mean of the middle two"}},
                .run = run_median,
        },
        {.name = NULL},
};
