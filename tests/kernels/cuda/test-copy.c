/* SPDX-License-Identifier: Apache-2.0 */

/* The kernels that copy blocks, on this processor, against memcpy. */

#include <check.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/cuda/copy.h"
#include "tests/fakecuda/emulate.h"
#include "tests/kernels/buffers.h"

enum { BLOCKS = 9 };

static void launch(const char *name, unsigned blocks, unsigned threads, size_t shared, const void *arguments) {
        struct fake_launch l = {{blocks, 1, 1}, {threads, 1, 1}, shared};

        fake_kernel_find(name)->run(&l, arguments);
}

static uint8_t *random_bytes(size_t n) {
        uint8_t *bytes = buffer(n);

        for (size_t i = 0; i < n; i++)
                bytes[i] = (uint8_t)random_u32();
        return bytes;
}

static void gather_case(uint32_t n, size_t offset, size_t bytes, unsigned grid) {
        size_t block_bytes = offset + bytes + 48;
        uint32_t *ids = buffer(n * sizeof *ids);
        uint8_t *pool = random_bytes(BLOCKS * block_bytes), *expected = random_bytes(BLOCKS * block_bytes);
        uint8_t *packed = random_bytes(n * bytes), *zeros = buffer(bytes);
        struct gpu_gather a = {.blocks = {(cu_address)pool, block_bytes, (cu_address)ids}, .n = n, .offset = offset,
                               .bytes = bytes, .packed = (cu_address)packed};

        memcpy(expected, pool, BLOCKS * block_bytes);
        for (uint32_t i = 0; i < n; i++) /* all different, so that a scatter is defined */
                ids[i] = i % 4 == 2 ? GPU_NO_BLOCK : (i * 4 + 1) % BLOCKS;
        launch("kvd_gather", grid, 256, 0, &a);
        for (uint32_t i = 0; i < n; i++) {
                const uint8_t *from = ids[i] == GPU_NO_BLOCK ? zeros : pool + ids[i] * block_bytes + offset;

                if (memcmp(packed + i * bytes, from, bytes) != 0)
                        ck_abort_msg("gather of %zu bytes at %zu", bytes, offset);
        }
        for (size_t i = 0; i < n * bytes; i++)
                packed[i] = (uint8_t)random_u32();
        for (uint32_t i = 0; i < n; i++)
                if (ids[i] != GPU_NO_BLOCK)
                        memcpy(expected + ids[i] * block_bytes + offset, packed + i * bytes, bytes);
        a.to_blocks = 1;
        launch("kvd_gather", grid, 256, 0, &a);
        ck_assert_mem_eq(pool, expected, BLOCKS * block_bytes);
        buffers_free();
}

START_TEST(gather_and_scatter_copy_exactly) {
        emulate_seed((uint64_t)_i);
        for (uint32_t n = 1; n <= BLOCKS; n += 2)
                for (size_t bytes = 16; bytes <= 70000; bytes += bytes < 100 ? 16 : 13 * bytes / 16 * 16)
                        for (size_t offset = 0; offset < 64; offset += 48)
                                gather_case(n, offset, bytes, 1 + (unsigned)(bytes / 16) % 7);
}
END_TEST

int main(void) {
        Suite *suite = suite_create("cuda: copies");
        TCase *tests = tcase_create("copies");
        SRunner *runner = srunner_create(suite);
        int failed;

        tcase_set_timeout(tests, 60);
        tcase_add_loop_test(tests, gather_and_scatter_copy_exactly, 0, 4);
        suite_add_tcase(suite, tests);
        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed > 0;
}
