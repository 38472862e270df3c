/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Operations on blocks that all methods use: every variant against the reference, over sizes,
 * strides and alignments, between guard pages. The reference is compared with numpy in
 * tests/kernels/methods/test_block.py.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/block.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

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

static void assert_bytes(const void *expected, const void *got, size_t n, const char *variant,
                         const char *what) {
        if (memcmp(expected, got, n) != 0)
                ck_abort_msg("%s: %s", variant, what);
}

/* ---- top-k ----------------------------------------------------------------------------------- */

static void topk_case(uint32_t n, uint32_t k, bool later) {
        float *scores = buffer(n * sizeof *scores);
        uint32_t most = MIN(k, n), *expected = buffer(most * 4), *got = buffer(most * 4),
                 *scratch = buffer(n * 4);

        for (uint32_t i = 0; i < n; i++) /* few distinct values, so that many are equal */
                scores[i] = random_u32() % 5 == 0 ? NAN : (float)(random_u32() % 7) - 3.0f;
        ck_assert_uint_eq(scalar->block->topk(expected, scores, n, k, later, scratch), most);
        for (uint32_t i = 1; i < most; i++)
                ck_assert_uint_lt(expected[i - 1], expected[i]);
        for (size_t v = 0; v < n_variants; v++) {
                ck_assert_uint_eq(variants[v]->block->topk(got, scores, n, k, later, scratch),
                                  most);
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

/* ---- blocks ---------------------------------------------------------------------------------- */

/* In place: tokens move down within the same blocks. */
static void compact_case(const struct kvd_ops *v, uint32_t bytes, uint32_t per_block,
                         size_t stride) {
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
                assert_bytes(copy[index[j]], blocks[j / per_block] + 7 + j % per_block * stride,
                             bytes, v->name, "compaction in place");
        buffers_free();
}

START_TEST(compaction_works_in_place) {
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++)
                for (uint32_t bytes = 1; bytes < 300 && (*v)->works(); bytes += bytes < 70 ? 1 : 23)
                        for (uint32_t per_block = 1; per_block < 20; per_block += 5)
                                compact_case(*v, bytes, per_block, bytes + per_block % 3 * 5);
}
END_TEST

SUITE("kernels: blocks",
      find_variants(),
      TESTS(topk_equals_the_reference, compaction_works_in_place))
