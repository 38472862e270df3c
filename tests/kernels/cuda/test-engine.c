/* SPDX-License-Identifier: Apache-2.0 */

/* The transformer operations other than products and attention, against kernels/ops.h. */

#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/cuda/engine.h"
#include "kernels/ops.h"
#include "tests/kernels/cuda/fixture.h"
#include "tests/lib/suite.h"

static const uint32_t numbers[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16},
                      row_numbers[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16,
                                       KVD_NUMBER_Q8,  KVD_NUMBER_Q4,  KVD_NUMBER_E4M3,
                                       KVD_NUMBER_E5M2};

static const struct kvd_ops *ops(void) {
        return kvd_ops_pick("scalar");
}

static size_t size_of(uint32_t number) {
        return number == KVD_NUMBER_F32 ? 4 : 2;
}

/* The reference's numbers, converted to that type. */
static void *narrowed(const float *from, size_t n, uint32_t number) {
        void *to = buffer(n * size_of(number));

        if (number == KVD_NUMBER_F32)
                memcpy(to, from, n * sizeof *from);
        else
                ops()->narrow(to, from, n, number);
        return to;
}

static float *widened(const void *from, size_t n, uint32_t number) {
        float *to = buffer(n * sizeof *to);

        if (number == KVD_NUMBER_F32)
                memcpy(to, from, n * sizeof *to);
        else
                ops()->widen(to, from, n, number);
        return to;
}

/* ---- embedding ------------------------------------------------------------------------------- */

static void embed_case(uint32_t n, uint32_t width, uint32_t number) {
        enum { VOCABULARY = 37 };
        void *table = narrowed(random_floats(VOCABULARY * width), VOCABULARY * width, number);
        float *wide = widened(table, VOCABULARY * width, number),
              *to = buffer(n * width * sizeof *to);
        uint32_t *tokens = buffer(n * sizeof *tokens);
        const struct gpu_embed a = {address_of(to), address_of(table), address_of(tokens), n, width,
                                    number};

        for (uint32_t i = 0; i < n; i++)
                tokens[i] = i == 0 ? VOCABULARY - 1 : random_u32() % VOCABULARY;
        fixture_ok(gpu_embed(fixture_gpu(), NULL, &a));
        fixture_wait();
        for (uint32_t i = 0; i < n; i++)
                assert_same_bits(to + i * width, wide + tokens[i] * width, width, "embed");
        buffers_free();
}

START_TEST(embedding_copies_rows) {
        for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
                for (uint32_t width = 1; width < 700; width = 2 * width + 1)
                        for (uint32_t n = 1; n < 40; n += 12)
                                embed_case(n, width, numbers[i]);
}
END_TEST

/* ---- norm ------------------------------------------------------------------------------------ */

static void assert_near(const void *got, const float *expected, size_t n, uint32_t number,
                        const char *what) {
        const double unit = number == KVD_NUMBER_F32 ? 4e-6 :
                            number == KVD_NUMBER_F16 ? 1e-3 :
                                                       8e-3;
        const float *wide = widened(got, n, number);

        for (size_t i = 0; i < n; i++)
                if (!(fabs((double)wide[i] - (double)expected[i]) <=
                      unit * (fabs((double)expected[i]) + 1e-3)))
                        ck_abort_msg("%s: number %zu of %zu is %g, not %g", what, i, n,
                                     (double)wide[i], (double)expected[i]);
}

static void norm_case(uint32_t n, uint32_t width, uint32_t number, bool change) {
        float *x = random_floats(n * width), *added = random_floats(n * width),
              *weights = random_floats(width);
        float *sum = copy_floats(x, n * width), *expected = buffer(n * width * sizeof *expected);
        void *to = buffer(n * width * size_of(number));
        struct gpu_norm a = {address_of(to),
                             address_of(x),
                             change ? address_of(added) : 0,
                             address_of(weights),
                             n,
                             width,
                             number,
                             1e-5f};

        if (change)
                ops()->add(sum, added, n * width);
        for (uint32_t i = 0; i < n; i++)
                ops()->rmsnorm(expected + i * width, sum + i * width, weights, width, a.eps);
        fixture_ok(gpu_norm(fixture_gpu(), NULL, &a));
        fixture_wait();
        assert_same_bits(x, sum, n * width, "residual");
        assert_near(to, expected, n * width, number, "norm");
        a.to = 0; /* only the addition */
        fixture_ok(gpu_norm(fixture_gpu(), NULL, &a));
        fixture_wait();
        if (change)
                ops()->add(sum, added, n * width);
        assert_same_bits(x, sum, n * width, "residual alone");
        buffers_free();
}

