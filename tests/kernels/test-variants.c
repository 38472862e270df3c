/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The kernels of all methods: every variant gives the scalar one's bytes, whatever the sizes,
 * strides and types are, and touches nothing outside its arrays, which end at guard pages. A kernel
 * runs with each variant after the same seed, so that it makes the same arguments each time. The
 * values themselves are checked in tests/kernels/methods.
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/kvd_kernels.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

enum { OFFSET = 12 /* bytes before the first row of a block */, MOST_RESULTS = 30 };

static const struct kvd_ops *scalar;

struct results { /* of one variant */
        const struct kvd_ops *ops;
        void *at[MOST_RESULTS];
        size_t bytes[MOST_RESULTS], n;
};

static void keep(struct results *r, void *at, size_t bytes) {
        if (r->n == MOST_RESULTS)
                ck_abort_msg("too many results");
        r->bytes[r->n] = bytes;
        r->at[r->n++] = at;
}

static void *result(struct results *r, size_t bytes) {
        void *at = buffer(bytes);

        keep(r, at, bytes);
        return at;
}

/* ---- arguments ---- */

#define ONE_OF(...) \
        __extension__({ \
                static const uint32_t of_[] = {__VA_ARGS__}; \
                of_[random_u32() % ARRAY_SIZE(of_)]; \
        })

static uint32_t any_size(void) { /* mostly next to a width of registers or tiles */
        return random_u32() % 4 == 0 ? 1 + random_u32() % 270 :
                                       ONE_OF(1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 47, 48, 64, 65,
                                              80, 96, 127, 128, 129, 131, 160, 256);
}

static enum kvd_number any_type(void) {
        return ONE_OF(KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16, KVD_NUMBER_Q8,
                      KVD_NUMBER_Q4);
}

/* The nearest number of dimensions that rows of the type can have. */
static uint32_t fitting(uint32_t dim, enum kvd_number type) {
        return type >= KVD_NUMBER_Q8 ? ALIGN_UP(dim, 2) : dim;
}

/* n rows of x, stride bytes apart; the memory ends with the last one. */
static void *typed(const float *x, uint32_t n, size_t stride, uint32_t dim, enum kvd_number type) {
        uint8_t *to = buffer((n - 1) * stride + kvd_row_bytes(type, dim));

        for (uint32_t i = 0; i < n; i++)
                scalar->write_row(to + i * stride, x + (size_t)i * dim, dim, type);
        return to;
}

static void *numbers(uint32_t n, size_t stride, uint32_t dim, enum kvd_number type) {
        return typed(random_floats((size_t)n * dim), n, stride, dim, type);
}

static uint8_t *random_bytes(size_t n) {
        uint8_t *bytes = buffer(n);

        for (size_t i = 0; i < n; i++)
                bytes[i] = (uint8_t)random_u32();
        return bytes;
}

/* Few distinct scores, so that many are equal, and some that are not to be taken. */
static float *few_scores(uint32_t n) {
        float *x = buffer(n * sizeof *x);

        for (uint32_t i = 0; i < n; i++)
                x[i] = random_u32() % 5 == 0  ? NAN :
                       random_u32() % 11 == 0 ? -INFINITY :
                       random_u32() % 3       ? (float)(random_u32() % 7) - 3.0f :
                                                -0.0f;
        return x;
}

/* Blocks of n vectors, OFFSET bytes after the start; each ends with its last vector. */
static uint8_t **blocks_of(uint32_t n, uint32_t per_block, size_t stride, uint32_t dim,
                           enum kvd_number type) {
        uint8_t **blocks = buffer(DIV_UP(n, per_block) * sizeof *blocks);

        for (uint32_t b = 0; b * per_block < n; b++) {
                uint32_t here = MIN(per_block, n - b * per_block);
                size_t bytes = (here - 1) * stride + kvd_row_bytes(type, dim);

                blocks[b] = buffer(OFFSET + bytes);
                memcpy(blocks[b] + OFFSET, numbers(here, stride, dim, type), bytes);
        }
        return blocks;
}

/* ---- BiCache, blocks ---- */

static void bicache_products(struct results *r) {
        uint32_t dim = random_u32() % 8 ? any_size() : 4080 + random_u32() % 5000,
                 n = 1 + random_u32() % 4;
        enum kvd_number type = any_type();
        size_t stride_a, stride_b;
        const void *a, *b;

        dim = fitting(dim, type);
        stride_a = kvd_row_bytes(type, dim) + random_u32() % 3 * 4;
        stride_b = kvd_row_bytes(type, dim) + random_u32() % 7 * 4;
        a = numbers(n, stride_a, dim, type);
        b = numbers(n, stride_b, dim, type);
        r->ops->bicache->products(result(r, n * sizeof(struct kvd_products)), a, stride_a, b,
                                  stride_b, type, n, dim);
}

