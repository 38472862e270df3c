/* SPDX-License-Identifier: Apache-2.0 */

/* KeyDiff's GPU kernels against the scalar reference: every way to load a row, and partial rows. */

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/cuda/keydiff.h"
#include "kernels/keydiff.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/fixture.h"
#include "tests/kernels/cuda/pool.h"
#include "tests/lib/suite.h"

static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16,
                                        KVD_NUMBER_Q8,  KVD_NUMBER_Q4,  KVD_NUMBER_E4M3,
                                        KVD_NUMBER_E5M2};

struct shape {
        uint32_t tokens, per_block, layers, heads, dim;
        enum kvd_number type;
        bool nhd, holes, broken; /* broken: some keys are zero, NaN or infinite */
        uint32_t lead; /* elements before the first key of a block: aligned to 16 bytes or not */
};

struct scene {
        const struct shape *shape;
        struct gpu_scores a;
        struct pool pool;
        const uint8_t **blocks;
        float *expected_sums, *expected_scores;
        uint32_t *expected_counts;
};

static float key_element(const struct shape *s, uint32_t token, uint32_t d) {
        if (s->broken && token % 5 == 1)
                return 0.0f;
        if (s->broken && token % 7 == 3 && d == s->dim - 1)
                return token % 2 ? NAN : INFINITY;
        return number_random(-0.9f, 1.1f);
}

/* Strides are in elements, or in bytes if numbers are narrow. */
static size_t element_bytes(enum kvd_number type) {
        return kvd_is_narrow(type) ? 1 : number_bytes(type);
}

static void fill_block(const struct shape *s, const struct gpu_key_rows *k, uint32_t b,
                       uint8_t *block) {
        for (uint32_t l = 0; l < s->layers; l++)
                for (uint32_t h = 0; h < s->heads; h++)
                        for (uint32_t t = 0; t < s->per_block; t++) {
                                float key[GPU_SCORE_DIM];

                                for (uint32_t d = 0; d < s->dim; d++)
                                        key[d] = key_element(s, b * s->per_block + t, d);
                                kvd_ops_pick("scalar")->write_key(block + k->offset +
                                                                          l * k->layer_stride +
                                                                          (h * k->head_stride +
                                                                           t * k->token_stride) *
                                                                                  element_bytes(
                                                                                          s->type),
                                                                  key, s->dim, s->type);
                        }
}

/* Layers are two planes apart, as if V followed K. */
static void make_scene(struct scene *s, const struct shape *shape) {
        uint32_t n = DIV_UP(shape->tokens, shape->per_block);
        size_t element = element_bytes(shape->type),
               row = kvd_row_bytes(shape->type, shape->dim) / element,
               plane = shape->heads * shape->per_block * row * element;
        struct gpu_key_rows *k = &s->a.keys;

        *s = (struct scene){.shape = shape};
        *k = (struct gpu_key_rows){.offset = shape->lead * element,
                                   .layer_stride = 2 * plane,
                                   .layers = shape->layers,
                                   .heads = shape->heads,
                                   .dim = shape->dim,
                                   .per_block = shape->per_block,
                                   .number = shape->type};
        k->head_stride = shape->nhd ? row : shape->per_block * row;
        k->token_stride = shape->nhd ? shape->heads * row : row;
        pool_make(&s->pool, n,
                  ALIGN_UP(k->offset + (2 * shape->layers - 1) * plane, shape->lead % 8 ? 4 : 16));
        s->blocks = buffer(n * sizeof *s->blocks);
        for (uint32_t b = 0; b < n; b++) {
                fill_block(shape, k, b, pool_block(&s->pool, b));
                if (shape->holes && b % 3 == 1)
                        pool_drop(&s->pool, b);
                s->blocks[b] = pool_block(&s->pool, b);
        }
        k->blocks = s->pool.blocks;
}

/* Runs the reference on one layer; scores are against the given sums. */
static void reference(struct scene *s, uint32_t layer, const float *sums) {
        const struct gpu_key_rows *k = &s->a.keys;
        size_t size = element_bytes((enum kvd_number)k->number);
        struct kvd_key_rows keys = {s->blocks,
                                    k->offset + layer * k->layer_stride,
                                    k->head_stride * size,
                                    k->token_stride * size,
                                    k->per_block,
                                    k->heads,
                                    k->dim,
                                    (enum kvd_number)k->number};
        const struct kvd_keydiff_ops *ops = kvd_ops_pick("scalar")->keydiff;
        size_t row = (size_t)layer * k->heads;
        float *scratch = buffer(kvd_keydiff_scratch(&keys) * sizeof *scratch);

        ops->anchor(s->expected_sums + row * k->dim, s->expected_counts + row, &keys, s->a.from,
                    s->a.to, scratch);
        ops->score(s->expected_scores + row * s->a.stride, s->a.stride, &keys, s->a.from, s->a.to,
                   sums + row * k->dim, scratch);
}

