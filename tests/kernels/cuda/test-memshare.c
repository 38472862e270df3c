/* SPDX-License-Identifier: Apache-2.0 */

/* MemShare's GPU kernels against the scalar reference, bit for bit. */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/cuda/memshare.h"
#include "kernels/memshare.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/fixture.h"
#include "tests/kernels/cuda/pool.h"
#include "tests/lib/suite.h"

enum { BLOCKS = 6, ANGLES = 3 };

static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16,
                                        KVD_NUMBER_Q8,  KVD_NUMBER_Q4,  KVD_NUMBER_E4M3,
                                        KVD_NUMBER_E5M2};

struct scene {
        struct kvd_memshare_shape shape;
        struct gpu_distances a;
        struct pool pool;
        struct gpu_distance_pair *pairs;
        float *norms, *angles;
        struct kvd_memshare_query query;
};

static size_t plane_rows(const struct kvd_memshare_shape *s) {
        return (size_t)s->heads * s->tokens;
}

static size_t all_rows(const struct kvd_memshare_shape *s) {
        return 2 * s->layers * plane_rows(s);
}

static size_t all_bytes(const struct kvd_memshare_shape *s) {
        return all_rows(s) * kvd_row_bytes(s->type, s->dim);
}

static struct gpu_block_shape gpu_shape(const struct kvd_memshare_shape *s) {
        return (struct gpu_block_shape){s->layers, s->heads,      s->tokens,
                                        s->dim,    GPU_ORDER_HND, s->type};
}

static const void *data_of(const struct scene *s, uint32_t i) {
        return pool_block(&s->pool, i) ? pool_block(&s->pool, i) + s->a.offset : NULL;
}

static void put_row(const struct scene *s, uint32_t b, size_t row, const float *x) {
        const struct kvd_ops *ops = kvd_ops_pick("scalar");

        (row / plane_rows(&s->shape) % 2 ?
                 ops->write_row :
                 ops->write_key)((uint8_t *)data_of(s, b) +
                                         row * kvd_row_bytes(s->shape.type, s->shape.dim),
                                 x, s->shape.dim, s->shape.type);
}

/* Blocks similar to the first one, each a little less so; every third is far away. */
static void fill_blocks(struct scene *s) {
        const struct kvd_memshare_ops *ops = kvd_ops_pick("scalar")->memshare;
        size_t n_norms = 2 * s->shape.layers, dim = s->shape.dim;
        float *base = random_floats(all_rows(&s->shape) * dim), *x = buffer(dim * sizeof *x);

        s->norms = buffer(BLOCKS * n_norms * sizeof(float));
        for (uint32_t b = 0; b < BLOCKS; b++) {
                for (size_t row = 0; row < all_rows(&s->shape); row++) {
                        for (size_t d = 0; d < dim; d++)
                                x[d] = base[row * dim + d] + (float)b * number_random(-0.1f, 0.1f) +
                                       (b % 3 == 2 ? 0.5f : 0.0f);
                        put_row(s, b, row, x);
                }
                ops->norms(&s->shape, data_of(s, b), s->norms + b * n_norms);
        }
}

static void make_angles(struct scene *s, uint32_t half) {
        double frequencies[256];

        s->angles = buffer(ALIGN_UP(ANGLES * 2 * half * sizeof(float), 16));
        kvd_memshare_frequencies(frequencies, half, 1e4);
        for (uint32_t i = 0; i < ANGLES; i++)
                kvd_memshare_angles(frequencies, half, (int64_t)i * 97 - 100,
                                    s->angles + (size_t)2 * i * half,
                                    s->angles + ((size_t)2 * i + 1) * half);
}

/* Pairs each block with the others. lead: elements before the first key. */
static void make_scene(struct scene *s, struct kvd_memshare_shape shape,
                       enum kvd_memshare_metric metric, uint32_t half, uint32_t lead) {
        size_t size = kvd_is_narrow(shape.type) ? 1 : number_bytes(shape.type);
        uint32_t n = 0;

        *s = (struct scene){.shape = shape};
        s->a = (struct gpu_distances){.offset = lead * size,
                                      .shape = gpu_shape(&shape),
                                      .metric = metric,
                                      .half = half,
                                      .limit = (double)INFINITY};
        pool_make(&s->pool, BLOCKS, ALIGN_UP(s->a.offset + all_bytes(&shape), lead % 8 ? 4 : 16));
        s->a.blocks = s->pool.blocks;
        fill_blocks(s);
        make_angles(s, half);
        s->pairs = buffer(BLOCKS * (BLOCKS - 1) * sizeof *s->pairs);
        for (uint32_t i = 0; i < BLOCKS * BLOCKS; i++)
                if (i / BLOCKS != i % BLOCKS)
                        s->pairs[n++] = (struct gpu_distance_pair){i / BLOCKS, i % BLOCKS,
                                                                   i % ANGLES};
        s->a.n = n;
        s->a.pairs = address_of(s->pairs);
        s->a.angles = half ? address_of(s->angles) : 0;
        s->a.norms = address_of(s->norms);
        s->a.distances = room(n * sizeof(double));
}

