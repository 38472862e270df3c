/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KeyDiff: every variant against the reference, bit for bit, over sizes, layouts, types and holes; the reference
 * against the formulas in double precision; and a count of the operations that the formulas need.
 */

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/keydiff.h"
#include "tests/kernels/buffers.h"

static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16};
static const uint32_t dims[] = {1, 3, 15, 16, 17, 31, 32, 33, 47, 48, 64, 80, 127, 128, 131, 256};

static const struct kvd_ops *scalar;
static const struct kvd_ops *variants[8];
static size_t n_variants;

static void find_variants(void) {
        scalar = kvd_ops_pick("scalar");
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                if (*v != scalar && (*v)->works())
                        variants[n_variants++] = *v;
}

struct shape {
        uint32_t tokens, per_block, heads, dim;
        enum kvd_number type;
        bool nhd, holes, broken; /* broken: some keys are zero, NaN or infinite */
};

static float key_element(const struct shape *s, uint32_t token, uint32_t element) {
        if (s->broken && token % 5 == 1)
                return 0.0f;
        if (s->broken && token % 7 == 3 && element == s->dim - 1)
                return token % 2 ? NAN : INFINITY;
        return (float)((double)random_u32() / 2147483648.0 - 1.0);
}

static void put(void *block, size_t i, enum kvd_number type, float value) {
        if (type == KVD_NUMBER_F32)
                ((float *)block)[i] = value;
        else
                scalar->narrow((uint16_t *)block + i, &value, 1, type);
}

/* Blocks that end at guard pages, in any order. */
static struct kvd_key_rows make_keys(const struct shape *s) {
        uint32_t n = DIV_UP(s->tokens, s->per_block);
        size_t size = s->type == KVD_NUMBER_F32 ? 4 : 2;
        const uint8_t **blocks = buffer(n * sizeof *blocks);
        struct kvd_key_rows keys = {.blocks = blocks, .offset = size * 5, .per_block = s->per_block, .heads = s->heads,
                                .dim = s->dim, .type = s->type};

        keys.head_stride = s->nhd ? s->dim : (size_t)s->per_block * s->dim;
        keys.token_stride = s->nhd ? (size_t)s->heads * s->dim : s->dim;
        for (uint32_t b = 0; b < n; b++) {
                void *block = buffer(keys.offset + size * s->heads * s->per_block * s->dim);

                for (uint32_t t = 0; t < s->per_block; t++)
                        for (uint32_t h = 0; h < s->heads; h++)
                                for (uint32_t d = 0; d < s->dim; d++)
                                        put(block, 5 + h * keys.head_stride + t * keys.token_stride + d, s->type,
                                            key_element(s, b * s->per_block + t, d));
                blocks[b] = s->holes && b % 3 == 1 ? NULL : block;
        }
        return keys;
}

/* ---- variants --------------------------------------------------------------------------------------------------- */

struct results {
        float *sums, *scores, *pairwise;
        uint32_t *counts;
};

static struct results run(const struct kvd_ops *ops, const struct kvd_key_rows *keys, uint32_t from, uint32_t to) {
        struct results r = {.sums = buffer((size_t)keys->heads * keys->dim * 4), .counts = buffer(keys->heads * 4),
                            .scores = buffer((size_t)keys->heads * (to - from) * 4), .pairwise = buffer(to * 4)};
        float *scratch = buffer(kvd_keydiff_scratch(keys) * sizeof *scratch);

        ops->keydiff->anchor(r.sums, r.counts, keys, from, to, scratch);
        ops->keydiff->score(r.scores, to - from, keys, from, to, r.sums, scratch);
        ops->keydiff->pairwise(r.pairwise, keys, keys->heads - 1, to, buffer((size_t)to * keys->dim * 4));
        return r;
}

static void variants_case(const struct shape *s, uint32_t from) {
        struct kvd_key_rows keys = make_keys(s);
        struct results expected = run(scalar, &keys, from, s->tokens);

        for (size_t v = 0; v < n_variants; v++) {
                struct results got = run(variants[v], &keys, from, s->tokens);

                assert_same_bits(expected.sums, got.sums, (size_t)s->heads * s->dim, variants[v]->name);
                assert_same_bits(expected.scores, got.scores, (size_t)s->heads * (s->tokens - from), variants[v]->name);
                assert_same_bits(expected.pairwise, got.pairwise, s->tokens, variants[v]->name);
                ck_assert_int_eq(memcmp(expected.counts, got.counts, s->heads * 4), 0);
        }
        buffers_free();
}

