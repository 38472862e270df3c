/* SPDX-License-Identifier: Apache-2.0 */

/* Every variant against the scalar one; that against sums in double precision; and what must hold of distances. */

#include <check.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/memshare.h"
#include "tests/kernels/buffers.h"

static const struct kvd_ops *scalar;
static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16};
static const enum kvd_memshare_metric metrics[] = {KVD_MEMSHARE_FRO_NORM, KVD_MEMSHARE_MEAN_L2, KVD_MEMSHARE_RELATIVE};

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

static float number(const struct kvd_memshare_shape *s, const void *block, size_t i) {
        float f;

        if (s->type == KVD_NUMBER_F32)
                return ((const float *)block)[i];
        scalar->widen(&f, (const uint16_t *)block + i, 1, s->type);
        return f;
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
        float *means = buffer(kvd_memshare_means(s) * sizeof *means);

        for (size_t i = 0; i < elements(s); i++)
                set_number(s, data, i, centre + (float)((double)random_u32() / 2147483648.0 - 1.0));
        scalar->memshare->norms(s, data, norms);
        scalar->memshare->mean(s, data, means);
        return (struct kvd_memshare_block){data, norms, means};
}

static void make_scene(struct scene *s, struct kvd_memshare_shape shape, enum kvd_memshare_metric metric,
                       uint32_t half, float centre) {
        float *cosine = buffer(half * sizeof *cosine), *sine = buffer(half * sizeof *sine);
        double frequencies[256];

        s->shape = shape;
        s->a = make_block(&s->shape, 0.0f);
        s->b = make_block(&s->shape, centre);
        kvd_memshare_frequencies(frequencies, half, 1e4);
        kvd_memshare_angles(frequencies, half, -(int64_t)(random_u32() % 5000), cosine, sine);
        s->query = (struct kvd_memshare_query){&s->shape, metric, NULL, (double)INFINITY, cosine, sine, half};
}

/* ---- the variants ---- */

static void variant_case(const struct kvd_ops *v, const struct scene *s) {
        size_t n_means = kvd_memshare_means(&s->shape), n_norms = (size_t)2 * s->shape.layers;
        float *means = buffer(n_means * sizeof *means), *norms = buffer(n_norms * sizeof *norms);
        double expected = scalar->memshare->distance(&s->query, &s->a, &s->b, NULL);
        double got = v->memshare->distance(&s->query, &s->a, &s->b, NULL);

        if (memcmp(&expected, &got, sizeof got) != 0)
                ck_abort_msg("%s: distance %a, expected %a", v->name, got, expected);
        expected = scalar->memshare->bound(&s->query, &s->a, &s->b);
        got = v->memshare->bound(&s->query, &s->a, &s->b);
        if (memcmp(&expected, &got, sizeof got) != 0)
                ck_abort_msg("%s: bound %a, expected %a", v->name, got, expected);
        v->memshare->norms(&s->shape, s->a.data, norms);
        assert_same_bits(s->a.norms, norms, n_norms, v->name);
        v->memshare->mean(&s->shape, s->a.data, means);
        assert_same_bits(s->a.means, means, n_means, v->name);
}

START_TEST(variants_equal_the_reference) {
        static const uint32_t dims[] = {1, 2, 3, 16, 17, 33, 64, 80, 127, 128, 256}, tokens[] = {1, 3, 16};

        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (size_t d = 0; d < ARRAY_SIZE(dims) && (*v)->works(); d++)
                        for (size_t i = 0; i < 3 * 3 * 3 * 3; i++) {
                                uint32_t half = i / 27 == 0 ? 0 : i / 27 == 1 ? dims[d] / 2 : dims[d] / 4;
                                struct kvd_memshare_shape shape = {1 + i % 2, 1 + i % 3, tokens[i / 3 % 3], dims[d],
                                                                   1 + i % 2, types[i / 9 % 3]};
                                struct scene s;

                                make_scene(&s, shape, metrics[i % 3], half, 0.3f);
                                variant_case(*v, &s);
                                buffers_free();
                        }
}
END_TEST

