/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What all methods do with blocks: every variant against the reference over sizes, strides and alignments, between
 * guard pages. What the reference means is compared with numpy in tests/methods/test_block.py.
 */

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/block.h"
#include "tests/kernels/buffers.h"

static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16};

static const struct kvd_ops *scalar;
static const struct kvd_ops *variants[8];
static size_t n_variants;

static void find_variants(void) {
        scalar = kvd_ops_pick("scalar");
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                if (*v != scalar && (*v)->works())
                        variants[n_variants++] = *v;
}

static uint8_t *random_bytes(size_t n) {
        uint8_t *bytes = buffer(n);

        for (size_t i = 0; i < n; i++)
                bytes[i] = (uint8_t)random_u32();
        return bytes;
}

static void assert_bytes(const void *expected, const void *got, size_t n, const char *variant, const char *what) {
        if (memcmp(expected, got, n) != 0)
                ck_abort_msg("%s: %s", variant, what);
}

/* ---- top-k ------------------------------------------------------------------------------------------------------ */

static void topk_case(uint32_t n, uint32_t k, bool later) {
        float *scores = buffer(n * sizeof *scores);
        uint32_t most = MIN(k, n), *expected = buffer(most * 4), *got = buffer(most * 4), *scratch = buffer(n * 4);

        for (uint32_t i = 0; i < n; i++) /* few values, so that many are equal */
                scores[i] = random_u32() % 5 == 0 ? NAN : (float)(random_u32() % 7) - 3.0f;
        ck_assert_uint_eq(scalar->block->topk(expected, scores, n, k, later, scratch), most);
        for (uint32_t i = 1; i < most; i++)
                ck_assert_uint_lt(expected[i - 1], expected[i]);
        for (size_t v = 0; v < n_variants; v++) {
                ck_assert_uint_eq(variants[v]->block->topk(got, scores, n, k, later, scratch), most);
                assert_bytes(expected, got, most * 4, variants[v]->name, "top-k");
        }
        buffers_free();
}

START_TEST(topk_equals_the_reference) {
        for (uint32_t n = 0; n < 70; n++)
                for (uint32_t k = 0; k < n + 3; k += 1 + n / 9) {
                        topk_case(n, k, false);
                        topk_case(n, k, true);
                }
        topk_case(100000, 777, true);
}
END_TEST

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

static void gather_case(const struct kvd_ops *v, uint32_t n, size_t offset, size_t bytes) {
        uint8_t **blocks = buffer(n * sizeof *blocks), *dense = buffer(n * bytes), *back;

        for (uint32_t i = 0; i < n; i++)
                blocks[i] = i % 4 == 2 ? NULL : random_bytes(offset + bytes);
        memset(dense, 0xa5, n * bytes);
        v->block->gather(dense, (const uint8_t *const *)blocks, n, offset, bytes);
        for (uint32_t i = 0; i < n; i++)
                for (size_t b = 0; b < bytes; b++)
                        if (dense[i * bytes + b] != (blocks[i] ? blocks[i][offset + b] : 0))
                                ck_abort_msg("%s: gather of %zu bytes at %zu", v->name, bytes, offset);
        back = random_bytes(n * bytes);
        v->block->scatter(blocks, back, n, offset, bytes);
        for (uint32_t i = 0; i < n; i++)
                if (blocks[i])
                        assert_bytes(back + i * bytes, blocks[i] + offset, bytes, v->name, "scatter");
        buffers_free();
}

START_TEST(gather_and_scatter_copy_exactly) {
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                for (size_t bytes = 1; bytes < 300 && (*v)->works(); bytes += bytes < 140 ? 1 : 31)
                        for (size_t offset = 0; offset < 80; offset += 13)
                                gather_case(*v, 7, offset, bytes);
                if ((*v)->works()) /* past the caches, with and without a rest */
                        for (size_t rest = 0; rest < 3; rest++)
                                gather_case(*v, 5, 3 * rest, (1 << 20) + 37 * rest);
        }
}
END_TEST