static void block_topk(struct results *r) {
        uint32_t n = random_u32() % 64 ? random_u32() % 300 : 100000, k = random_u32() % (n + 3);
        uint32_t *indices = result(r, MIN(k, n) * sizeof *indices), *count = result(r, 4);

        *count = r->ops->block->topk(indices, few_scores(n), n, k, random_u32() % 2, buffer(n * 4));
}

/* In place: tokens move down within the same blocks. */
static void block_compact(struct results *r) {
        enum { TOKENS = 50 };
        uint32_t per_block = 1 + random_u32() % 20, bytes = any_size(), index[TOKENS], n = 0;
        size_t stride = bytes + random_u32() % 3 * 5;
        uint8_t **blocks = buffer(TOKENS * sizeof *blocks), copy[TOKENS][300];
        struct kvd_slots slots = {blocks, 7, stride, per_block, bytes};
        uint32_t *exact;

        for (uint32_t t = 0; t < TOKENS; t++) {
                if (t % per_block == 0)
                        blocks[t / per_block] = random_bytes(7 + (per_block - 1) * stride + bytes);
                memcpy(copy[t], blocks[t / per_block] + 7 + t % per_block * stride, bytes);
                if (random_u32() % 3)
                        index[n++] = t;
        }
        exact = memcpy(buffer(n * sizeof *exact), index, n * sizeof *exact);
        r->ops->block->compact(&slots, &slots, exact, n);
        for (uint32_t j = 0; j < n; j++)
                if (memcmp(blocks[j / per_block] + 7 + j % per_block * stride, copy[index[j]],
                           bytes) != 0)
                        ck_abort_msg("%s: compaction in place", r->ops->name);
}

/* ---- HShare ---- */

static uint32_t any_channels(void) { /* labels of 32 channels are made 16 at a time */
        return random_u32() % 2 ? 32 : ONE_OF(1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 80, 127, 256);
}

static uint16_t *channels_of(uint32_t dim, uint32_t n) {
        uint16_t *channels = buffer(n * sizeof *channels);

        for (uint32_t i = 0; i < n; i++)
                channels[i] = (uint16_t)(2 * n <= dim ? 2 * i : dim - n + i);
        return channels;
}

static void make_unusual(float *x, uint32_t dim, uint16_t last) {
        uint32_t kind = random_u32() % 8;

        if (kind == 0)
                memset(x, 0, dim * sizeof *x);
        if (kind < 4)
                x[last] = kind == 1 ? NAN : kind == 2 ? -INFINITY : 3e38f;
        for (uint32_t d = 0; d < dim && kind == 4; d++) /* the least is 0, of either sign */
                x[d] = random_u32() % 3 ? fabsf(x[d]) : random_u32() % 2 ? -0.0f : 0.0f;
}

static void hshare_label(struct results *r) {
        uint32_t n_channels = any_channels(), dim = n_channels + random_u32() % 3 * n_channels / 2,
                 n = 1 + random_u32() % 50;
        enum kvd_number type = any_type();
        uint16_t *channels;
        size_t stride;
        float *x;

        dim = fitting(dim, type);
        stride = kvd_row_bytes(type, dim) + random_u32() % 4 * 4;
        channels = channels_of(dim, n_channels);
        x = random_floats((size_t)n * dim);
        for (uint32_t i = 0; i < n; i++)
                make_unusual(x + (size_t)i * dim, dim, channels[n_channels - 1]);
        r->ops->hshare->label(result(r, n * kvd_label_bytes(n_channels)),
                              typed(x, n, stride, dim, type), stride, type, n, dim, channels,
                              n_channels);
        r->ops->hshare->query(result(r, sizeof(struct kvd_label_query)), x, channels, n_channels);
}

/* Blocks of labels without a spare byte; some are missing. */
static uint8_t **label_blocks(uint32_t n, uint32_t per_block, const uint16_t *channels,
                              uint32_t n_channels) {
        uint8_t **blocks = buffer(DIV_UP(n, per_block) * sizeof *blocks);

        for (uint32_t b = 0; b * per_block < n; b++) {
                uint32_t count = MIN(per_block, n - b * per_block);

                if (n % 2 && random_u32() % 3 == 0)
                        continue;
                blocks[b] = buffer(8 + count * kvd_label_bytes(n_channels));
                scalar->hshare->label(blocks[b] + 8, random_floats((size_t)count * n_channels),
                                      n_channels * sizeof(float), KVD_NUMBER_F32, count, n_channels,
                                      channels, n_channels);
        }
        return blocks;
}