static void rotate_case(const struct kvd_ops *v, uint32_t dim, uint32_t half, enum kvd_number type) {
        uint32_t n = 1 + dim % 4, ldx = dim + 1, ldy = dim + 3;
        struct kvd_memshare_shape shape = {.layers = 1, .heads = 1, .tokens = 1, .dim = 1, .type = type};
        float *cosine = random_floats(half), *sine = random_floats(half), *whole;
        float *expected = random_floats((n - 1) * ldy + dim), *got = copy_floats(expected, (n - 1) * ldy + dim);
        void *x = buffer(((n - 1) * ldx + dim) * element(type));

        for (uint32_t i = 0; i < (n - 1) * ldx + dim; i++)
                set_number(&shape, x, i, (float)(int32_t)random_u32() / 1e9f);
        scalar->memshare->rotate(expected, ldy, x, ldx, type, n, dim, cosine, sine, half);
        v->memshare->rotate(got, ldy, x, ldx, type, n, dim, cosine, sine, half);
        assert_same_bits(expected, got, (n - 1) * ldy + dim, v->name);
        for (uint32_t r = 0; r < n && type == KVD_NUMBER_F32; r++) { /* in place, and as ops.h does it */
                whole = copy_floats((const float *)x + r * ldx, dim);
                v->memshare->rotate(whole, dim, whole, dim, type, 1, dim, cosine, sine, half);
                assert_same_bits(expected + r * ldy, whole, dim, v->name);
                memcpy(whole, (const float *)x + r * ldx, dim * sizeof *whole);
                scalar->rope(whole, cosine, sine, half);
                assert_same_bits(expected + r * ldy, whole, dim, "rope");
        }
        buffers_free();
}

START_TEST(rotation_equals_the_reference) {
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (uint32_t dim = 1; dim < 150 && (*v)->works(); dim++)
                        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                                rotate_case(*v, dim, dim / 2, types[t]);
                                rotate_case(*v, dim, dim / 4, types[t]);
                        }
}
END_TEST

/* ---- the reference ---- */

static double oracle(const struct scene *s) {
        const struct kvd_memshare_shape *p = &s->shape;
        uint32_t rows = p->heads * p->tokens, half = s->query.half;
        double sum = 0.0;

        for (uint32_t i = 0; i < 2 * p->layers; i++) {
                double squares = 0, norms = 0, square_a = 0, square_b = 0;

                for (size_t row = (size_t)i * rows; row < (size_t)(i + 1) * rows; row++) {
                        double row_squares = 0;

                        for (uint32_t d = 0; d < p->dim; d++) {
                                double x = (double)number(p, s->a.data, row * p->dim + d);
                                double y = (double)number(p, s->b.data, row * p->dim + d);
                                uint32_t pair = d % MAX(half, 1), other = d < half ? d + half : d - half;

                                square_a += x * x, square_b += y * y;
                                if (i % 2 == 0 && d < 2 * half)
                                        y = y * (double)s->query.cosine[pair] +
                                            (double)number(p, s->b.data, row * p->dim + other) *
                                                    (double)s->query.sine[pair] * (d < half ? -1 : 1);
                                row_squares += (x - y) * (x - y);
                        }
                        squares += row_squares;
                        norms += sqrt(row_squares);
                }
                if (s->query.metric == KVD_MEMSHARE_RELATIVE)
                        sum += 0.5 * sqrt(squares) / sqrt(sqrt(square_a) * sqrt(square_b));
                else
                        sum += (s->query.metric == KVD_MEMSHARE_FRO_NORM ? sqrt(squares) : norms) / (2.0 * rows);
        }
        return sum / p->layers;
}

static struct kvd_memshare_shape random_shape(void) {
        return (struct kvd_memshare_shape){1 + random_u32() % 5,  1 + random_u32() % 4, 1 + random_u32() % 20,
                                           1 + random_u32() % 90, 1 + random_u32() % 2, types[random_u32() % 3]};
}

START_TEST(distances_are_what_they_say) {
        for (uint32_t i = 0; i < 600; i++) {
                struct kvd_memshare_shape shape = random_shape();
                struct scene s;
                double expected, got;
                uint32_t layers;

                make_scene(&s, shape, metrics[i % 3], i % 2 ? shape.dim / 2 : 0, (float)(i % 5) / 4.0f);
                expected = oracle(&s);
                got = scalar->memshare->distance(&s.query, &s.a, &s.b, &layers);
                if (fabs(got - expected) > 1e-6 * expected || layers != shape.layers)
                        ck_abort_msg("case %u: %.9g, expected %.9g, %u layers", i, got, expected, layers);
                if (scalar->memshare->bound(&s.query, &s.a, &s.b) > expected)
                        ck_abort_msg("case %u: bound above %g", i, expected);
                buffers_free();
        }
}
END_TEST