START_TEST(variants_equal_the_reference) {
        static const uint32_t tokens[] = {1, 2, 15, 16, 17, 40}, per_block[] = {1, 3, 16, 64};

        for (size_t d = 0; d < ARRAY_SIZE(dims); d++)
                for (size_t t = 0; t < ARRAY_SIZE(tokens); t++)
                        for (size_t b = 0; b < ARRAY_SIZE(per_block); b++)
                                for (size_t i = 0; i < ARRAY_SIZE(types) * 4; i++) {
                                        struct shape s = {tokens[t], per_block[b], 1 + (uint32_t)(d + t) % 3, dims[d],
                                                          types[i / 4], i & 1, i & 2, b & 1};

                                        variants_case(&s, tokens[t] / 4);
                                }
}
END_TEST

/* Past the length of a chain. */
START_TEST(long_sequences_equal_the_reference) {
        for (size_t i = 0; i < ARRAY_SIZE(types); i++)
                variants_case(&(struct shape){2500, 16, 2, 128, types[i], i == 1, i == 2, false}, 7);
}
END_TEST

/* ---- the formulas ----------------------------------------------------------------------------------------------- */

static double element(const struct kvd_key_rows *keys, uint32_t h, uint32_t t, uint32_t d) {
        size_t i = h * keys->head_stride + t % keys->per_block * keys->token_stride + d;
        const uint8_t *at = keys->blocks[t / keys->per_block] + keys->offset;
        float wide;

        if (keys->type == KVD_NUMBER_F32)
                return (double)((const float *)at)[i];
        scalar->widen(&wide, (const uint16_t *)at + i, 1, keys->type);
        return (double)wide;
}

static double norm_of(const struct kvd_key_rows *keys, uint32_t h, uint32_t t) {
        double sum = 0;

        for (uint32_t d = 0; d < keys->dim; d++)
                sum += element(keys, h, t, d) * element(keys, h, t, d);
        return sqrt(sum);
}

static void formula_case(const struct shape *s) {
        struct kvd_key_rows keys = make_keys(s);
        struct results got = run(scalar, &keys, 0, s->tokens);

        for (uint32_t h = 0; h < s->heads; h++) {
                double *m = calloc(s->dim, sizeof *m), length = 0;

                for (uint32_t t = 0; t < s->tokens; t++)
                        for (uint32_t d = 0; d < s->dim; d++)
                                m[d] += element(&keys, h, t, d) / norm_of(&keys, h, t);
                for (uint32_t d = 0; d < s->dim; d++) {
                        ck_assert_double_eq_tol((double)got.sums[h * s->dim + d], m[d], 1e-5 * s->tokens);
                        length += m[d] * m[d];
                }
                for (uint32_t t = 0; t < s->tokens; t++) {
                        double dot = 0;

                        for (uint32_t d = 0; d < s->dim; d++)
                                dot += m[d] * element(&keys, h, t, d);
                        ck_assert_double_eq_tol((double)got.scores[h * s->tokens + t],
                                                -dot / (sqrt(length) * norm_of(&keys, h, t)), 2e-6);
                }
                free(m);
        }
        buffers_free();
}

START_TEST(reference_is_the_formula) {
        for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
                formula_case(&(struct shape){50, 16, 2, 17, types[i], false, false, false});
                formula_case(&(struct shape){50, 16, 2, 128, types[i], true, false, false});
        }
}
END_TEST

START_TEST(keys_without_a_direction_score_below_all) {
        struct shape s = {40, 16, 2, 17, KVD_NUMBER_F32, false, true, true};
        struct kvd_key_rows keys = make_keys(&s);
        struct results got = run(scalar, &keys, 0, s.tokens);

        for (uint32_t t = 0; t < s.tokens; t++) {
                bool valid = t / 16 != 1 && t % 5 != 1 && t % 7 != 3;

                ck_assert_int_eq(isinf(got.scores[t]) != 0, !valid);
                if (valid)
                        ck_assert(got.scores[t] >= -1.000001f && got.scores[t] <= 1.000001f);
        }
        buffers_free();
}
END_TEST

START_TEST(scores_become_priorities_and_blocks) {
        float scores[10] = {-1, 0, 1, -INFINITY, NAN, 0.5f, -0.25f, -INFINITY, -INFINITY, -INFINITY};
        float p[10], mean[3], best[6];

        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                if (!(*v)->works())
                        continue;
                (*v)->keydiff->priority(p, scores, 10);
                ck_assert(p[0] == 0 && p[1] == 0.5f && p[2] == 1 && p[3] == 0 && p[4] == 0 && p[5] == 0.75f);
                /* two heads of five tokens, in blocks of two: the second head has nothing in its last blocks */
                (*v)->keydiff->blocks(mean, best, scores, 5, 2, 5, 2);
                ck_assert(best[0] == 0 && best[1] == 1 && isinf(best[2]) && best[3] == 0.5f && isinf(best[4]));
                ck_assert(mean[0] == 0.25f && mean[1] == 1 && isinf(mean[2]) && mean[2] < 0);
        }
}
END_TEST

