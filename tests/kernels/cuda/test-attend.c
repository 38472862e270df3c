/* SPDX-License-Identifier: Apache-2.0 */

/* Attention on a device against kernels/attend.h, over everything that enters an address. */

#include <errno.h>

#include "ipc/base/util.h"
#include "kernels/cuda/attend.h"
#include "kernels/ops.h"
#include "tests/kernels/cuda/attend_case.h"
#include "tests/kernels/cuda/fixture.h"
#include "tests/lib/amount.h"
#include "tests/lib/suite.h"

enum {
        F32 = KVD_NUMBER_F32,
        F16 = KVD_NUMBER_F16,
        BF16 = KVD_NUMBER_BF16,
        Q8 = KVD_NUMBER_Q8,
        E4M3 = KVD_NUMBER_E4M3,
        E5M2 = KVD_NUMBER_E5M2,
};

static const uint32_t lengths[] = {61, 200, 17}, short_ones[] = {1, 33, 16},
                      with_none[] = {40, 0, 5};

START_TEST(decode_of_all_shapes) {
        static const uint32_t dims[] = {32, 64, 80, 96, 128, 192, 256},
                              groups[] = {1, 2, 5, 8, 9, 16, 24};

        for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (size_t g = 0; g < ARRAY_SIZE(groups); g++)
                        attend_check((struct attend_case){.number = (i + g) % 2 ? F16 : BF16,
                                                          .dim = dims[i],
                                                          .group = groups[g],
                                                          .lengths = g % 2 ? short_ones : with_none,
                                                          .kv_heads = 1 + g % 2,
                                                          .nhd = g % 2});
}
END_TEST

START_TEST(decode_of_all_block_sizes) {
        static const uint32_t sizes[] = {1, 2, 3, 8, 16, 17, 32, 64};

        for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
                for (uint32_t number = F32; number <= BF16; number++)
                        attend_check((struct attend_case){.number = number,
                                                          .dim = 64,
                                                          .group = 4,
                                                          .lengths = lengths,
                                                          .block_tokens = sizes[i],
                                                          .nhd = i % 2,
                                                          .pad = 8 * (i % 3),
                                                          .absent = i % 3 * 2,
                                                          .split = 16 * (i % 4)});
}
END_TEST

/* More splits than the warps of attend_sum have lanes. */
START_TEST(decode_of_many_splits) {
        static const uint32_t long_ones[] = {16 * 300 - 5, 16 * 9};

        for (uint32_t number = F32; number <= BF16; number++)
                attend_check((struct attend_case){.number = number,
                                                  .dim = number == F16 ? 72 : 64,
                                                  .group = 2,
                                                  .kv_heads = 1,
                                                  .lengths = long_ones,
                                                  .n = 2,
                                                  .mass = number == BF16,
                                                  .split = 16});
}
END_TEST

/* Rows of a tile are equidistant, or anywhere; part of a row may be beyond the dimensions. */
START_TEST(decode_of_runs_and_of_rows) {
        static const uint32_t dims[] = {48, 64, 112, 128, 240, 256};

        for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (uint32_t nhd = 0; nhd < 2; nhd++)
                        attend_check((struct attend_case){.number = BF16,
                                                          .dim = dims[i],
                                                          .group = 3,
                                                          .lengths = lengths,
                                                          .block_tokens = i % 3 ? 32 : 24,
                                                          .pad = 8,
                                                          .nhd = nhd,
                                                          .absent = 7});
}
END_TEST

/* Derives the number of splits from the workspace: one row of sums and two numbers per split. */
static uint64_t splits(uint32_t sequences, uint32_t length) {
        struct gpu *gpu = fixture_gpu();
        uint32_t multiprocessors = gpu->multiprocessors;
        struct gpu_attend a = {.ld_blocks = length / 16,
                               .number = BF16,
                               .block_tokens = 16,
                               .dim = 128,
                               .kv_heads = 8,
                               .group = 4,
                               .n_sequences = sequences,
                               .max_length = length,
                               .q_number = BF16,
                               .out_number = BF16};
        uint64_t bytes;

        gpu->multiprocessors = 132;
        bytes = gpu_attend_workspace(gpu, &a);
        gpu->multiprocessors = multiprocessors;
        return bytes ? bytes / ((uint64_t)sequences * 32 * (128 + 2) * 4) : 1;
}

