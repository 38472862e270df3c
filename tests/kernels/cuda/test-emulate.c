/* SPDX-License-Identifier: Apache-2.0 */

/* Tests the properties of the emulation that tests of kernels rely on. */

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/ops.h"
#include "tests/gpu/fakecuda/emulate.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/probe.h"
#include "tests/lib/suite.h"

static void launch(const struct fake_kernel *kernel, unsigned blocks, unsigned threads,
                   size_t shared, const struct probe *a) {
        struct fake_launch l = {{blocks, 1, 1}, {threads, 1, 1}, shared};

        ck_assert_uint_eq(kernel->argument_bytes, sizeof *a);
        kernel->run(&l, a);
}

START_TEST(barriers_hold_all_threads) {
        uint32_t numbers[1024], to[2 * 3], sum, steps;

        emulate_seed((uint64_t)_i);
        for (uint32_t i = 0; i < ARRAY_SIZE(numbers); i++)
                numbers[i] = random_u32();
        for (uint32_t threads = 32; threads <= 1024; threads *= 2) {
                struct probe a = {.to = to, .b = numbers, .n = threads - 5};

                memset(to, 0, sizeof to);
                launch(&fake_kernel_probe_barrier, 3, threads, threads * 4, &a);
                sum = steps = 0;
                for (uint32_t i = 0; i < a.n; i++)
                        sum += numbers[i];
                for (uint32_t half = threads / 2; half; half /= 2)
                        steps++;
                for (uint32_t block = 0; block < 3; block++) {
                        ck_assert_uint_eq(to[2 * block], sum);
                        ck_assert_uint_eq(to[2 * block + 1], 3 * steps * threads);
                }
        }
}
END_TEST

START_TEST(warps_exchange) {
        uint32_t to[256 * 6];
        struct probe a = {.to = to};

        emulate_seed((uint64_t)_i);
        launch(&fake_kernel_probe_warp, 1, 256, 0, &a);
        for (uint32_t i = 0; i < 256; i++) {
                uint32_t lane = i % 32, *got = to + i * 6;

                ck_assert_uint_eq(got[0], lane ^ 5);
                ck_assert_uint_eq(got[1], 70 + i / 32);
                ck_assert_uint_eq(got[2], lane < 3 ? lane : lane - 3);
                ck_assert_uint_eq(got[3], 0x49249249u);
                ck_assert_uint_eq(got[4], i / 32 * 32 * 32 + 31 * 16);
                ck_assert_uint_eq(got[5], (lane + 1) % 32);
        }
}
END_TEST

START_TEST(matrix_units_multiply) {
        const struct kvd_ops *ops = kvd_ops_pick("scalar");

        for (uint32_t type = KVD_NUMBER_F16; type <= KVD_NUMBER_BF16; type++) {
                float *x = random_floats(256), *y = random_floats(128), got[128];
                uint16_t left[256], right[128];
                struct probe a = {.to = (uint32_t *)got, .a = left, .b = right, .kind = type};

                ops->narrow(left, x, 256, type);
                ops->narrow(right, y, 128, type);
                ops->widen(x, left, 256, type);
                ops->widen(y, right, 128, type);
                launch(&fake_kernel_probe_mma, 1, 32, 0, &a);
                for (uint32_t row = 0; row < 16; row++)
                        for (uint32_t column = 0; column < 8; column++) {
                                double sum = 1.0;

                                for (uint32_t k = 0; k < 16; k++)
                                        sum += (double)x[row * 16 + k] * y[k * 8 + column];
                                ck_assert_double_lt(fabs(got[row * 8 + column] - sum), 4e-6);
                        }
                buffers_free();
        }
}
END_TEST

/* Copies that were not waited for are not visible; reading them gives a known value. */
START_TEST(copies_come_when_waited_for) {
        enum { GROUPS = 5, THREADS = 64 };
        uint32_t from[GROUPS * THREADS][4] __attribute__((aligned(16))), to[GROUPS * THREADS];

        emulate_seed((uint64_t)_i);
        for (uint32_t kind = 0; kind < 2; kind++) {
                struct probe a = {.to = to, .a = from, .n = GROUPS, .kind = kind};

                for (uint32_t i = 0; i < GROUPS * THREADS; i++)
                        from[i][0] = random_u32() / 2;
                launch(&fake_kernel_probe_copy, 2, THREADS, GROUPS * THREADS * 16, &a);
                for (uint32_t i = 0; i < GROUPS * THREADS; i++) {
                        uint32_t late = kind && i / THREADS >= GROUPS - 2;

                        ck_assert_uint_eq(to[i], late ? 0xeeeeeeee :
                                                        from[i / THREADS * THREADS +
                                                             (i % THREADS + 1) % THREADS][0]);
                }
        }
}
END_TEST