/* A limit changes no answer that it lets through, and stops no later than it must. */
START_TEST(limits_abandon_early) {
        for (uint32_t i = 0; i < 300; i++) {
                struct kvd_memshare_shape shape = random_shape();
                uint32_t order[5] = {4, 2, 0, 3, 1}, layers, *at = order;
                struct scene s;
                double whole, limit;

                shape.layers = 5;
                make_scene(&s, shape, metrics[i % 3], i % 2 ? shape.dim / 2 : 0, 0.0f);
                s.query.order = at;
                whole = scalar->memshare->distance(&s.query, &s.a, &s.b, NULL);
                limit = s.query.limit = whole * 1.000001;
                ck_assert(scalar->memshare->distance(&s.query, &s.a, &s.b, &layers) == whole && layers == 5);
                s.query.limit = whole * 0.999;
                ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b, &layers)));
                s.a.norms = s.query.metric == KVD_MEMSHARE_RELATIVE ? s.a.norms : NULL;
                s.query.limit = limit / 50;
                ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b, &layers)) && layers <= 1);
                buffers_free();
        }
}
END_TEST

START_TEST(norms_and_means_reject_without_reading) {
        for (size_t m = 0; m < ARRAY_SIZE(metrics); m++) {
                struct kvd_memshare_shape shape = {3, 2, 16, 32, KVD_MEMSHARE_NHD, KVD_NUMBER_BF16};
                uint32_t layers = 99;
                struct scene s;
                double whole;

                make_scene(&s, shape, metrics[m], 16, 5.0f); /* far apart, and in their means */
                whole = scalar->memshare->distance(&s.query, &s.a, &s.b, NULL);
                s.query.limit = whole / 2;
                s.a.data = s.b.data = NULL;
                ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b, &layers)) && layers == 0);
                buffers_free();
        }
}
END_TEST

START_TEST(equal_blocks_are_at_zero_and_nan_is_far) {
        for (size_t m = 0; m < ARRAY_SIZE(metrics); m++)
                for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                        struct kvd_memshare_shape shape = {3, 2, 4, 20, KVD_MEMSHARE_HND, types[t]};
                        struct scene s;
                        uint32_t layers;

                        make_scene(&s, shape, metrics[m], 0, 0.0f);
                        s.query.limit = 0.0;
                        ck_assert(scalar->memshare->distance(&s.query, &s.a, &s.a, NULL) == 0.0);
                        s.query.limit = 1e9;
                        s.b = s.a;
                        s.b.data = buffer(elements(&shape) * element(shape.type));
                        memcpy((void *)s.b.data, s.a.data, elements(&shape) * element(shape.type));
                        set_number(&shape, (void *)s.b.data, elements(&shape) / 3 + 5, NAN); /* in layer 1 */
                        ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b, &layers)) && layers == 2);
                        buffers_free();
                }
}
END_TEST

START_TEST(zeros_have_a_distance) {
        struct kvd_memshare_shape shape = {2, 1, 4, 8, KVD_MEMSHARE_HND, KVD_NUMBER_F32};
        struct scene s;

        make_scene(&s, shape, KVD_MEMSHARE_RELATIVE, 0, 0.0f);
        memset((void *)s.a.data, 0, elements(&shape) * sizeof(float));
        memset((void *)s.a.norms, 0, 4 * sizeof(float));
        memset((void *)s.a.means, 0, kvd_memshare_means(&shape) * sizeof(float));
        ck_assert(scalar->memshare->distance(&s.query, &s.a, &s.a, NULL) == 0.0);
        ck_assert(isinf(scalar->memshare->distance(&s.query, &s.a, &s.b, NULL)));
        s.query.metric = KVD_MEMSHARE_FRO_NORM;
        ck_assert(isfinite(scalar->memshare->distance(&s.query, &s.a, &s.b, NULL)));
        buffers_free();
}
END_TEST

