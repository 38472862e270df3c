/* SPDX-License-Identifier: Apache-2.0 */

/* The kernels that copy blocks, against memcpy. */

#include <string.h>

#include "ipc/base/util.h"
#include "kernels/cuda/copy.h"
#include "tests/kernels/buffers.h"
#include "tests/kernels/cuda/fixture.h"

enum { BLOCKS = 9 };

static uint8_t *random_bytes(size_t n) {
        uint8_t *bytes = buffer(n);

        for (size_t i = 0; i < n; i++)
                bytes[i] = (uint8_t)random_u32();
        return bytes;
}

static void compare_gathered(const uint8_t *packed, const uint8_t *pool, const uint32_t *ids,
                             const struct gpu_gather *a) {
        uint8_t *zeros = buffer(a->bytes);

        for (uint32_t i = 0; i < a->n; i++) {
                const uint8_t *from = ids[i] == GPU_NO_BLOCK ? zeros :
                                      pool + ids[i] * a->blocks.block_bytes + a->offset;

                if (memcmp(packed + i * a->bytes, from, a->bytes) != 0)
                        ck_abort_msg("gather of %zu bytes at %zu", (size_t)a->bytes, (size_t)a->offset);
        }
}

/* There and back: the blocks get other bytes, and what lies beside them in the pool stays. */
static void gather_case(uint32_t n, size_t offset, size_t bytes) {
        size_t block_bytes = offset + bytes + 48;
        uint32_t *ids = buffer(n * sizeof *ids);
        uint8_t *pool = random_bytes(BLOCKS * block_bytes), *packed = random_bytes(n * bytes),
                *found = buffer(BLOCKS * block_bytes);
        struct gpu_gather a = {.blocks = {device_of(pool, BLOCKS * block_bytes), block_bytes}, .n = n,
                               .offset = offset, .bytes = bytes, .packed = device_of(packed, n * bytes)};

        for (uint32_t i = 0; i < n; i++) /* all different, so that a scatter is defined */
                ids[i] = i % 4 == 2 ? GPU_NO_BLOCK : (i * 4 + 1) % BLOCKS;
        a.blocks.ids = device_of(ids, n * sizeof *ids);
        device_call(gpu_gather(device(), NULL, &a));
        device_get(packed, a.packed, n * bytes);
        compare_gathered(packed, pool, ids, &a);
        for (size_t i = 0; i < n * bytes; i++)
                packed[i] = (uint8_t)random_u32();
        device_put(a.packed, packed, n * bytes);
        for (uint32_t i = 0; i < n; i++)
                if (ids[i] != GPU_NO_BLOCK)
                        memcpy(pool + ids[i] * block_bytes + offset, packed + i * bytes, bytes);
        a.to_blocks = 1;
        device_call(gpu_gather(device(), NULL, &a));
        device_get(found, a.blocks.base, BLOCKS * block_bytes);
        ck_assert_mem_eq(pool, found, BLOCKS * block_bytes);
        device_done();
}

START_TEST(gather_and_scatter_copy_exactly) {
        device_order((uint64_t)_i);
        for (uint32_t n = 1; n <= BLOCKS; n += 2)
                for (size_t bytes = 16; bytes <= 70000; bytes += bytes < 100 ? 16 : 13 * bytes / 16 * 16)
                        for (size_t offset = 0; offset < 64; offset += 48)
                                gather_case(n, offset, bytes);
}
END_TEST

int main(void) {
        Suite *suite = suite_create("cuda: copies");
        TCase *tests = tcase_create("copies");

        tcase_set_timeout(tests, 60);
        tcase_add_loop_test(tests, gather_and_scatter_copy_exactly, 0, 4);
        suite_add_tcase(suite, tests);
        return device_suite(suite);
}