START_TEST(seeds_change_the_order) {
        uint32_t to[20][3] = {{0}}, different = 0;

        for (uint32_t seed = 0; seed < 20; seed++) {
                struct probe a = {.to = to[seed]};

                emulate_seed(seed / 2);
                launch(&fake_kernel_probe_order, 9, 256, 0, &a);
                if (seed % 2)
                        /* a seed determines the order */
                        ck_assert_mem_eq(to[seed - 1], to[seed], sizeof to[0]);
                different += seed >= 2 && to[seed][0] != to[0][0] && to[seed][1] != to[0][1];
        }
        ck_assert(to[0][0] == 8 && to[0][1] == 255);
        ck_assert_uint_gt(different, 10);
}
END_TEST

START_TEST(atomic_operations_add_up) {
        uint32_t to[6] = {0, 0, UINT32_MAX, 0, 0, 0};
        struct probe a = {.to = to};
        float sum;

        emulate_seed((uint64_t)_i);
        launch(&fake_kernel_probe_atomic, 3, 256, 0, &a);
        memcpy(&sum, &to[4], sizeof sum);
        ck_assert(to[0] == 768 && to[1] == 767 && to[2] == 0 && to[3] == UINT32_MAX &&
                  sum == 384.0f);
        ck_assert(_i || to[5] == 768); /* each finds the result of the one before it */
}
END_TEST

static bool is_nan_16(uint16_t x, enum kvd_number type) {
        return (x & 0x7fff) > (type == KVD_NUMBER_F16 ? 0x7c00 : 0x7f80);
}

START_TEST(numbers_are_rounded_as_the_reference_does) {
        enum { N = 1 << 20 };
        const struct kvd_ops *ops = kvd_ops_pick("scalar");
        uint32_t *to = buffer(N * 4), first = (uint32_t)_i << 29;
        struct probe a = {.to = to, .n = N, .kind = first};

        launch(&fake_kernel_probe_narrow, 40, 256, 0, &a);
        for (uint32_t i = 0; i < N; i++) {
                uint32_t bits = first + i * 977;
                uint16_t f16, bf16;
                float x;

                memcpy(&x, &bits, sizeof x);
                ops->narrow(&f16, &x, 1, KVD_NUMBER_F16);
                ops->narrow(&bf16, &x, 1, KVD_NUMBER_BF16);
                if (isnan(x) ? !is_nan_16((uint16_t)(to[i] >> 16), KVD_NUMBER_F16) ||
                                       !is_nan_16((uint16_t)to[i], KVD_NUMBER_BF16) :
                               to[i] != ((uint32_t)f16 << 16 | bf16))
                        ck_abort_msg("%a", (double)x);
        }
        buffers_free();
}
END_TEST

static void on_fault(int signal) {
        abort();
}

START_TEST(misuse_ends_the_process) {
        uint32_t to[64] __attribute__((aligned(16))) = {0};
        struct probe a = {.to = to, .kind = (uint32_t)_i};

        signal(SIGSEGV, on_fault);
        launch(&fake_kernel_probe_wrong, 1, 64, 64 * 2, &a);
}
END_TEST

START_TEST(launches_have_limits) {
        uint32_t to[2048 * 2] = {0}, numbers[2048] = {0};
        struct probe a = {.to = to, .b = numbers, .n = 1, .kind = N_WRONG};

        launch(&fake_kernel_probe_wrong, _i == 0 ? 0 : 1,
               _i == 1 ? 96 :
               _i == 2 ? 40 :
                         64,
               _i == 3 ? (227 << 10) + 1 : 0, &a);
}
END_TEST

SUITE("cuda: emulation", LOOPS(4, barriers_hold_all_threads, warps_exchange),
      TESTS(matrix_units_multiply), LOOPS(3, copies_come_when_waited_for),
      TESTS(seeds_change_the_order), LOOPS(3, atomic_operations_add_up),
      LOOPS(8, numbers_are_rounded_as_the_reference_does),
      RAISES(SIGABRT, N_WRONG, misuse_ends_the_process), RAISES(SIGABRT, 4, launches_have_limits))
