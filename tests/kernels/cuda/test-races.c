/* SPDX-License-Identifier: Apache-2.0 */

/* emulate_race.c finds races, and reports none where accesses are ordered. */

#include <signal.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/gpu/fakecuda/emulate.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/race_probe.h"
#include "tests/lib/suite.h"

static const uint32_t in_order[] = {ORDER_BARRIER, ORDER_WARP,  ORDER_ATOMIC,
                                    ORDER_BYTES,   ORDER_FENCE, ORDER_COPY};
static const uint32_t races[] = {RACE_NOTHING,      RACE_WARP_ELSEWHERE,  RACE_SHUFFLE,
                                 RACE_READ_BARRIER, RACE_ATOMIC,          RACE_BLOCKS,
                                 RACE_COPY_BARRIER, RACE_COPY_WAITS_LATE, RACE_COPY_OVER};

static void launch(uint32_t kind, uint32_t memory) {
        struct fake_launch l = {{2, 1, 1}, {64, 1, 1}, 64 * 16};
        struct race_probe a = {.words = buffer(8192), .kind = kind, .memory = memory};

        fake_kernel_probe_race.run(&l, &a);
}

START_TEST(what_is_in_order_is_none) {
        for (uint32_t seed = 0; seed < 3; seed++)
                for (size_t i = 0; i < ARRAY_SIZE(in_order); i++)
                        for (uint32_t memory = 0; memory < 3; memory++) {
                                emulate_seed(seed);
                                launch(in_order[i], memory);
                        }
}
END_TEST

START_TEST(a_race_ends_the_process) {
        emulate_seed((uint64_t)_i % 2);
        launch(races[_i / 6], (uint32_t)_i / 2 % 3);
}
END_TEST

SUITE("cuda: races", TESTS(what_is_in_order_is_none),
      RAISES(SIGABRT, 6 * ARRAY_SIZE(races), a_race_ends_the_process))