static void hshare_scores(struct results *r) {
        uint32_t n_channels = any_channels(), per_block = ONE_OF(1, 5, 16, 24, 64),
                 n = 1 + random_u32() % 120, first = random_u32() % n,
                 n_queries = ONE_OF(1, 2, 4, 5, 9);
        uint16_t *channels = channels_of(n_channels, n_channels);
        uint8_t **blocks = label_blocks(n, per_block, channels, n_channels);
        struct kvd_label_query *queries = buffer(n_queries * sizeof *queries);

        for (uint32_t g = 0; g < n_queries; g++)
                scalar->hshare->query(queries + g, random_floats(n_channels), channels, n_channels);
        r->ops->hshare->scores(result(r, (size_t)n_queries * (n - first) * 4), n - first,
                               (const uint8_t *const *)blocks, 8, per_block, n_channels, queries,
                               n_queries, first, n - first);
}

static void hshare_aggregate(struct results *r) {
        uint32_t n = any_size(), group = 1 + random_u32() % 5;
        size_t ld = n + random_u32() % 2;
        float *x = random_floats((group - 1) * ld + n);

        for (uint32_t g = 0; g < group && n > 3; g++)
                x[g * ld + n / 2] = -INFINITY;
        r->ops->hshare->aggregate(result(r, n * sizeof *x), x, ld, n, group, 9.0f,
                                  random_u32() % 2);
}

static void hshare_top(struct results *r) {
        uint32_t n = random_u32() % 4 ? any_size() : ONE_OF(777, 8192, 8199, 20000),
                 z = 1 + random_u32() % (n + 1);
        const float *x = random_u32() % 2 ? random_floats(n) : few_scores(n);
        uint32_t *to = result(r, MIN(n, z) * sizeof *to), *count = result(r, sizeof *count);

        *count = r->ops->hshare->top(to, x, n, z, 7, buffer(2 * (size_t)n * sizeof *to));
}

static void hshare_overlap(struct results *r) {
        uint32_t rows = 1 + random_u32() % 4, words = 1 + random_u32() % 70;
        void *a = random_floats((size_t)rows * words * 2),
             *b = random_floats((size_t)rows * words * 2);

        r->ops->hshare->overlap(result(r, rows * sizeof(uint32_t)), a, b, rows, words);
}

static void hshare_weigh(struct results *r) {
        enum kvd_number type = any_type();
        uint32_t dim = fitting(any_size(), type), n = 1 + random_u32() % 9,
                 group = 1 + random_u32() % 4;
        size_t stride = kvd_row_bytes(type, dim) + random_u32() % 3 * 4,
               ldq = group * dim + random_u32() % 3;
        const float *q = random_floats((n - 1) * ldq + (size_t)group * dim);
        const void *k = numbers(n, stride, dim, type);

        r->ops->hshare->weigh(result(r, dim * sizeof *q), q, ldq, group, k, stride, type, n, dim);
}

/* ---- KeyDiff ---- */

static void break_keys(const struct kvd_key_rows *k, uint8_t **blocks, uint32_t tokens) {
        size_t row = kvd_row_bytes(k->type, k->dim),
               last = k->type == KVD_NUMBER_F32 ? 4 : 2; /* bytes of a number, or of the least */

        for (uint32_t t = 0; t < tokens; t++) {
                uint8_t *key = blocks[t / k->per_block] + k->offset +
                               t % k->per_block * k->token_stride;

                if (t % 5 == 1)
                        memset(key, 0, row);
                if (t % 7 == 3)
                        memset(key + row - last, 0xff, last); /* a NaN of any type */
        }
        for (uint32_t b = 0; b < DIV_UP(tokens, k->per_block); b++)
                if (b % 3 == 1)
                        blocks[b] = NULL;
}

static struct kvd_key_rows any_keys(uint32_t tokens) {
        struct kvd_key_rows k = {.per_block = tokens > 100 ? 16 : ONE_OF(1, 3, 16, 64),
                                 .heads = 1 + random_u32() % 3,
                                 .dim = any_size(),
                                 .type = any_type()};
        bool nhd = random_u32() % 2;
        uint8_t **blocks;
        size_t row;

        k.dim = fitting(k.dim, k.type);
        row = kvd_row_bytes(k.type, k.dim);
        k.offset = OFFSET;
        k.head_stride = nhd ? row : k.per_block * row;
        k.token_stride = nhd ? k.heads * row : row;
        blocks = blocks_of(DIV_UP(tokens, k.per_block) * k.per_block * k.heads,
                           k.per_block * k.heads, row, k.dim, k.type);
        if (random_u32() % 2)
                break_keys(&k, blocks, tokens);
        k.blocks = (const uint8_t *const *)blocks;
        return k;
}