/* Two thread blocks run on each of 132 multiprocessors at a time: 264. */
START_TEST(splits_fill_the_device) {
        if (fixture_is_real())
                return;
        ck_assert_uint_eq(splits(1, 16), 1);
        ck_assert_uint_eq(splits(1, 32768), 32); /* 256, all at once */
        ck_assert_uint_eq(splits(64, 8192), 4);  /* more splits, for shorter sequences */
        ck_assert_uint_eq(splits(1000, 64), 1);
}
END_TEST

/* Shapes that allow neither loads of 16 bytes nor matrix units. */
START_TEST(decode_of_odd_shapes) {
        static const uint32_t dims[] = {1, 3, 17, 33, 100, 127, 129, 255};

        for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (uint32_t number = F32; number <= BF16; number++)
                        attend_check((struct attend_case){.number = number,
                                                          .dim = dims[i],
                                                          .group = 1 + i * 3,
                                                          .lengths = i % 2 ? short_ones : with_none,
                                                          .pad = i % 3,
                                                          .nhd = number == F16,
                                                          .absent = i % 4});
        attend_check(
                (struct attend_case){.number = F32, .dim = 128, .group = 8, .lengths = lengths});
        attend_check(
                (struct attend_case){.number = F32, .dim = 256, .group = 3, .lengths = lengths});
}
END_TEST

START_TEST(decode_with_options) {
        for (uint32_t i = 0; i < AMOUNT(24, 4); i++) {
                uint32_t dim = i % 3 == 0 ? 128 : i % 3 == 1 ? 64 : 80;

                attend_check((struct attend_case){.number = F32 + i / 2 % 3,
                                                  .dim = dim,
                                                  .group = i % 2 ? 8 : 12,
                                                  .lengths = lengths,
                                                  .block_tokens = i % 4 ? 16 : 5,
                                                  .rotations = i % 4 < 2 ? 3 : 0,
                                                  .mass = i % 3 < 2,
                                                  .chosen = i % 5 < 3 ? i % 5 + 1 : 0,
                                                  .absent = i % 2 * 4,
                                                  .split = i % 4 * 32,
                                                  .q_number = F32 + i % 3,
                                                  .out_number = F32 + i / 3 % 3,
                                                  .bidirectional = i % 7 == 0});
        }
}
END_TEST

START_TEST(decode_with_all_masked) {
        for (uint32_t number = F32; number <= BF16; number++)
                attend_check((struct attend_case){.number = number,
                                                  .dim = 64,
                                                  .group = 2,
                                                  .lengths = lengths,
                                                  .absent = 1,
                                                  .mass = true,
                                                  .rotations = 1});
}
END_TEST

/* Groups of 64 that are full, or split into powers of two; rows at any address. */
START_TEST(decode_of_narrow_numbers) {
        static const uint32_t dims[] = {2, 18, 64, 94, 128, 160, 254};

        for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (uint32_t number = Q8; number <= E5M2; number++)
                        attend_check(
                                (struct attend_case){.number = number,
                                                     .dim = dims[i] + (number >= E4M3 && i % 2),
                                                     .group = 1 + i * 2,
                                                     .lengths = i % 2 ? short_ones : with_none,
                                                     .pad = i % 3,
                                                     .nhd = i % 2,
                                                     .absent = i % 4,
                                                     .mass = i % 3 == 1});
}
END_TEST

/* A value's NaN spoils the results of its group, or of itself alone. */
START_TEST(narrow_nan_stays_local) {
        for (uint32_t i = 0; i < 8; i++)
                attend_check((struct attend_case){.number = Q8 + i % 4,
                                                  .dim = 160,
                                                  .group = 2,
                                                  .lengths = lengths,
                                                  .tokens = i / 4 * 3,
                                                  .spoilt = 80});
}
END_TEST

