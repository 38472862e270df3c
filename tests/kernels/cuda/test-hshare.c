/* SPDX-License-Identifier: Apache-2.0 */

/* Counts the bits that rows have in common, on a GPU and by the reference; rows cross blocks. */

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/cuda/hshare.h"
#include "kernels/hshare.h"
#include "kernels/ops.h"
#include "tests/kernels/cuda/pool.h"
#include "tests/lib/suite.h"

enum { BLOCKS = 7, PAIRS = 5 };

/* The rows of the pool, contiguous; zeros where a block is not resident. */
static uint64_t *all_rows(const struct pool *pool) {
        uint8_t *rows = buffer(BLOCKS * pool->blocks.block_bytes);

        for (uint32_t i = 0; i < BLOCKS; i++)
                if (pool_block(pool, i))
                        memcpy(rows + i * pool->blocks.block_bytes, pool_block(pool, i),
                               pool->blocks.block_bytes);
        return (uint64_t *)rows;
}

static void fill(const struct pool *pool) {
        for (uint32_t i = 0; i < BLOCKS; i++)
                for (uint64_t k = 0; k < pool->blocks.block_bytes; k++)
                        pool_block(pool, i)[k] = (uint8_t)random_u32();
}

static void compare(const struct gpu_overlap *a, const struct gpu_overlap_pair *pairs,
                    const uint64_t *rows) {
        const uint32_t *got = host_of(a->to);
        uint32_t n = a->end - a->first, expected;

        for (uint32_t i = 0; i < a->n * n; i++) {
                const struct gpu_overlap_pair *p = &pairs[i / n];
                uint64_t row = a->first + i % n;

                kvd_ops_pick("scalar")->hshare->overlap(&expected, rows + (p->a + row) * a->words,
                                                        rows + (p->b + row) * a->words, 1,
                                                        a->words);
                ck_assert_msg(got[i] == expected, "%u words: %u, not %u, of pair %u", a->words,
                              got[i], expected, i / n);
        }
}

/* Rows of words words fill the pool, except for a remainder. */
static void overlap_case(uint32_t words, size_t block_words, bool gone) {
        uint32_t rows = (uint32_t)(BLOCKS * block_words / words), each = rows / 3;
        struct gpu_overlap a = {.n = PAIRS, .first = each / 4, .end = each, .words = words};
        struct gpu_overlap_pair *pairs = buffer(PAIRS * sizeof *pairs);
        struct pool pool;

        pool_make(&pool, BLOCKS, block_words * sizeof(uint64_t));
        fill(&pool);
        if (gone)
                pool_drop(&pool, 1);
        for (uint32_t i = 0; i < PAIRS; i++)
                pairs[i] = (struct gpu_overlap_pair){i ? random_u32() % (rows - each + 1) : 0,
                                                     i ? random_u32() % (rows - each + 1) :
                                                         rows - each};
        a.blocks = pool.blocks;
        a.pairs = address_of(pairs);
        a.to = room(PAIRS * (a.end - a.first) * sizeof(uint32_t));
        fixture_ok(gpu_overlap(fixture_gpu(), NULL, &a));
        fixture_wait();
        compare(&a, pairs, all_rows(&pool));
        buffers_free();
}

START_TEST(bits_in_common_are_those_of_the_reference) {
        static const uint32_t words[] = {1, 2, 9, 31, 32, 33, 107, 512};

        fixture_seed((uint64_t)_i);
        for (uint32_t i = 0; i < ARRAY_SIZE(words); i++)
                for (uint32_t k = 0; k < 3; k++)
                        overlap_case(words[i], (size_t[]){words[i] * 6, 513, 300 + i}[k],
                                     (i + (uint32_t)_i) % 2);
}
END_TEST

START_TEST(what_cannot_be_is_refused) {
        struct gpu_overlap a = {.n = 1, .end = 1, .words = 1}, b;
        struct pool pool;

        pool_make(&pool, BLOCKS, 64);
        ck_assert_int_eq(gpu_overlap(fixture_gpu(), NULL, &a), -EINVAL);
        a.blocks = pool.blocks;
        a.pairs = room(sizeof(struct gpu_overlap_pair));
        a.to = room(sizeof(uint32_t));
        b = a, b.first = 2;
        ck_assert_int_eq(gpu_overlap(fixture_gpu(), NULL, &b), -EINVAL);
        b = a, b.blocks.block_bytes = 60;
        ck_assert_int_eq(gpu_overlap(fixture_gpu(), NULL, &b), -EINVAL);
        b = a, b.n = GPU_OVERLAP_PAIRS + 1;
        ck_assert_int_eq(gpu_overlap(fixture_gpu(), NULL, &b), -EINVAL);
        b = a, b.n = 0;
        ck_assert_int_eq(gpu_overlap(fixture_gpu(), NULL, &b), 0);
        buffers_free();
}
END_TEST

SUITE("cuda: hshare", fixture_begin(), LOOPS(3, bits_in_common_are_those_of_the_reference),
      TESTS(what_cannot_be_is_refused))