/* In place: tokens move down within the blocks that they came from. */
static void compact_case(const struct kvd_ops *v, uint32_t bytes, uint32_t per_block, size_t stride) {
        enum { TOKENS = 50 };
        uint32_t n_blocks = DIV_UP(TOKENS, per_block), index[TOKENS], n = 0;
        uint8_t **blocks = buffer(n_blocks * sizeof *blocks), copy[TOKENS][300];
        struct kvd_slots slots = {blocks, 7, stride, per_block, bytes};

        for (uint32_t b = 0; b < n_blocks; b++)
                blocks[b] = random_bytes(7 + (per_block - 1) * stride + bytes);
        for (uint32_t t = 0; t < TOKENS; t++) {
                memcpy(copy[t], blocks[t / per_block] + 7 + t % per_block * stride, bytes);
                if (random_u32() % 3)
                        index[n++] = t;
        }
        v->block->compact(&slots, &slots, index, n);
        for (uint32_t j = 0; j < n; j++)
                assert_bytes(copy[index[j]], blocks[j / per_block] + 7 + j % per_block * stride, bytes, v->name,
                             "compaction in place");
        buffers_free();
}

START_TEST(compaction_works_in_place) {
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (uint32_t bytes = 1; bytes < 300 && (*v)->works(); bytes += bytes < 70 ? 1 : 23)
                        for (uint32_t per_block = 1; per_block < 20; per_block += 5)
                                compact_case(*v, bytes, per_block, bytes + per_block % 3 * 5);
}
END_TEST

/* ---- four bits -------------------------------------------------------------------------------------------------- */

static void pack_case(uint32_t n, uint32_t dim, uint32_t group, size_t slack, enum kvd_number type) {
        size_t size = type == KVD_NUMBER_F32 ? 4 : 2, packed = n * kvd_packed_4_bytes(dim, group);
        size_t wide = ((n - 1) * (dim + slack) + dim) * size;
        uint8_t *rows = random_bytes(wide), *expected = buffer(packed), *got = buffer(packed);
        uint8_t *back = buffer(wide), *got_back = buffer(wide);

        scalar->block->pack_4(expected, rows, dim + slack, n, dim, group, type);
        scalar->block->unpack_4(back, dim + slack, expected, n, dim, group, type);
        for (size_t v = 0; v < n_variants; v++) {
                variants[v]->block->pack_4(got, rows, dim + slack, n, dim, group, type);
                assert_bytes(expected, got, packed, variants[v]->name, "pack_4");
                memset(got_back, 0, wide);
                variants[v]->block->unpack_4(got_back, dim + slack, got, n, dim, group, type);
                assert_bytes(back, got_back, wide, variants[v]->name, "unpack_4");
        }
        buffers_free();
}

/* Any bytes: NaNs, infinities and subnormal numbers are among them. */
START_TEST(four_bits_equal_the_reference) {
        static const uint32_t groups[] = {0, 2, 16, 18, 32, 64}, rows[] = {1, 2, 5, 33};

        for (size_t t = 0; t < ARRAY_SIZE(types); t++)
                for (size_t g = 0; g < ARRAY_SIZE(groups); g++)
                        for (size_t r = 0; r < ARRAY_SIZE(rows); r++)
                                for (uint32_t dim = 1; dim < 150; dim += dim < 40 ? 1 : 11)
                                        pack_case(rows[r], dim, groups[g], dim % 3, types[t]);
        pack_case(40, 128, 32, 0, KVD_NUMBER_BF16);
}
END_TEST

int main(void) {
        Suite *suite = suite_create("kernels: blocks");
        TCase *tests = tcase_create("blocks");
        SRunner *runner = srunner_create(suite);
        int failed;

        find_variants();
        tcase_set_timeout(tests, 120);
        tcase_add_test(tests, topk_equals_the_reference);
        tcase_add_test(tests, gather_and_scatter_copy_exactly);
        tcase_add_test(tests, compaction_works_in_place);
        tcase_add_test(tests, four_bits_equal_the_reference);
        suite_add_tcase(suite, tests);
        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed > 0;
}