/* Decode and prefill. */
START_TEST(narrow_numbers_with_options) {
        for (uint32_t i = 0; i < AMOUNT(32, 8); i++)
                attend_check((struct attend_case){.number = Q8 + i % 4,
                                                  .dim = i % 3 == 0 ? 128 :
                                                         i % 3 == 1 ? 80 :
                                                                      192,
                                                  .group = i % 5 ? 3 : 9,
                                                  .lengths = lengths,
                                                  .tokens = i / 4 % 2 ? 4 + i % 7 : 0,
                                                  .block_tokens = i % 3 ? 16 : 5,
                                                  .rotations = i % 8 < 6 ? 3 : 0,
                                                  .mass = i % 4 < 3,
                                                  .chosen = i % 5 < 3 ? i % 5 + 1 : 0,
                                                  .absent = i % 2 * 4,
                                                  .split = i % 3 * 32,
                                                  .q_number = F32 + i % 3,
                                                  .out_number = F32 + i / 3 % 3,
                                                  .bidirectional = i % 7 == 0});
}
END_TEST

/* Fewer warps per thread block, or no matrix units at all. */
START_TEST(decode_with_little_shared_memory) {
        for (size_t shared = 40 << 10; shared <= 160 << 10; shared += 40 << 10)
                for (uint32_t rotations = 0; rotations < 2; rotations++) {
                        attend_check((struct attend_case){.number = BF16,
                                                          .dim = 256,
                                                          .group = 8,
                                                          .lengths = lengths,
                                                          .rotations = rotations,
                                                          .shared_bytes = shared});
                        attend_check((struct attend_case){.number = BF16,
                                                          .dim = 128,
                                                          .group = 3,
                                                          .lengths = lengths,
                                                          .rotations = rotations,
                                                          .shared_bytes = shared,
                                                          .tokens = 9});
                }
}
END_TEST

START_TEST(prefill_of_all_shapes) {
        static const uint32_t dims[] = {32, 64, 80, 128, 256}, groups[] = {1, 3, 8, 16};

        for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
                for (size_t g = 0; g < ARRAY_SIZE(groups); g++)
                        attend_check((struct attend_case){.number = (i + g) % 2 ? F16 : BF16,
                                                          .dim = dims[i],
                                                          .group = groups[g],
                                                          .lengths = lengths,
                                                          .n = 2,
                                                          .tokens = g ? 14 / g + 1 : 60,
                                                          .bidirectional = i % 3 == 1,
                                                          .nhd = g % 2,
                                                          .kv_heads = 1 + g % 2});
}
END_TEST

START_TEST(prefill_with_options) {
        for (uint32_t i = 0; i < AMOUNT(24, 4); i++) {
                uint32_t number = F32 + i / 2 % 3;

                attend_check((struct attend_case){.number = number,
                                                  .dim = i % 3 == 0 ? 128 :
                                                         i % 3 == 1 ? 64 :
                                                                      80,
                                                  .group = i % 2 ? 2 : 9,
                                                  .lengths = lengths,
                                                  .tokens = 6 + i % 8,
                                                  .block_tokens = i % 4 ? 16 : 5,
                                                  .rotations = i % 4 < 2 ? 3 : 0,
                                                  .mass = i % 3 < 2,
                                                  .chosen = i % 5 < 3 ? i % 5 + 1 : 0,
                                                  .absent = i % 2 * 4,
                                                  .split = i / 3 % 3 * 32,
                                                  .q_number = i % 3 ? number : F32,
                                                  .out_number = i % 3 ? number : F32,
                                                  .bidirectional = i % 7 == 0});
        }
}
END_TEST

START_TEST(orders_of_threads_make_no_difference) {
        fixture_seed((uint64_t)_i);
        attend_check((struct attend_case){.number = BF16,
                                          .dim = 128,
                                          .group = 8,
                                          .lengths = lengths,
                                          .split = 64,
                                          .mass = true,
                                          .rotations = 2,
                                          .absent = 5});
        attend_check((struct attend_case){.number = F32,
                                          .dim = 48,
                                          .group = 3,
                                          .lengths = lengths,
                                          .split = 32,
                                          .mass = true,
                                          .chosen = 2});
        attend_check((struct attend_case){.number = F16,
                                          .dim = 96,
                                          .group = 4,
                                          .lengths = lengths,
                                          .tokens = 11,
                                          .mass = true,
                                          .rotations = 2,
                                          .absent = 5});
}
END_TEST

