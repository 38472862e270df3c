/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every variant against the scalar one, and properties of distances. Their values are checked in
 * tests/kernels/methods.
 */

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/memshare.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

static const struct kvd_ops *scalar;
static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16};
static const enum kvd_memshare_metric metrics[] = {KVD_MEMSHARE_FRO_NORM, KVD_MEMSHARE_MEAN_L2,
                                                   KVD_MEMSHARE_RELATIVE};

struct scene {
        struct kvd_memshare_shape shape;
        struct kvd_memshare_query query;
        struct kvd_memshare_block a, b;
};

static size_t element(enum kvd_number type) {
        return type == KVD_NUMBER_F32 ? 4 : 2;
}

static size_t elements(const struct kvd_memshare_shape *s) {
        return (size_t)2 * s->layers * s->heads * s->tokens * s->dim;
}

static void set_number(const struct kvd_memshare_shape *s, void *block, size_t i, float f) {
        if (s->type == KVD_NUMBER_F32)
                ((float *)block)[i] = f;
        else
                scalar->narrow((uint16_t *)block + i, &f, 1, s->type);
}

static struct kvd_memshare_block make_block(const struct kvd_memshare_shape *s, float centre) {
        void *data = buffer(elements(s) * element(s->type));
        float *norms = buffer((size_t)2 * s->layers * sizeof *norms);

        for (size_t i = 0; i < elements(s); i++)
                set_number(s, data, i, centre + (float)((double)random_u32() / 2147483648.0 - 1.0));
        scalar->memshare->norms(s, data, norms);
        return (struct kvd_memshare_block){data, norms};
}

static void make_scene(struct scene *s, struct kvd_memshare_shape shape,
                       enum kvd_memshare_metric metric, uint32_t half, float centre) {
        float *cosine = buffer(half * sizeof *cosine), *sine = buffer(half * sizeof *sine);
        double frequencies[256];

        s->shape = shape;
        s->a = make_block(&s->shape, 0.0f);
        s->b = make_block(&s->shape, centre);
        kvd_memshare_frequencies(frequencies, half, 1e4);
        kvd_memshare_angles(frequencies, half, -(int64_t)(random_u32() % 5000), cosine, sine);
        s->query = (struct kvd_memshare_query){&s->shape, metric, (double)INFINITY,
                                               cosine,    sine,   half};
}

/* ---- the variants ---- */

static void variant_case(const struct kvd_ops *v, const struct scene *s) {
        size_t n_norms = (size_t)2 * s->shape.layers;
        float *norms = buffer(n_norms * sizeof *norms);
        double expected = scalar->memshare->distance(&s->query, &s->a, &s->b);
        double got = v->memshare->distance(&s->query, &s->a, &s->b);

        if (memcmp(&expected, &got, sizeof got) != 0)
                ck_abort_msg("%s: distance %a, expected %a", v->name, got, expected);
        v->memshare->norms(&s->shape, s->a.data, norms);
        assert_same_bits(s->a.norms, norms, n_norms, v->name);
}

START_TEST(variants_equal_the_reference) {
        static const uint32_t dims[] = {1, 2, 3, 16, 17, 33, 64, 80, 127, 128, 256},
                              tokens[] = {1, 3, 16};

        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (size_t d = 0; d < ARRAY_SIZE(dims) && (*v)->works(); d++)
                        for (size_t i = 0; i < 3 * 3 * 3 * 3; i++) {
                                uint32_t half = i / 27 == 0 ? 0 :
                                                i / 27 == 1 ? dims[d] / 2 :
                                                              dims[d] / 4;
                                struct kvd_memshare_shape shape = {1 + i % 2, 1 + i % 3,
                                                                   tokens[i / 3 % 3], dims[d],
                                                                   types[i / 9 % 3]};
                                struct scene s;

                                make_scene(&s, shape, metrics[i % 3], half, 0.3f);
                                variant_case(*v, &s);
                                buffers_free();
                        }
}
END_TEST

/* ---- the reference ---- */

static struct kvd_memshare_shape random_shape(void) {
        return (struct kvd_memshare_shape){1 + random_u32() % 5, 1 + random_u32() % 4,
                                           1 + random_u32() % 20, 1 + random_u32() % 90,
                                           types[random_u32() % 3]};
}

