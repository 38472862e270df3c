/* SPDX-License-Identifier: Apache-2.0 */

/* Tokens that a GPU compacts equal the reference's, byte for byte. */

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/block.h"
#include "kernels/cuda/block.h"
#include "kernels/ops.h"
#include "tests/kernels/cuda/pool.h"
#include "tests/lib/suite.h"

enum { FROM = 6, TO = 3, LAYERS = 2, HEADS = 3 };

struct scene {
        struct gpu_compact a;
        struct pool pool;
        uint32_t *index;
        uint8_t *expected; /* [block]: the pool, block by block of ids */
};

static void choose(struct scene *s) {
        uint32_t tokens = FROM * s->a.per_block, rows = LAYERS * HEADS;

        s->index = buffer((size_t)rows * s->a.n * sizeof *s->index);
        for (uint32_t r = 0; r < rows; r++)
                for (uint32_t j = 0; j < s->a.n; j++)
                        s->index[r * s->a.n + j] = (j * tokens + random_u32() % tokens) / s->a.n;
        s->a.index = address_of(s->index);
}

/* NHD or HND, with other data before and after each block's planes. */
static void make_scene(struct scene *s, uint32_t per_block, uint32_t bytes, bool nhd, size_t lead) {
        size_t plane = (size_t)HEADS * per_block * bytes;

        *s = (struct scene){.a = {.offset = lead,
                                  .layer_stride = 2 * plane,
                                  .plane = plane,
                                  .head_stride = nhd ? bytes : per_block * bytes,
                                  .slot_stride = nhd ? HEADS * bytes : bytes,
                                  .to = FROM,
                                  .layers = LAYERS,
                                  .heads = HEADS,
                                  .per_block = per_block,
                                  .n = (TO - 1) * per_block + 1,
                                  .bytes = bytes}};
        pool_make(&s->pool, FROM + TO, 2 * lead + LAYERS * 2 * plane);
        for (uint32_t b = 0; b < FROM + TO; b++)
                for (size_t i = 0; i < s->pool.blocks.block_bytes; i++)
                        pool_block(&s->pool, b)[i] = (uint8_t)random_u32();
        s->a.blocks = s->pool.blocks;
        choose(s);
}

static void reference(struct scene *s) {
        size_t each = s->pool.blocks.block_bytes;
        uint8_t **blocks = buffer((FROM + TO) * sizeof *blocks);

        s->expected = buffer((FROM + TO) * each);
        for (uint32_t b = 0; b < FROM + TO; b++) {
                blocks[b] = s->expected + b * each;
                memcpy(blocks[b], pool_block(&s->pool, b), each);
        }
        for (uint32_t r = 0; r < LAYERS * HEADS * 2; r++) {
                uint32_t row = r / 2, layer = row / HEADS, head = row % HEADS;
                struct kvd_slots from = {blocks,
                                         s->a.offset + layer * s->a.layer_stride +
                                                 r % 2 * s->a.plane + head * s->a.head_stride,
                                         s->a.slot_stride, s->a.per_block, s->a.bytes};
                struct kvd_slots to = from;

                to.blocks += FROM;
                kvd_ops_pick("scalar")->block->compact(&to, &from, s->index + row * s->a.n, s->a.n);
        }
}

static void compact_case(uint32_t per_block, uint32_t bytes, bool nhd, size_t lead) {
        struct scene s;

        make_scene(&s, per_block, bytes, nhd, lead);
        reference(&s);
        fixture_ok(gpu_compact(fixture_gpu(), NULL, &s.a));
        fixture_wait();
        for (uint32_t b = 0; b < FROM + TO; b++)
                ck_assert_msg(memcmp(s.expected + b * s.pool.blocks.block_bytes,
                                     pool_block(&s.pool, b), s.pool.blocks.block_bytes) == 0,
                              "%u tokens of %u bytes at %zu: block %u", per_block, bytes, lead, b);
        buffers_free();
}

START_TEST(tokens_come_together_as_in_the_reference) {
        static const uint32_t bytes[] = {1, 2, 6, 16, 34, 41, 128, 256, 1024};

        fixture_seed((uint64_t)_i);
        for (uint32_t i = 0; i < ARRAY_SIZE(bytes); i++)
                for (uint32_t k = 0; k < 4; k++)
                        compact_case(k < 2 ? 16 : 5, bytes[i], k % 2,
                                     k == 3 ? 2 - i % 2 : 32 * (k % 2));
}
END_TEST

/* More than one turn per thread block. */
START_TEST(long_rows_come_together) {
        compact_case(700, 512, false, 0);
        compact_case(300, 6, true, 4);
}
END_TEST

START_TEST(what_is_not_there_is_passed_over) {
        struct scene s;
        uint8_t before[64], *to;

        make_scene(&s, 16, 16, false, 0);
        to = pool_block(&s.pool, FROM);
        memcpy(before, to, sizeof before);
        for (uint32_t b = 0; b < FROM; b++)
                pool_drop(&s.pool, b);
        fixture_ok(gpu_compact(fixture_gpu(), NULL, &s.a));
        fixture_wait();
        ck_assert_mem_eq(before, to, sizeof before);
        buffers_free();
}
END_TEST

START_TEST(what_cannot_be_is_refused) {
        struct gpu_compact bad;
        struct scene s;

        make_scene(&s, 16, 16, false, 0);
        bad = s.a, bad.index = 0;
        ck_assert_int_eq(gpu_compact(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = s.a, bad.per_block = 0;
        ck_assert_int_eq(gpu_compact(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = s.a, bad.layers = 65536;
        ck_assert_int_eq(gpu_compact(fixture_gpu(), NULL, &bad), -EINVAL);
        bad = s.a, bad.n = 0;
        ck_assert_int_eq(gpu_compact(fixture_gpu(), NULL, &bad), 0);
        buffers_free();
}
END_TEST

SUITE("cuda: blocks", fixture_begin(), LOOPS(3, tokens_come_together_as_in_the_reference),
      TESTS(long_rows_come_together, what_is_not_there_is_passed_over, what_cannot_be_is_refused))