static void keydiff(struct results *r) {
        uint32_t tokens = random_u32() % 64 ? ONE_OF(1, 2, 15, 16, 17, 40, 70) : 2500,
                 from = random_u32() % tokens, n = tokens - from;
        struct kvd_key_rows keys = any_keys(tokens);
        float *scratch = buffer(kvd_keydiff_scratch(&keys) * sizeof *scratch);
        float *sums = result(r, (size_t)keys.heads * keys.dim * sizeof *sums),
              *scores = result(r, (size_t)keys.heads * n * sizeof *scores);
        uint32_t n_blocks = DIV_UP(n, keys.per_block);
        float *mean = result(r, n_blocks * sizeof *mean),
              *best = result(r, (size_t)keys.heads * n_blocks * sizeof *best);

        r->ops->keydiff->anchor(sums, result(r, keys.heads * sizeof(uint32_t)), &keys, from, tokens,
                                scratch);
        r->ops->keydiff->score(scores, n, &keys, from, tokens, sums, scratch);
        r->ops->keydiff->blocks(mean, best, scores, n, keys.heads, n, keys.per_block);
        r->ops->keydiff->priority(scores, scores, (size_t)keys.heads * n);
}

/* ---- MemShare ---- */

static void memshare(struct results *r) {
        struct kvd_memshare_shape s = {1 + random_u32() % 2, 1 + random_u32() % 3, ONE_OF(1, 3, 16),
                                       any_size(), any_type()};
        uint32_t half = (s.dim = fitting(s.dim, s.type)) / ONE_OF(2, 4, 300),
                 metric = ONE_OF(1, 2, 3), rows = 2 * s.layers * s.heads * s.tokens;
        size_t row = kvd_row_bytes(s.type, s.dim);
        struct kvd_memshare_query q =
                {&s, metric, (double)INFINITY, random_floats(half), random_floats(half), half};
        float *norms_a = result(r, 2 * s.layers * sizeof *norms_a),
              *norms_b = result(r, 2 * s.layers * sizeof *norms_b);
        struct kvd_memshare_block a = {numbers(rows, row, s.dim, s.type), norms_a},
                                  b = {numbers(rows, row, s.dim, s.type), norms_b};
        double *distance = result(r, sizeof *distance);

        r->ops->memshare->norms(&s, a.data, norms_a);
        r->ops->memshare->norms(&s, b.data, norms_b);
        *distance = r->ops->memshare->distance(&q, &a, &b);
}

/* ---- KVReviver ---- */

static void keep_blocks(struct results *r, uint32_t n, const struct kvd_sketch_vectors *x,
                        uint32_t dim) {
        for (uint32_t b = 0; b * x->per_block < n; b++)
                keep(r, x->blocks[b],
                     OFFSET + (MIN(x->per_block, n - b * x->per_block) - 1) * x->stride +
                             kvd_row_bytes(x->type, dim));
}

static struct kvd_sketch_part any_part(struct results *r, enum kvd_number type) {
        struct kvd_sketch_part p = {.rows = 1 + random_u32() % KVD_SKETCH_ROWS_MAX,
                                    .columns = ONE_OF(1, 5, 16),
                                    .dim = fitting(any_size(), type),
                                    .sign = random_u32() % 3 << 30};
        size_t n;

        p.stride = p.dim + random_u32() % 5;
        n = ((size_t)p.rows * p.columns - 1) * p.stride + p.dim;
        p.cells = random_floats(n);
        p.mean = random_u32() % 2 ? random_floats(p.dim) : NULL;
        keep(r, p.cells, n * sizeof *p.cells);
        return p;
}

static void sketch(struct results *r) {
        enum kvd_number type = any_type();
        struct kvd_sketch_part p = any_part(r, type);
        uint32_t n = 1 + random_u32() % 20, *places = buffer((size_t)n * p.rows * sizeof *places);
        struct kvd_sketch_vectors x = {.offset = OFFSET,
                                       .stride = kvd_row_bytes(type, p.dim) + random_u32() % 5 * 4,
                                       .per_block = ONE_OF(1, 3, 16),
                                       .type = type};

        x.blocks = blocks_of(n, x.per_block, x.stride, p.dim, x.type);
        for (uint32_t i = 0; i < n * p.rows; i++)
                places[i] = random_u32() % p.columns | (random_u32() & 3u << 30);
        r->ops->sketch->insert(&p, places, n, &x, 1.0f);
        r->ops->sketch->insert(&p, places, n / 2, &x, -1.0f);
        r->ops->sketch->query(&p, places, n, &x, 0.75f);
        keep_blocks(r, n, &x, p.dim);
}