static double expected_of(const struct scene *s, uint32_t i) {
        const struct gpu_distance_pair *p = &s->pairs[i];
        size_t n_norms = 2 * s->shape.layers;
        const float *cosine = s->angles + (size_t)2 * p->angle * s->a.half;
        struct kvd_memshare_query q = {&s->shape,          (enum kvd_memshare_metric)s->a.metric,
                                       s->a.limit,         cosine,
                                       cosine + s->a.half, s->a.half};
        struct kvd_memshare_block a = {data_of(s, p->a),
                                       s->a.norms ? s->norms + p->a * n_norms : NULL};
        struct kvd_memshare_block b = {data_of(s, p->b),
                                       s->a.norms ? s->norms + p->b * n_norms : NULL};

        if (!a.data || !b.data)
                return (double)INFINITY;
        return kvd_ops_pick("scalar")->memshare->distance(&q, &a, &b);
}

/* Compares all pairs with the reference. Returns how many are near. */
static uint32_t compare(const struct scene *s) {
        const double *distances = host_of(s->a.distances);
        uint32_t near = 0;

        fixture_ok(gpu_distances(fixture_gpu(), NULL, &s->a));
        fixture_wait();
        for (uint32_t i = 0; i < s->a.n; i++) {
                double expected = expected_of(s, i);

                if (memcmp(&expected, &distances[i], sizeof expected) != 0)
                        ck_abort_msg(
                                "metric %u, type %u, dim %u, half %u, pair %u: %a, expected %a",
                                s->a.metric, s->a.shape.number, s->a.shape.dim, s->a.half, i,
                                distances[i], expected);
                near += expected < (double)INFINITY;
        }
        return near;
}

/*
 * Without a limit; then with a limit that some pairs exceed, rejected after reading, and by norms.
 */
static void limits_case(struct scene *s) {
        const double *distances = host_of(s->a.distances);
        double middle;

        ck_assert_uint_eq(compare(s), s->a.n);
        middle = (distances[0] + distances[1]) / 2;
        s->a.limit = middle;
        compare(s);
        if (s->a.metric != KVD_MEMSHARE_RELATIVE) {
                s->a.norms = 0;
                compare(s);
        }
        s->a.norms = address_of(s->norms);
        s->a.limit = middle / 20;
        compare(s);
}

START_TEST(distances_have_the_bits_of_the_reference) {
        static const uint32_t dims[] = {1, 3, 8, 16, 24, 33, 64, 80, 127, 128, 256};

        fixture_seed((uint64_t)_i);
        for (uint32_t d = 0; d < ARRAY_SIZE(dims); d++)
                for (uint32_t i = 0; i < 21; i++) {
                        uint32_t half = (i + d + (uint32_t)_i) % 3 == 0 ? 0 :
                                        (i + d) % 2 == 0                ? dims[d] / 2 :
                                                                          dims[d] / 4;
                        struct kvd_memshare_shape shape =
                                {1 + (d + i) % 5, 1 + i % 3, 1 + (d * 5 + i) % 17, dims[d],
                                 types[(i / 3 + (uint32_t)_i) % ARRAY_SIZE(types)]};
                        struct scene s;

                        if ((kvd_is_quantised(shape.type) && shape.dim % 2) ||
                            (kvd_is_narrow(shape.type) && (d + (uint32_t)_i) % 2))
                                continue; /* every other one, to save time */
                        make_scene(&s, shape, (enum kvd_memshare_metric)(1 + i % 3), half,
                                   i % 4 == 3 ? 5 : 8);
                        s.a.n = 7;
                        limits_case(&s);
                        buffers_free();
                }
}
END_TEST

/*
 * Planes of several chunks, the last one partial; a plane of more chunks than threads; more layers
 * than a step has.
 */
START_TEST(large_planes_have_them_too) {
        static const struct kvd_memshare_shape shapes[] = {
                {3, 5, 16, 72, KVD_NUMBER_BF16}, {2, 8, 16, 128, KVD_NUMBER_BF16},
                {1, 2, 300, 8, KVD_NUMBER_F32},  {16, 1, 2, 8, KVD_NUMBER_F16},
                {3, 5, 16, 72, KVD_NUMBER_Q4},   {2, 2, 300, 8, KVD_NUMBER_E4M3},
        };

        for (uint32_t i = 0; i < 3 * ARRAY_SIZE(shapes); i++) {
                const struct kvd_memshare_shape *shape = &shapes[i / 3];
                struct scene s;

                make_scene(&s, *shape, (enum kvd_memshare_metric)(1 + i % 3),
                           i % 2 ? shape->dim / 2 : 0, 8);
                s.a.n = 7;
                limits_case(&s);
                buffers_free();
        }
}
END_TEST