START_TEST(results_do_not_depend_on_the_others) {
        for (uint32_t number = F32; number <= E5M2; number = number == BF16 ? Q8 : number + 1) {
                attend_check_alone((struct attend_case){.number = number,
                                                        .dim = 64,
                                                        .group = 5,
                                                        .lengths = lengths,
                                                        .split = 64,
                                                        .absent = 6});
                attend_check_alone((struct attend_case){.number = number,
                                                        .dim = 128,
                                                        .group = 3,
                                                        .lengths = lengths,
                                                        .tokens = 23,
                                                        .absent = 6,
                                                        .rotations = number == BF16,
                                                        .split = number == F32 ? 48 : 0});
        }
}
END_TEST

START_TEST(wrong_arguments_are_refused) {
        static const struct gpu_attend right = {
                .blocks = {.ids = 256},
                .ld_blocks = 2,
                .number = F32,
                .block_tokens = 16,
                .dim = 32,
                .kv_heads = 1,
                .group = 1,
                .n_sequences = 1,
                .max_length = 20,
                .lengths = 256,
                .q_number = F32,
                .out_number = F32,
                .scale = 1.0f,
                .q = 256,
                .out = 256,
                .q_token = 32,
                .out_token = 32,
        };
        struct gpu_attend a;

#define REFUSED(change) (a = right, a.change, gpu_attend_decode(fixture_gpu(), NULL, &a))
        ck_assert_int_eq(REFUSED(dim = 0), -EINVAL);
        ck_assert_int_eq(REFUSED(dim = 257), -EINVAL);
        ck_assert_int_eq(REFUSED(group = 0), -EINVAL);
        ck_assert_int_eq(REFUSED(group = 129), -EINVAL);
        ck_assert_int_eq(REFUSED(number = 4), -EINVAL);
        ck_assert_int_eq(REFUSED(number = E5M2 + 1), -EINVAL);
        ck_assert_int_eq(REFUSED(out_number = E5M2), -EINVAL);
        ck_assert_int_eq(REFUSED(q_number = 0), -EINVAL);
        ck_assert_int_eq(REFUSED(block_tokens = 9), -EINVAL);
        ck_assert_int_eq(REFUSED(k_offset = 2), -EINVAL);
        ck_assert_int_eq(REFUSED(lengths = 0), -EINVAL);
        ck_assert_int_eq(REFUSED(scale = 0.0f), -EINVAL);
        ck_assert_int_eq(REFUSED(chosen = 256), -EINVAL);
        ck_assert_int_eq(REFUSED(rotation = 256), -EINVAL);
        ck_assert_int_eq(REFUSED(block_mass = 256), -EINVAL);
        ck_assert_int_eq(REFUSED(token_mass = 256), -EINVAL);
        ck_assert_int_eq(REFUSED(split = 8), -EINVAL);
        ck_assert_int_eq(REFUSED(split = 16), -ENOBUFS);
        ck_assert_int_eq(REFUSED(starts = 256), -EINVAL);
        ck_assert_int_eq(gpu_attend_prefill(fixture_gpu(), NULL, &right), -EINVAL);
        ck_assert_int_eq(REFUSED(n_sequences = 0), 0);
        a = right;
        a.number = Q8;
        a.dim = 31;
        ck_assert_int_eq(gpu_attend_decode(fixture_gpu(), NULL, &a), -EINVAL);
}
END_TEST

SUITE("cuda: attention", fixture_begin(),
      TESTS(decode_of_all_shapes, decode_of_all_block_sizes, decode_of_odd_shapes,
            decode_of_many_splits, decode_of_runs_and_of_rows, splits_fill_the_device,
            decode_with_options, decode_of_narrow_numbers, narrow_nan_stays_local,
            narrow_numbers_with_options, decode_with_all_masked, decode_with_little_shared_memory,
            prefill_of_all_shapes, prefill_with_options),
      LOOPS(4, orders_of_threads_make_no_difference),
      TESTS(results_do_not_depend_on_the_others, wrong_arguments_are_refused))