/* A limit does not change distances below it, and stops as early as possible. */
START_TEST(limits_abandon_early) {
        for (uint32_t i = 0; i < 300; i++) {
                struct kvd_memshare_shape shape = random_shape();
                struct scene s;
                double whole, limit;

                shape.layers = 5;
                make_scene(&s, shape, metrics[i % 3], i % 2 ? shape.dim / 2 : 0, 0.0f);
                whole = scalar->memshare->distance(&s.query, &s.a, &s.b);
                limit = s.query.limit = whole * 1.000001;
                ck_assert(scalar->memshare->distance(&s.query, &s.a, &s.b) == whole);
                s.query.limit = whole * 0.999;
                ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b)));
                s.a.norms = s.query.metric == KVD_MEMSHARE_RELATIVE ? s.a.norms : NULL;
                s.query.limit = limit / 50;
                ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b)));
                buffers_free();
        }
}
END_TEST

START_TEST(norms_reject_without_reading) {
        for (size_t m = 0; m < ARRAY_SIZE(metrics); m++) {
                struct kvd_memshare_shape shape = {3, 2, 16, 32, KVD_NUMBER_BF16};
                struct scene s;
                double whole;

                make_scene(&s, shape, metrics[m], 16, 5.0f); /* far apart, also in their norms */
                whole = scalar->memshare->distance(&s.query, &s.a, &s.b);
                /* many rows: the bound is less tight */
                s.query.limit = metrics[m] == KVD_MEMSHARE_MEAN_L2 ? whole / 50 : whole / 2;
                s.a.data = s.b.data = NULL;
                ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b)));
                buffers_free();
        }
}
END_TEST

START_TEST(equal_blocks_are_at_zero_and_nan_is_far) {
        for (size_t m = 0; m < ARRAY_SIZE(metrics); m++)
                for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                        struct kvd_memshare_shape shape = {3, 2, 4, 20, types[t]};
                        struct scene s;

                        make_scene(&s, shape, metrics[m], 0, 0.0f);
                        s.query.limit = 0.0;
                        ck_assert(scalar->memshare->distance(&s.query, &s.a, &s.a) == 0.0);
                        s.query.limit = 1e9;
                        s.b = s.a;
                        s.b.data = buffer(elements(&shape) * element(shape.type));
                        memcpy((void *)s.b.data, s.a.data, elements(&shape) * element(shape.type));
                        /* a NaN in layer 1 */
                        set_number(&shape, (void *)s.b.data, elements(&shape) / 3 + 5, NAN);
                        ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b)));
                        buffers_free();
                }
}
END_TEST

START_TEST(zeros_have_a_distance) {
        struct kvd_memshare_shape shape = {2, 1, 4, 8, KVD_NUMBER_F32};
        struct scene s;

        make_scene(&s, shape, KVD_MEMSHARE_RELATIVE, 0, 0.0f);
        memset((void *)s.a.data, 0, elements(&shape) * sizeof(float));
        memset((void *)s.a.norms, 0, 4 * sizeof(float));
        ck_assert(scalar->memshare->distance(&s.query, &s.a, &s.a) == 0.0);
        ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b)));
        s.query.metric = KVD_MEMSHARE_FRO_NORM;
        ck_assert(isfinite(scalar->memshare->distance(&s.query, &s.a, &s.b)));
        buffers_free();
}
END_TEST

/* A million equal squares: one fp32 sum of them all would be off in the fourth digit. */
START_TEST(sums_of_large_planes_are_accurate) {
        struct kvd_memshare_shape shape = {1, 32, 256, 128, KVD_NUMBER_F32};
        struct kvd_memshare_query query = {
                &shape, KVD_MEMSHARE_FRO_NORM, (double)INFINITY, NULL, NULL, 0};
        float *data = buffer(elements(&shape) * sizeof *data), norms[2];
        struct kvd_memshare_block full = {data, norms}, zeros = full;
        double expected = 1.1f * sqrt((double)elements(&shape) / 2), found;

        for (size_t i = 0; i < elements(&shape); i++)
                data[i] = 1.1f;
        scalar->memshare->norms(&shape, data, norms);
        ck_assert(fabs((double)norms[0] / expected - 1) < 1e-6 && norms[0] == norms[1]);
        zeros.data = buffer(elements(&shape) * sizeof *data);
        found = scalar->memshare->distance(&query, &full, &zeros);
        ck_assert(fabs(found * 32 * 256 / expected - 1) < 1e-6);
        buffers_free();
}
END_TEST

SUITE("kernels: memshare",
      scalar = kvd_ops_pick("scalar"),
      TESTS(variants_equal_the_reference, limits_abandon_early, norms_reject_without_reading,
            equal_blocks_are_at_zero_and_nan_is_far, zeros_have_a_distance,
            sums_of_large_planes_are_accurate))