START_TEST(norms_add_the_change_first) {
        for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
                for (uint32_t width = 1; width < 1100; width = 2 * width + 1)
                        for (uint32_t n = 1; n < 10; n += 4)
                                norm_case(n, width, numbers[i], n > 1);
}
END_TEST

/* ---- queries, keys and values ---------------------------------------------------------------- */

struct shape {
        uint32_t heads, kv_heads, half, block_tokens;
        bool nhd;
};

enum { BLOCKS = 5, LAYER = 1, LAYERS = 2 };

struct planes { /* strides in a block, in bytes */
        size_t head, slot, plane, block;
};

static struct planes planes_of(const struct shape *s, uint32_t number) {
        size_t row = kvd_row_bytes(number, 2 * s->half);
        struct planes p = {s->block_tokens * row, row, s->kv_heads * s->block_tokens * row, 0};

        if (s->nhd) {
                p.head = row;
                p.slot = s->kv_heads * row;
        }
        p.block = 2 * LAYERS * p.plane;
        return p;
}

/* Computes the expected pool: every new row, head by head. */
static void expect(const struct shape *s, const struct gpu_rotate *a, float *qkv,
                   const float *cosine, const float *sine, const uint32_t *ids, uint8_t *pool) {
        struct planes p = planes_of(s, a->number);
        size_t dim = 2 * s->half, all = (s->heads + 2 * s->kv_heads) * dim;

        for (uint32_t r = 0; r < a->n; r++) {
                uint32_t position = a->first + r, id = ids[position / s->block_tokens];
                float *row = qkv + r * all, *keys = row + s->heads * dim;

                for (uint32_t h = 0; h < s->heads + s->kv_heads; h++)
                        ops()->rope(row + h * dim, cosine + r * s->half, sine + r * s->half,
                                    s->half);
                for (uint32_t h = 0;
                     id != GPU_NO_BLOCK && position >= a->stored && h < 2 * s->kv_heads; h++) {
                        size_t at = id * p.block + (2 * LAYER + h / s->kv_heads) * p.plane +
                                    h % s->kv_heads * p.head + position % s->block_tokens * p.slot;

                        (h < s->kv_heads ? ops()->write_key :
                                           ops()->write_row)(pool + at, keys + h * dim,
                                                             (uint32_t)dim, a->number);
                }
        }
}

/*
 * Some values are equal, not finite, or beyond what f16 and numbers of 8 bits can hold. The bits of a
 * NaN of 16 or 32 bits are not determined.
 */
static float *extreme_floats(const struct shape *s, uint32_t n, uint32_t number) {
        const float extremes[] = {number < KVD_NUMBER_Q8 ? 0.0f : NAN,
                                  -INFINITY,
                                  1e30f,
                                  -70000.0f,
                                  464.0f,
                                  1e-7f,
                                  -0.0f};
        size_t dim = 2 * s->half, all = (s->heads + 2 * s->kv_heads) * dim,
               last = s->kv_heads * dim;
        float *qkv = random_floats(n * all);

        for (uint32_t r = 0; r < n; r++) {
                float *value = qkv + (r + 1) * all - last;

                if (r % 4 == 3)
                        for (size_t i = 0; i < dim; i++)
                                value[i] = -0.25f;
                else if (r % 4 > 0)
                        value[random_u32() % last] = extremes[random_u32() % ARRAY_SIZE(extremes)];
        }
        return qkv;
}