static void begin_sums(struct scene *s) {
        size_t rows = (size_t)s->a.keys.layers * s->a.keys.heads, bytes = rows * sizeof(float);

        s->a.sums = copied(buffer(bytes * s->a.keys.dim), bytes * s->a.keys.dim);
        s->a.counts = copied(buffer(bytes), bytes);
}

static void assert_sums(const struct scene *s) {
        uint32_t dim = s->a.keys.dim, rows = s->a.keys.layers * s->a.keys.heads;
        const float *got = floats_of(s->a.sums);

        fixture_wait();
        ck_assert_int_eq(memcmp(s->expected_counts, host_of(s->a.counts),
                                rows * sizeof *s->expected_counts),
                         0);
        for (uint32_t row = 0; row < rows; row++) {
                const float *expected = s->expected_sums + (size_t)row * dim;
                double length = 0, difference = 0;

                for (uint32_t d = 0; d < dim; d++) {
                        length += (double)expected[d] * (double)expected[d];
                        difference = fmax(difference, fabs((double)got[(size_t)row * dim + d] -
                                                           (double)expected[d]));
                }
                if (!(difference <= 1e-5 * sqrt(length)))
                        ck_abort_msg("dim %u, type %u, row %u: sums differ by %g of %g", dim,
                                     s->a.keys.number, row, difference, sqrt(length));
        }
}

static void assert_scores(const struct scene *s) {
        size_t rows = (size_t)s->a.keys.layers * s->a.keys.heads;
        const float *got = floats_of(s->a.scores);

        for (size_t row = 0; row < rows; row++)
                for (size_t i = row * s->a.stride; i < row * s->a.stride + s->a.to - s->a.from; i++)
                        if (isinf(got[i]) || isinf(s->expected_scores[i]) ?
                                    got[i] != s->expected_scores[i] :
                                    !(fabsf(got[i] - s->expected_scores[i]) <= 2e-6f))
                                ck_abort_msg("dim %u, type %u, row %zu, token %zu: %g, expected %g",
                                             s->a.keys.dim, s->a.keys.number, row,
                                             i - row * s->a.stride, (double)got[i],
                                             (double)s->expected_scores[i]);
}

static void shape_case(const struct shape *shape, uint32_t from) {
        size_t rows = (size_t)shape->layers * shape->heads;
        struct scene s;
        float *before = random_floats(rows * shape->dim);
        uint32_t *none;

        make_scene(&s, shape);
        s.a.from = from;
        s.a.to = shape->tokens;
        s.a.stride = shape->tokens - from + 3;
        none = buffer(rows * sizeof *none);
        s.expected_sums = copy_floats(before, rows * shape->dim);
        s.expected_counts = buffer(rows * sizeof *none);
        s.expected_scores = buffer(rows * s.a.stride * sizeof(float));
        s.a.sums = copied(before, rows * shape->dim * sizeof *before);
        s.a.counts = copied(none, rows * sizeof *none);
        s.a.scores = room(((rows - 1) * s.a.stride + shape->tokens - from) * sizeof(float));
        s.a.scratch = room(gpu_score_scratch(&s.a));
        for (uint32_t l = 0; l < shape->layers; l++)
                reference(&s, l, before);
        fixture_ok(gpu_score(fixture_gpu(), NULL, &s.a));
        assert_scores(&s);
        fixture_ok(gpu_anchor(fixture_gpu(), NULL, &s.a));
        assert_sums(&s);

        /* both operations, from zero: the scores are against the new sums */
        memset(s.expected_sums, 0, rows * shape->dim * sizeof(float));
        memset(s.expected_counts, 0, rows * sizeof *none);
        begin_sums(&s);
        fixture_ok(gpu_anchor(fixture_gpu(), NULL, &s.a));
        fixture_ok(gpu_score(fixture_gpu(), NULL, &s.a));
        for (uint32_t l = 0; l < shape->layers; l++)
                reference(&s, l, floats_of(s.a.sums));
        assert_sums(&s);
        assert_scores(&s);
        buffers_free();
}

START_TEST(anchors_and_scores_equal_the_reference) {
        static const uint32_t dims[] = {1,  3,  8,   17,  32,  33,  64,  72,
                                        80, 96, 100, 127, 128, 131, 192, 256};
        static const uint32_t tokens[] = {1, 15, 40}, per_block[] = {16, 3, 64, 1};

        fixture_seed((uint64_t)_i);
        for (uint32_t d = 0; d < ARRAY_SIZE(dims); d++)
                for (uint32_t i = 0; i < 28; i++) {
                        struct shape s = {tokens[(d + i) % 3],
                                          per_block[(i / 3 + (uint32_t)_i) % 4],
                                          1 + i % 2,
                                          1 + (d + i / 3) % 3,
                                          dims[d],
                                          types[i % ARRAY_SIZE(types)],
                                          i & 2,
                                          i & 4,
                                          i & 1 || d % 3 == 0,
                                          i % 4 == 3 ? 5 : 8};

                        if (!kvd_is_quantised(s.type) || s.dim % 2 == 0)
                                shape_case(&s, s.tokens / 4);
                }
}
END_TEST

