/* SPDX-License-Identifier: Apache-2.0 */

/*
 * KeyDiff: every variant against the reference, bit for bit, over sizes, layouts, types and holes.
 * The formulas are in tests/kernels/methods.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/keydiff.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

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
        struct kvd_key_rows keys = {.blocks = blocks,
                                    .offset = size * 5,
                                    .per_block = s->per_block,
                                    .heads = s->heads,
                                    .dim = s->dim,
                                    .type = s->type};

        keys.head_stride = s->nhd ? s->dim : (size_t)s->per_block * s->dim;
        keys.token_stride = s->nhd ? (size_t)s->heads * s->dim : s->dim;
        for (uint32_t b = 0; b < n; b++) {
                void *block = buffer(keys.offset + size * s->heads * s->per_block * s->dim);

                for (uint32_t t = 0; t < s->per_block; t++)
                        for (uint32_t h = 0; h < s->heads; h++)
                                for (uint32_t d = 0; d < s->dim; d++)
                                        put(block,
                                            5 + h * keys.head_stride + t * keys.token_stride + d,
                                            s->type, key_element(s, b * s->per_block + t, d));
                blocks[b] = s->holes && b % 3 == 1 ? NULL : block;
        }
        return keys;
}

/* ---- variants -------------------------------------------------------------------------------- */

struct results {
        float *sums, *scores;
        uint32_t *counts;
};

static struct results run(const struct kvd_ops *ops, const struct kvd_key_rows *keys, uint32_t from,
                          uint32_t to) {
        struct results r = {.sums = buffer((size_t)keys->heads * keys->dim * 4),
                            .counts = buffer(keys->heads * 4),
                            .scores = buffer((size_t)keys->heads * (to - from) * 4)};
        float *scratch = buffer(kvd_keydiff_scratch(keys) * sizeof *scratch);

        ops->keydiff->anchor(r.sums, r.counts, keys, from, to, scratch);
        ops->keydiff->score(r.scores, to - from, keys, from, to, r.sums, scratch);
        return r;
}

static void variants_case(const struct shape *s, uint32_t from) {
        struct kvd_key_rows keys = make_keys(s);
        struct results expected = run(scalar, &keys, from, s->tokens);

        for (size_t v = 0; v < n_variants; v++) {
                struct results got = run(variants[v], &keys, from, s->tokens);

                assert_same_bits(expected.sums, got.sums, (size_t)s->heads * s->dim,
                                 variants[v]->name);
                assert_same_bits(expected.scores, got.scores, (size_t)s->heads * (s->tokens - from),
                                 variants[v]->name);
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
                                        struct shape s = {
                                                tokens[t], per_block[b], 1 + (uint32_t)(d + t) % 3,
                                                dims[d],   types[i / 4], i & 1,
                                                i & 2,     b & 1};

                                        variants_case(&s, tokens[t] / 4);
                                }
}
END_TEST

/* Longer than a chain of sums. */
START_TEST(long_sequences_equal_the_reference) {
        for (size_t i = 0; i < ARRAY_SIZE(types); i++)
                variants_case(&(struct shape){2500, 16, 2, 128, types[i], i == 1, i == 2, false},
                              7);
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
        float scores[10] = {-1,   0,      1,         -INFINITY, NAN,
                            0.5f, -0.25f, -INFINITY, -INFINITY, -INFINITY};
        float p[10], mean[3], best[6];

        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                if (!(*v)->works())
                        continue;
                (*v)->keydiff->priority(p, scores, 10);
                ck_assert(p[0] == 0 && p[1] == 0.5f && p[2] == 1 && p[3] == 0 && p[4] == 0 &&
                          p[5] == 0.75f);
                /*
                 * two heads of five tokens, in blocks of two: the second head has no valid token in
                 * its last blocks
                 */
                (*v)->keydiff->blocks(mean, best, scores, 5, 2, 5, 2);
                ck_assert(best[0] == 0 && best[1] == 1 && isinf(best[2]) && best[3] == 0.5f &&
                          isinf(best[4]));
                ck_assert(mean[0] == 0.25f && mean[1] == 1 && isinf(mean[2]) && mean[2] < 0);
        }
}
END_TEST

SUITE("kernels: KeyDiff",
      find_variants(),
      TESTS(variants_equal_the_reference, long_sequences_equal_the_reference,
            keys_without_a_direction_score_below_all, scores_become_priorities_and_blocks))