static void rotate_case(const struct shape *s, uint32_t first, uint32_t n, uint32_t stored,
                        uint32_t number) {
        struct planes p = planes_of(s, number);
        size_t dim = 2 * s->half, all = (s->heads + 2 * s->kv_heads) * dim;
        float *qkv = extreme_floats(s, n, number), *expected = copy_floats(qkv, n * all);
        float *cosine = random_floats(n * s->half), *sine = random_floats(n * s->half);
        uint32_t *ids = buffer(((first + n - 1) / s->block_tokens + 1) * sizeof *ids);
        uint8_t *pool = buffer(BLOCKS * p.block), *same = buffer(BLOCKS * p.block);
        const struct gpu_rotate a = {
                .qkv = address_of(qkv),
                .cosine = address_of(cosine),
                .sine = address_of(sine),
                .blocks = {address_of(pool), p.block, address_of(ids)},
                .k_offset = 2 * LAYER * p.plane,
                .v_offset = (2 * LAYER + 1) * p.plane,
                .head_stride = p.head,
                .slot_stride = p.slot,
                .n = n,
                .first = first,
                .stored = stored,
                .heads = s->heads,
                .kv_heads = s->kv_heads,
                .half = s->half,
                .block_tokens = s->block_tokens,
                .number = number,
        };

        /* no two of the last ones are equal */
        for (uint32_t i = 0; i <= (first + n - 1) / s->block_tokens; i++)
                ids[i] = i % 4 == 3 ? GPU_NO_BLOCK : (3 * i + 1) % BLOCKS;
        expect(s, &a, expected, cosine, sine, ids, same);
        fixture_ok(gpu_rotate(fixture_gpu(), NULL, &a));
        fixture_wait();
        for (uint32_t r = 0; r < n; r++) /* keys and values are needed in the blocks only */
                assert_same_bits(qkv + r * all, expected + r * all, s->heads * dim, "queries");
        ck_assert_mem_eq(pool, same, BLOCKS * p.block);
        buffers_free();
}

START_TEST(keys_and_values_reach_their_slots) {
        static const struct shape shapes[] = {
                {4, 2, 16, 16, false}, {4, 2, 16, 16, true}, {1, 1, 1, 1, false},
                {6, 3, 5, 7, true},    {8, 8, 64, 3, false}, {2, 2, 50, 5, false},
        };

        for (size_t i = 0; i < ARRAY_SIZE(shapes); i++)
                for (size_t t = 0; t < ARRAY_SIZE(row_numbers); t++) {
                        uint32_t bt = shapes[i].block_tokens;

                        rotate_case(shapes + i, 0, 1, 0, row_numbers[t]);
                        rotate_case(shapes + i, bt - 1, bt + 2, 0, row_numbers[t]);
                        rotate_case(shapes + i, 2 * bt + bt / 2, 2 * bt, 3 * bt, row_numbers[t]);
                        rotate_case(shapes + i, 3, 4, 100,
                                    row_numbers[t]); /* everything is stored */
                }
}
END_TEST

/* ---- feed-forward ---------------------------------------------------------------------------- */

static void swiglu_case(uint32_t n, uint32_t width, uint32_t number) {
        float *gate_up = random_floats(2 * n * width),
              *expected = buffer(n * width * sizeof *expected);
        void *to = buffer(n * width * size_of(number));
        const struct gpu_swiglu a = {address_of(to), address_of(gate_up), n, width, number};

        for (uint32_t i = 0; i < 2 * n * width; i += 3)
                gate_up[i] *= 100; /* to reach the limits of the exponential as well */
        for (uint32_t r = 0; r < n; r++)
                ops()->swiglu(expected + r * width, gate_up + 2 * r * width,
                              gate_up + (2 * r + 1) * width, width);
        fixture_ok(gpu_swiglu(fixture_gpu(), NULL, &a));
        fixture_wait();
        ck_assert_mem_eq(to, narrowed(expected, n * width, number), n * width * size_of(number));
        buffers_free();
}

START_TEST(swiglu_has_the_references_bits) {
        for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
                for (uint32_t width = 1; width < 700; width = 2 * width + 1)
                        swiglu_case(3, width, numbers[i]);
}
END_TEST

SUITE("cuda: engine", fixture_begin(),
      TESTS(embedding_copies_rows, norms_add_the_change_first, keys_and_values_reach_their_slots,
            swiglu_has_the_references_bits))