/* A million equal squares: one fp32 sum of them all would be off in the fourth digit. */
START_TEST(sums_of_large_planes_are_accurate) {
        struct kvd_memshare_shape shape = {1, 32, 256, 128, KVD_MEMSHARE_HND, KVD_NUMBER_F32};
        struct kvd_memshare_query query = {&shape, KVD_MEMSHARE_FRO_NORM, NULL, (double)INFINITY, NULL, NULL, 0};
        float *data = buffer(elements(&shape) * sizeof *data), norms[2];
        struct kvd_memshare_block full = {data, norms, NULL}, zeros = full;
        double expected = 1.1f * sqrt((double)elements(&shape) / 2), found;

        for (size_t i = 0; i < elements(&shape); i++)
                data[i] = 1.1f;
        scalar->memshare->norms(&shape, data, norms);
        ck_assert(fabs((double)norms[0] / expected - 1) < 1e-6 && norms[0] == norms[1]);
        zeros.data = buffer(elements(&shape) * sizeof *data);
        found = scalar->memshare->distance(&query, &full, &zeros, NULL);
        ck_assert(fabs(found * 32 * 256 / expected - 1) < 1e-6);
        buffers_free();
}
END_TEST

START_TEST(mean_knows_both_orders) {
        struct kvd_memshare_shape shape = {2, 3, 5, 7, KVD_MEMSHARE_HND, KVD_NUMBER_F32};
        struct scene s;

        for (uint32_t nhd = 0; nhd < 2; nhd++) {
                shape.order = nhd ? KVD_MEMSHARE_NHD : KVD_MEMSHARE_HND;
                make_scene(&s, shape, KVD_MEMSHARE_RELATIVE, 0, 0.0f);
                for (uint32_t i = 0; i < 4 * 3 * 7; i++) {
                        uint32_t plane = i / 21, h = i / 7 % 3, d = i % 7;
                        double sum = 0;

                        for (uint32_t t = 0; t < 5; t++)
                                sum += (double)number(&shape, s.a.data,
                                                      plane * 105 + (nhd ? t * 21 + h * 7 : h * 35 + t * 7) + d);
                        ck_assert(fabs(sum / 5 - (double)s.a.means[i]) < 1e-6);
                }
                buffers_free();
        }
}
END_TEST

/* ---- bags ---- */

static struct kvd_bag bag_of(const uint32_t *tokens, uint32_t n) {
        struct kvd_bag bag;

        kvd_bag_make(&bag, tokens, n, buffer(n * sizeof(uint32_t)), buffer(n * sizeof(uint16_t)));
        return bag;
}

START_TEST(bags_count_words) {
        for (uint32_t i = 0; i < 2000; i++) {
                uint32_t n = random_u32() % 70, range = 1 + random_u32() % 50, tokens[70], total = 0;
                struct kvd_bag bag;

                for (uint32_t k = 0; k < n; k++)
                        tokens[k] = random_u32() % range * 0x03000001u;
                bag = bag_of(tokens, n);
                for (uint32_t k = 0; k < bag.n; k++) {
                        uint32_t count = 0;

                        ck_assert(k == 0 || bag.ids[k - 1] < bag.ids[k]);
                        for (uint32_t j = 0; j < n; j++)
                                count += tokens[j] == bag.ids[k];
                        ck_assert_uint_eq(count, bag.counts[k]);
                        total += count;
                }
                ck_assert_uint_eq(total, n);
                ck_assert(kvd_bag_cosine(&bag, &bag) == (n > 0 ? 1.0 : 0.0));
                buffers_free();
        }
}
END_TEST

START_TEST(counts_saturate) {
        static uint32_t tokens[70000];
        struct kvd_bag bag = bag_of(tokens, ARRAY_SIZE(tokens));

        ck_assert(bag.n == 1 && bag.counts[0] == UINT16_MAX && kvd_bag_cosine(&bag, &bag) == 1.0);
        buffers_free();
}
END_TEST

int main(void) {
        Suite *suite = suite_create("kernels: memshare");
        TCase *tests = tcase_create("memshare");
        SRunner *runner = srunner_create(suite);
        int failed;

        scalar = kvd_ops_pick("scalar");
        tcase_set_timeout(tests, 120);
        tcase_add_test(tests, variants_equal_the_reference);
        tcase_add_test(tests, rotation_equals_the_reference);
        tcase_add_test(tests, distances_are_what_they_say);
        tcase_add_test(tests, limits_abandon_early);
        tcase_add_test(tests, norms_and_means_reject_without_reading);
        tcase_add_test(tests, equal_blocks_are_at_zero_and_nan_is_far);
        tcase_add_test(tests, zeros_have_a_distance);
        tcase_add_test(tests, sums_of_large_planes_are_accurate);
        tcase_add_test(tests, mean_knows_both_orders);
        tcase_add_test(tests, bags_count_words);
        tcase_add_test(tests, counts_saturate);
        suite_add_tcase(suite, tests);
        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed > 0;
}
