/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every variant of kernels/lanes.h against the scalar one, bit for bit: all operations on all kinds
 * of numbers, and every partial length up to the guard page.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/lanes_probe.h"
#include "tests/lib/suite.h"

static const struct lanes_probe *const scalar = &lanes_probe_scalar;
static const struct lanes_probe *variants[2];
static const char *names[2];
static size_t n_variants;

static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16,
                                        KVD_NUMBER_E4M3, KVD_NUMBER_E5M2};

static size_t size_of(enum kvd_number type) {
        return kvd_row_bytes(type, 1);
}

static void find_variants(void) {
        static const struct {
                const char *name;
                const struct lanes_probe *probe;
        } all[] = {
#if defined(__x86_64__)
                {"avx2", &lanes_probe_avx2},
                {"avx512", &lanes_probe_avx512},
#elif defined(__aarch64__)
                {"neon", &lanes_probe_neon},
#endif
        };

        for (size_t i = 0; i < ARRAY_SIZE(all); i++)
                if (kvd_ops_pick(all[i].name)) {
                        names[n_variants] = all[i].name;
                        variants[n_variants++] = all[i].probe;
                }
}

static float any_float(void) {
        static const float edges[] = {0.0f, -0.0f,  1.0f,     -1.0f,     0.5f,     1.5f,
                                      2.5f, -2.5f,  INFINITY, -87.0f,    88.0f,    -INFINITY,
                                      NAN,  1e-40f, 65504.0f, 65519.99f, 65520.0f, 3e38f};
        uint32_t bits = random_u32();
        float f;

        switch (random_u32() % 4) {
        case 0: return edges[random_u32() % ARRAY_SIZE(edges)];
        case 1: memcpy(&f, &bits, sizeof f); return f;
        default: return ((float)bits / 2147483648.0f - 1.0f) * 20.0f;
        }
}

static void compare(const float *expected, const float *got, size_t n, const char *variant,
                    const char *what) {
        for (size_t i = 0; i < n; i++)
                if (memcmp(expected + i, got + i, sizeof *got) != 0 &&
                    !(isnan(expected[i]) && isnan(got[i])))
                        ck_abort_msg("%s %s: lane %zu is %a, expected %a", variant, what, i,
                                     (double)got[i], (double)expected[i]);
}

START_TEST(operations_equal_the_reference) {
        float in[64], expected[16], got[16];

        for (int round = 0; round < 200000; round++) {
                int op = round % LANES_OPERATIONS;

                for (size_t i = 0; i < ARRAY_SIZE(in); i++)
                        in[i] = any_float();
                scalar->operations[op].run(in, expected);
                for (size_t v = 0; v < n_variants; v++) {
                        variants[v]->operations[op].run(in, got);
                        compare(expected, got, scalar->operations[op].results, names[v],
                                scalar->operations[op].name);
                }
        }
}
END_TEST

static void check_remainder(const struct lanes_probe *probe, uint32_t n, const char *name) {
        float *in = random_floats(n), *out = buffer(n * sizeof *out), full[16], got[16] = {0};

        probe->load_n(in, got, n);
        for (uint32_t i = 0; i < 16; i++)
                if (memcmp(got + i, i < n ? in + i : &(float){0}, sizeof *got) != 0)
                        ck_abort_msg("%s: lane %u of %u is %a", name, i, n, (double)got[i]);
        for (int i = 0; i < 16; i++)
                full[i] = any_float();
        probe->store_n(full, out, n);
        compare(full, out, n, name, "store_n");
        buffers_free();
}

