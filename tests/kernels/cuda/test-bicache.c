/* SPDX-License-Identifier: Apache-2.0 */

/* BiCache's products on a GPU have the bits of the reference: every stride, offset and type. */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/format.h"
#include "ipc/base/util.h"
#include "kernels/bicache.h"
#include "kernels/cuda/bicache.h"
#include "kernels/ops.h"
#include "tests/kernels/cuda/fixture.h"
#include "tests/lib/suite.h"

enum { PLANES = 2, HEADS = 3 };

struct shape {
        uint32_t tokens, per_block, dim, n_blocks;
        size_t element, token, head, plane, offset, block_bytes, pool; /* bytes */
};

static struct shape shape_of(uint32_t tokens, uint32_t per_block, uint32_t dim, size_t slack,
                             size_t offset, enum kvd_number type) {
        struct shape s = {.tokens = tokens,
                          .per_block = per_block,
                          .dim = dim,
                          .n_blocks = DIV_UP(tokens, per_block),
                          .element = type == KVD_NUMBER_F32 ? 4 :
                                     type >= KVD_NUMBER_Q8  ? 1 :
                                                              2};

        s.token = kvd_row_bytes(type, dim) + slack * s.element;
        s.head = per_block * s.token;
        s.plane = HEADS * s.head;
        s.offset = offset * s.element;
        s.block_bytes = s.offset + PLANES * s.plane;
        s.pool = 2 * s.n_blocks * s.block_bytes - slack * s.element;
        return s;
}

static uint8_t *random_pool(const struct shape *s, enum kvd_number type) {
        size_t n = s->pool / s->element;
        float *wide = random_floats(n);
        uint8_t *pool = buffer(s->pool);

        if (type == KVD_NUMBER_F32)
                memcpy(pool, wide, s->pool);
        else if (type >= KVD_NUMBER_Q8)
                for (size_t i = 0; i < n; i++)
                        pool[i] = (uint8_t)(random_u32() >> 8 & 0x3f);
        else
                kvd_ops_pick("scalar")->narrow((uint16_t *)pool, wide, n, type);
        return pool;
}

static void add_reference(struct kvd_products *to, const uint8_t *pool, const uint32_t *a,
                          const uint32_t *b, const struct shape *s, enum kvd_number type) {
        for (uint32_t plane = 0; plane < PLANES; plane++)
                for (uint32_t t = 0; t < s->tokens; t++)
                        for (uint32_t head = 0; head < HEADS; head++) {
                                size_t at = s->offset + plane * s->plane + head * s->head +
                                            t % s->per_block * s->token;

                                kvd_ops_pick("scalar")
                                        ->bicache
                                        ->products(to + plane * s->tokens + t,
                                                   pool + a[t / s->per_block] * s->block_bytes + at,
                                                   0,
                                                   pool + b[t / s->per_block] * s->block_bytes + at,
                                                   0, type, 1, s->dim);
                        }
}

static struct gpu_blocks blocks_of(const uint8_t *pool, const struct shape *s,
                                   const uint32_t *ids) {
        return (struct gpu_blocks){address_of(pool), s->block_bytes, address_of(ids)};
}

static void products_case(uint32_t tokens, uint32_t per_block, uint32_t dim, size_t slack,
                          size_t offset, enum kvd_number type) {
        struct shape s = shape_of(tokens, per_block, dim, slack, offset, type);
        uint8_t *pool = random_pool(&s, type);
        uint32_t *a = buffer(s.n_blocks * sizeof *a), *b = buffer(s.n_blocks * sizeof *b);
        struct kvd_products *expected = buffer(PLANES * tokens * sizeof *expected);
        struct kvd_products *got = buffer(PLANES * tokens * sizeof *got);
        struct gpu_products args = {address_of(got),
                                    blocks_of(pool, &s, a),
                                    blocks_of(pool, &s, b),
                                    s.offset,
                                    s.plane,
                                    s.head,
                                    s.token,
                                    PLANES,
                                    HEADS,
                                    tokens,
                                    per_block,
                                    dim,
                                    type};

        for (uint32_t i = 0; i < s.n_blocks; i++) {
                a[i] = 2 * i + 1;
                b[i] = 2 * (s.n_blocks - 1 - i);
        }
        for (uint32_t i = 0; i < PLANES * tokens; i++)
                got[i] = (struct kvd_products){i, 1.0, -1.0}; /* previous contents do not matter */
        add_reference(expected, pool, a, b, &s, type);
        fixture_ok(gpu_products(fixture_gpu(), NULL, &args));
        fixture_wait();
        ck_assert_msg(memcmp(expected, got, PLANES * tokens * sizeof *got) == 0,
                      "%u tokens, %u in a block, of %u (+ %zu) numbers of type %d at %zu", tokens,
                      per_block, dim, slack, (int)type, offset);
        buffers_free();
}

START_TEST(products_have_the_bits_of_the_reference) {
        static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16,
                                                KVD_NUMBER_Q8,  KVD_NUMBER_Q4,  KVD_NUMBER_E4M3,
                                                KVD_NUMBER_E5M2};
        static const uint32_t dims[] = {1,  3,   8,   15,   16,   17,   64,
                                        80, 127, 128, 4095, 4096, 4100, 9000};

        fixture_seed((uint64_t)_i);
        for (uint32_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                        enum kvd_number type = types[t];
                        uint32_t tokens = dims[i] < 200 ? 5 + 31 * (i % 3) : 3;

                        if (kvd_is_quantised(type) && dims[i] % 2)
                                continue;
                        products_case(tokens, 16, dims[i], 0, 0, type);
                        products_case(tokens, 5, dims[i], i % 2 ? 8 : 3, i % 3 * 4, type);
                }
}
END_TEST

START_TEST(what_cannot_be_is_refused) {
        struct gpu_products a = {.planes = 1, .heads = 1, .tokens = 1, .dim = 1, .number = 1};

        ck_assert_int_eq(gpu_products(fixture_gpu(), NULL, &a), -EINVAL);
        a.per_block = 1;
        a.number = 4;
        ck_assert_int_eq(gpu_products(fixture_gpu(), NULL, &a), -EINVAL);
        a.number = KVD_NUMBER_Q8;
        ck_assert_int_eq(gpu_products(fixture_gpu(), NULL, &a), -EINVAL);
        a.tokens = 0;
        ck_assert_int_eq(gpu_products(fixture_gpu(), NULL, &a), 0);
}
END_TEST

SUITE("cuda: bicache", fixture_begin(), LOOPS(3, products_have_the_bits_of_the_reference),
      TESTS(what_cannot_be_is_refused))