/* ---- D7: what the formulas cost ---------------------------------------------------------------------------------- */

/* Weighted as in the paper: a division is 5, a square root 8. */
struct flops {
        uint64_t add, mul, div, root;
};

static double add(struct flops *f, double a, double b) {
        f->add++;
        return a + b;
}

static double mul(struct flops *f, double a, double b) {
        f->mul++;
        return a * b;
}

static double divide(struct flops *f, double a, double b) {
        f->div++;
        return a / b;
}

static double root(struct flops *f, double a) {
        f->root++;
        return sqrt(a);
}

/* A comparison counts as an addition. */
static double larger(struct flops *f, double a, double b) {
        f->add++;
        return a > b ? a : b;
}

static double dot(struct flops *f, const double *a, const double *b, uint32_t d) {
        double sum = mul(f, a[0], b[0]);

        for (uint32_t i = 1; i < d; i++)
                sum = add(f, sum, mul(f, a[i], b[i]));
        return sum;
}

/* The mean's 1 / n is in the reciprocal that each key is multiplied with, and costs no multiplications of its own. */
static void count_anchor(struct flops *f, double *m, double *norm, const double *k, uint32_t n, uint32_t d) {
        double per_token = divide(f, 1, n);

        for (uint32_t t = 0; t < n; t++, k += d) {
                double inverse;

                norm[t] = root(f, dot(f, k, k, d));
                inverse = divide(f, per_token, norm[t]);
                for (uint32_t i = 0; i < d; i++)
                        m[i] = t ? add(f, m[i], mul(f, k[i], inverse)) : mul(f, k[i], inverse);
        }
}

static void count_scores(struct flops *f, double *scores, const double *m, const double *norm, const double *k,
                         uint32_t n, uint32_t d) {
        double length = root(f, dot(f, m, m, d));

        for (uint32_t t = 0; t < n; t++)
                scores[t] = -divide(f, dot(f, m, k + (size_t)t * d, d), larger(f, mul(f, length, norm[t]), 1e-8));
}

static uint64_t weighted(const struct flops *f) {
        return f->add + f->mul + 5 * f->div + 8 * f->root;
}

/* The paper has 2n + 2 divisions in its sum, (6d + 18) n + d + 17; its text, and what is needed, is one less. */
START_TEST(D7_flop_counter) {
        enum { N = 1000, D = 128, PAPER = (6 * D + 18) * N + D + 17 };
        struct shape s = {N, N, 1, D, KVD_NUMBER_F32, false, false, false};
        struct kvd_key_rows keys = make_keys(&s);
        struct results got = run(scalar, &keys, 0, N);
        static double k[N * D], m[D], norm[N], scores[N];
        struct flops flops = {0};

        for (uint32_t t = 0; t < N; t++)
                for (uint32_t d = 0; d < D; d++)
                        k[t * D + d] = element(&keys, 0, t, d);
        count_anchor(&flops, m, norm, k, N, D);
        count_scores(&flops, scores, m, norm, k, N, D);
        for (uint32_t t = 0; t < N; t++) /* what is counted is what the kernel computes */
                ck_assert_double_eq_tol((double)got.scores[t], scores[t], 2e-6);
        ck_assert_uint_eq(flops.mul, 3 * N * D + D + N);
        ck_assert_uint_eq(flops.add, 3 * N * D - N - 1);
        ck_assert_uint_eq(flops.div, 2 * N + 1);
        ck_assert_uint_eq(flops.root, N + 1);
        ck_assert_uint_eq(weighted(&flops), 786140);
        ck_assert_uint_eq(weighted(&flops) + 5, PAPER);
        ck_assert_uint_eq(PAPER, 786145);
        buffers_free();
}
END_TEST

int main(void) {
        Suite *suite = suite_create("kernels: KeyDiff");
        TCase *tests = tcase_create("KeyDiff");
        SRunner *runner = srunner_create(suite);
        int failed;

        find_variants();
        tcase_set_timeout(tests, 200);
        tcase_add_test(tests, variants_equal_the_reference);
        tcase_add_test(tests, long_sequences_equal_the_reference);
        tcase_add_test(tests, reference_is_the_formula);
        tcase_add_test(tests, keys_without_a_direction_score_below_all);
        tcase_add_test(tests, scores_become_priorities_and_blocks);
        tcase_add_test(tests, D7_flop_counter);
        suite_add_tcase(suite, tests);
        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed > 0;
}