/* Pairs with a missing block, with a NaN, and without a difference. */
START_TEST(holes_and_nan_are_far) {
        for (uint32_t metric = 1; metric <= 3; metric++)
                for (uint32_t t = 0; t < ARRAY_SIZE(types); t++) {
                        struct kvd_memshare_shape shape = {4, 2, 4, 24, types[t]};
                        float *broken = random_floats(shape.dim);
                        struct scene s;

                        make_scene(&s, shape, (enum kvd_memshare_metric)metric, t % 2 == 1 ? 8 : 0,
                                   8);
                        broken[17] = NAN;
                        put_row(&s, 1, all_rows(&shape) / 2, broken);
                        broken[17] = INFINITY;
                        put_row(&s, 2, all_rows(&shape) / 2, broken);
                        memcpy((uint8_t *)data_of(&s, 4), data_of(&s, 3), all_bytes(&shape));
                        pool_drop(&s.pool, 5);
                        ck_assert_uint_lt(compare(&s), s.a.n);
                        s.a.limit = 1e9;
                        compare(&s);
                        s.norms[3] = NAN;
                        compare(&s);
                        buffers_free();
                }
}
END_TEST

START_TEST(norms_have_the_bits_of_the_reference) {
        static const uint32_t dims[] = {1, 5, 16, 33, 64, 72, 128, 256};
        const struct kvd_memshare_ops *ops = kvd_ops_pick("scalar")->memshare;

        fixture_seed((uint64_t)_i);
        for (uint32_t i = 0; i < 14 * ARRAY_SIZE(dims); i++) {
                struct kvd_memshare_shape shape = {1 + i % 3, 1 + i % 4, 1 + i % 19, dims[i / 14],
                                                   types[i % ARRAY_SIZE(types)]};
                size_t n_norms = 2 * shape.layers;
                struct gpu_norms a = {.shape = gpu_shape(&shape), .n = BLOCKS};
                float *norms = buffer(n_norms * sizeof *norms);
                struct scene s;

                if (kvd_is_quantised(shape.type) && shape.dim % 2)
                        continue;
                make_scene(&s, shape, KVD_MEMSHARE_FRO_NORM, 0, i % 5 == 4 ? 5 : 8);
                pool_drop(&s.pool, 3);
                a.blocks = s.a.blocks;
                a.offset = s.a.offset;
                a.to = room(BLOCKS * n_norms * sizeof(float));
                fixture_ok(gpu_norms(fixture_gpu(), NULL, &a));
                for (uint32_t b = 0; b < BLOCKS; b++) {
                        for (size_t k = 0; b == 3 && k < n_norms; k++)
                                norms[k] = NAN;
                        if (b != 3)
                                ops->norms(&shape, data_of(&s, b), norms);
                        assert_same_numbers(norms, floats_of(a.to) + b * n_norms, n_norms, "norms");
                }
                buffers_free();
        }
}
END_TEST

START_TEST(what_no_kernel_takes_is_refused) {
        struct kvd_memshare_shape shape = {1, 1, 2, 8, KVD_NUMBER_F32};
        struct gpu *gpu = fixture_gpu();
        struct gpu_distances bad;
        struct scene s;

        make_scene(&s, shape, KVD_MEMSHARE_RELATIVE, 4, 8);
        bad = s.a, bad.shape.number = 0;
        ck_assert_int_eq(gpu_distances(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.shape.number = KVD_NUMBER_Q8, bad.shape.dim = 9;
        ck_assert_int_eq(gpu_distances(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.shape.order = 3;
        ck_assert_int_eq(gpu_distances(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.metric = 4;
        ck_assert_int_eq(gpu_distances(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.norms = 0;
        ck_assert_int_eq(gpu_distances(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.half = 5;
        ck_assert_int_eq(gpu_distances(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.shape.tokens = 0;
        ck_assert_int_eq(gpu_distances(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.offset = 2;
        ck_assert_int_eq(gpu_distances(gpu, NULL, &bad), -EINVAL);
        bad = s.a, bad.n = 0;
        ck_assert_int_eq(gpu_distances(gpu, NULL, &bad), 0);
        buffers_free();
}
END_TEST

SUITE("cuda: MemShare", fixture_begin(), LOOPS(3, distances_have_the_bits_of_the_reference),
      TESTS(large_planes_have_them_too, holes_and_nan_are_far),
      LOOPS(2, norms_have_the_bits_of_the_reference), TESTS(what_no_kernel_takes_is_refused))