/* Many slices, and slices that begin within a block. */
START_TEST(long_sequences_equal_the_reference) {
        fixture_seed(7);
        for (size_t i = 0; i < ARRAY_SIZE(types); i++)
                shape_case(&(struct shape){1500 + (uint32_t)i, i == 0 ? 16 : 48, 1, 2,
                                           i == 2 ? 128 : 64, types[i], i == 1, i == 2, true, 8},
                           7);
}
END_TEST

START_TEST(nothing_at_all_adds_nothing) {
        struct shape shape = {16, 16, 1, 1, 32, KVD_NUMBER_BF16, false, false, false, 8};
        struct scene s;

        make_scene(&s, &shape);
        s.a.from = s.a.to = 5;
        begin_sums(&s);
        s.a.scratch = room(16);
        s.expected_counts = buffer(sizeof *s.expected_counts);
        s.expected_sums = buffer(32 * sizeof(float));
        fixture_ok(gpu_anchor(fixture_gpu(), NULL, &s.a));
        assert_sums(&s);
        buffers_free();
}
END_TEST

static float some_score(uint32_t i) {
        return i % 11 == 3 ? -INFINITY :
               i % 13 == 5 ? NAN :
                             (float)((double)random_u32() / 2147483648.0 - 1.0);
}

static void blocks_case(uint32_t i, uint32_t per_block) {
        struct gpu_block_scores a = {.heads = 1 + i % 9,
                                     .n = 1 + random_u32() % 90,
                                     .per_block = per_block};
        const struct kvd_keydiff_ops *ops = kvd_ops_pick("scalar")->keydiff;
        uint32_t blocks = DIV_UP(a.n, a.per_block), all;
        float *mean = buffer(blocks * sizeof *mean),
              *best = buffer((size_t)blocks * a.heads * sizeof *best);
        float *scores;

        a.stride = a.n + i % 3;
        all = (a.heads - 1) * (uint32_t)a.stride + a.n;
        scores = buffer(all * sizeof *scores);
        for (uint32_t k = 0; k < all; k++)
                scores[k] = i % 4 == 0 && k % 40 < 20 ? -INFINITY : some_score(k);
        a.scores = copied(scores, all * sizeof *scores);
        a.mean = room(blocks * sizeof *mean);
        a.best = room((size_t)blocks * a.heads * sizeof *best);
        fixture_ok(gpu_block_scores(fixture_gpu(), NULL, &a));
        ops->blocks(mean, best, scores, a.stride, a.heads, a.n, a.per_block);
        assert_same_numbers(mean, floats_of(a.mean), blocks, "mean");
        assert_same_numbers(best, floats_of(a.best), (size_t)blocks * a.heads, "best");
        buffers_free();
}

START_TEST(scores_of_blocks_have_the_bits_of_the_reference) {
        static const uint32_t per_block[] = {1, 2, 5, 16, 17, 32, 70};

        for (uint32_t i = 0; i < 60; i++)
                blocks_case(i, per_block[i % ARRAY_SIZE(per_block)]);
}
END_TEST

START_TEST(what_no_kernel_takes_is_refused) {
        struct shape shape = {16, 16, 1, 1, 32, KVD_NUMBER_BF16, false, false, false, 8};
        struct scene s;
        struct gpu_scores bad;

        make_scene(&s, &shape);
        s.a.to = 16;
        s.a.stride = 16;
        s.a.sums = s.a.counts = s.a.scores = s.a.scratch = room(4096);
        bad = s.a, bad.keys.number = 4;
        ck_assert_int_eq(gpu_anchor(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = s.a, bad.keys.dim = GPU_SCORE_DIM + 1;
        ck_assert_int_eq(gpu_anchor(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = s.a, bad.keys.number = KVD_NUMBER_Q4, bad.keys.dim = 31;
        ck_assert_int_eq(gpu_anchor(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = s.a, bad.stride = 15;
        ck_assert_int_eq(gpu_score(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = s.a, bad.from = 17;
        ck_assert_int_eq(gpu_anchor(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = s.a, bad.keys.offset++;
        ck_assert_int_eq(gpu_anchor(fixture_gpu(), NULL, &bad), -EINVAL);
        ck_assert(fixture_gpu()->why[0]);
        buffers_free();
}
END_TEST

SUITE("cuda: KeyDiff", fixture_begin(), LOOPS(4, anchors_and_scores_equal_the_reference),
      TESTS(long_sequences_equal_the_reference, nothing_at_all_adds_nothing,
            scores_of_blocks_have_the_bits_of_the_reference, what_no_kernel_takes_is_refused))