/* Reads end at a guard page; writes must leave the bytes after them unchanged. */
static void check_typed(const struct lanes_probe *probe, uint32_t n, enum kvd_number type,
                        const char *name) {
        size_t size = size_of(type);
        uint8_t *memory = buffer(n * size), *out = buffer(n * size), *expected = buffer(n * size);
        uint8_t room[80], kept[80];
        float wide[16], got[16];

        for (size_t i = 0; i < n * size; i++)
                memory[i] = (uint8_t)random_u32();
        scalar->widen(memory, wide, n, type);
        probe->widen(memory, got, n, type);
        compare(wide, got, 16, name, "widen");
        if (size == 1) { /* these are written by rows: test_quantised.py */
                buffers_free();
                return;
        }
        for (int i = 0; i < 16; i++)
                do
                        wide[i] = any_float();
                while (isnan(wide[i]));
        scalar->narrow(wide, expected, n, type);
        probe->narrow(wide, out, n, type);
        ck_assert_int_eq(memcmp(out, expected, n * size), 0);
        memset(room, 0xa5, sizeof room);
        memset(kept, 0xa5, sizeof kept);
        memcpy(kept + 3, expected, n * size);
        probe->narrow(wide, room + 3, n, type);
        ck_assert_int_eq(memcmp(room, kept, sizeof room), 0);
        buffers_free();
}

START_TEST(remainders_touch_nothing_else) {
        for (int round = 0; round < 50; round++)
                for (uint32_t n = 0; n <= 16; n++) {
                        for (size_t v = 0; v < n_variants && n < 16; v++)
                                check_remainder(variants[v], n, names[v]);
                        if (n < 16)
                                check_remainder(scalar, n, "scalar");
                        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                                check_typed(scalar, n, types[t], "scalar");
                                for (size_t v = 0; v < n_variants; v++)
                                        check_typed(variants[v], n, types[t], names[v]);
                        }
                }
}
END_TEST

/* 32 elements that end at a guard page; each is at the position given by lanes_place_2. */
START_TEST(pairs_are_where_they_should_be) {
        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                size_t size = size_of(types[t]);
                uint8_t *memory = buffer(32 * size);
                float expected[32], got[32], wide[32];

                for (size_t i = 0; i < 32 * size; i++)
                        memory[i] = (uint8_t)random_u32();
                scalar->widen(memory, wide, 16, types[t]);
                scalar->widen(memory + 16 * size, wide + 16, 16, types[t]);
                scalar->widen_2(memory, expected, types[t]);
                for (size_t i = 0; i < 32; i++)
                        compare(&wide[i],
                                &expected[types[t] == KVD_NUMBER_BF16 ? i % 2 * 16 + i / 2 : i], 1,
                                "scalar", "widen_2");
                for (size_t v = 0; v < n_variants; v++) {
                        variants[v]->widen_2(memory, got, types[t]);
                        compare(expected, got, 32, names[v], "widen_2");
                }
                buffers_free();
        }
}
END_TEST

/* The reference does what the header says. */
START_TEST(reference_keeps_its_definitions) {
        float in[64], out[16];

        for (int i = 0; i < 64; i++)
                in[i] = (float)i;
        in[0] = NAN;
        in[17] = NAN;
        for (int op = 0; op < LANES_OPERATIONS; op++) {
                const char *name = scalar->operations[op].name;

                scalar->operations[op].run(in, out);
                if (strcmp(name, "min") == 0)
                        ck_assert(out[0] == 16.0f && isnan(out[1]) && out[2] == 2.0f);
                if (strcmp(name, "max") == 0)
                        ck_assert(out[0] == 16.0f && isnan(out[1]) && out[2] == 18.0f);
                if (strcmp(name, "select") == 0)
                        ck_assert(out[0] == 48.0f && out[1] == 49.0f && out[2] == 34.0f);
                if (strcmp(name, "largest") == 0)
                        ck_assert(out[0] == 15.0f);
                if (strcmp(name, "exp") == 0)
                        ck_assert(fabsf(out[3] - 20.0855369f) < 1e-5f);
        }
}
END_TEST

SUITE("kernels: lanes", find_variants(),
      TESTS(operations_equal_the_reference, remainders_touch_nothing_else,
            pairs_are_where_they_should_be, reference_keeps_its_definitions))
