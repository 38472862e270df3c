/* SPDX-License-Identifier: Apache-2.0 */

/*
 * BiCache's kernel gives the same bits in every variant. Tests of its table that need no file of
 * numbers.
 */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/bicache.h"
#include "kernels/btable.h"
#include "tests/kernels/buffers.h"
#include "tests/lib/suite.h"

static void products_case(uint32_t dim, uint32_t n, enum kvd_number type) {
        size_t stride_a = dim + 1, stride_b = dim + 5, count_a = (n - 1) * stride_a + dim;
        size_t count_b = (n - 1) * stride_b + dim, size = type == KVD_NUMBER_F32 ? 4 : 2;
        float *wide_a = random_floats(count_a), *wide_b = random_floats(count_b);
        void *a = wide_a, *b = wide_b;
        struct kvd_products *expected = buffer(n * sizeof *expected);

        if (dim > 2)
                wide_a[dim / 2] = NAN; /* must stay in its row */
        if (type != KVD_NUMBER_F32) {
                a = buffer(count_a * size);
                b = buffer(count_b * size);
                kvd_ops_pick("scalar")->narrow(a, wide_a, count_a, type);
                kvd_ops_pick("scalar")->narrow(b, wide_b, count_b, type);
        }
        kvd_ops_pick("scalar")->bicache->products(expected, a, stride_a, b, stride_b, type, n, dim);
        for (const struct kvd_ops *const *v = kvd_ops_list(); *v; v++) {
                struct kvd_products *got = buffer(n * sizeof *got);

                if (!(*v)->works())
                        continue;
                (*v)->bicache->products(got, a, stride_a, b, stride_b, type, n, dim);
                for (uint32_t i = dim > 2; i < n; i++) /* the payload of a NaN is not specified */
                        ck_assert_msg(memcmp(got + i, expected + i, sizeof *got) == 0, "%s: row %u",
                                      (*v)->name, i);
        }
        buffers_free();
}

START_TEST(products_are_the_same_in_every_variant) {
        static const uint32_t dims[] = {1, 3, 15, 16, 17, 80, 127, 128, 4095, 4096, 4100, 9000};

        for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (uint32_t type = KVD_NUMBER_F32; type <= KVD_NUMBER_BF16; type++)
                        products_case(dims[i], 1 + (uint32_t)i % 4, type);
}
END_TEST

START_TEST(a_table_is_for_one_kind_of_ratio) {
        struct kvd_btable table = {
                .ratio = KVD_RATIO_INCLUDE_GEN, .n = 2, .steps = {{40, 3}, {70, 9}}};

        ck_assert_int_eq(kvd_btable_lookup(&table, KVD_RATIO_PROMPT_ONLY, 50), -EINVAL);
        ck_assert_int_eq(kvd_btable_lookup(&table, KVD_RATIO_INCLUDE_GEN, 39), 1);
        ck_assert_int_eq(kvd_btable_lookup(&table, KVD_RATIO_INCLUDE_GEN, 40), 3);
        ck_assert_int_eq(kvd_btable_lookup(&table, KVD_RATIO_INCLUDE_GEN, 100), 9);
}
END_TEST

SUITE("kernels: bicache",
      TESTS(products_are_the_same_in_every_variant, a_table_is_for_one_kind_of_ratio))