/* ---- all of them ---- */

static const struct {
        const char *name;
        void (*run)(struct results *);
} kernels[] = {
        {"BiCache's products", bicache_products},
        {"top-k", block_topk},
        {"compaction in place", block_compact},
        {"HShare's labels", hshare_label},
        {"HShare's scores", hshare_scores},
        {"HShare's aggregates", hshare_aggregate},
        {"HShare's top", hshare_top},
        {"HShare's overlaps", hshare_overlap},
        {"HShare's weights", hshare_weigh},
        {"KeyDiff", keydiff},
        {"MemShare", memshare},
        {"sketches", sketch},
};

static void compare(const struct results *a, const struct results *b, uint32_t seed,
                    const char *name) {
        for (size_t i = 0; i < a->n; i++)
                if (memcmp(a->at[i], b->at[i], a->bytes[i]) != 0)
                        ck_abort_msg("%s: the %s variant differs in result %zu of seed %u", name,
                                     b->ops->name, i, seed);
}

START_TEST(variants_give_the_same_bytes) {
        for (uint32_t seed = 0; seed < 2500; seed++) {
                struct results expected = {.ops = scalar};

                random_seed(seed);
                kernels[_i].run(&expected);
                for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                        struct results got = {.ops = *v};

                        if (*v == scalar || !(*v)->works())
                                continue;
                        random_seed(seed);
                        kernels[_i].run(&got);
                        compare(&expected, &got, seed, kernels[_i].name);
                }
                buffers_free();
        }
}
END_TEST

/* ---- what needs no variants ---- */

/* times: how large the values of the last layer are. */
static struct kvd_memshare_block any_block(const struct kvd_memshare_shape *s, float times) {
        uint32_t rows = 2 * s->layers * s->heads * s->tokens;
        size_t n = (size_t)rows * s->dim;
        float *x = random_floats(n), *norms = buffer((size_t)2 * s->layers * sizeof *norms);
        void *data;

        for (size_t i = n - n / (2 * s->layers); i < n; i++)
                x[i] *= times;
        data = typed(x, rows, kvd_row_bytes(s->type, s->dim), s->dim, s->type);
        scalar->memshare->norms(s, data, norms);
        return (struct kvd_memshare_block){data, norms};
}

/* With norms, blocks need not be read; without them, they are read until they are too far. */
START_TEST(distances_end_at_the_limit) {
        for (uint32_t metric = KVD_MEMSHARE_FRO_NORM; metric <= KVD_MEMSHARE_RELATIVE; metric++) {
                struct kvd_memshare_shape shape = {3, 2, 16, 32, KVD_NUMBER_BF16};
                struct kvd_memshare_block a = any_block(&shape, 1.0f), b = any_block(&shape, 30.0f);
                struct kvd_memshare_query q = {&shape, metric, (double)INFINITY, NULL, NULL, 0};
                double whole = scalar->memshare->distance(&q, &a, &b);
                struct kvd_memshare_block unread = {NULL, b.norms};

                /* many rows: the bound is less tight */
                q.limit = metric == KVD_MEMSHARE_MEAN_L2 ? whole / 50 : whole / 3;
                ck_assert(isinf(scalar->memshare->distance(&q, &a, &unread)));
                a.norms = metric == KVD_MEMSHARE_RELATIVE ? a.norms : NULL;
                ck_assert(isinf(scalar->memshare->distance(&q, &a, &b)));
                q.limit = whole * 1.000001;
                ck_assert(scalar->memshare->distance(&q, &a, &b) == whole);
        }
        buffers_free();
}
END_TEST

START_TEST(a_table_is_for_one_kind_of_ratio) {
        struct kvd_btable table = {.ratio = KVD_RATIO_INCLUDE_GEN,
                                   .n = 2,
                                   .steps = {{40, 3}, {70, 9}}};

        ck_assert_int_eq(kvd_btable_lookup(&table, KVD_RATIO_PROMPT_ONLY, 50), -EINVAL);
        ck_assert_int_eq(kvd_btable_lookup(&table, KVD_RATIO_INCLUDE_GEN, 50), 3);
}
END_TEST

SUITE("kernels: variants", scalar = kvd_ops_pick("scalar"),
      LOOPS(ARRAY_SIZE(kernels), variants_give_the_same_bytes),
      TESTS(distances_end_at_the_limit, a_table_is_for_one_kind_of_ratio))
