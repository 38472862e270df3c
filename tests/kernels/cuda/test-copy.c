/* SPDX-License-Identifier: Apache-2.0 */

/* Copies of blocks against memcpy. */

#include <errno.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/cuda/copy.h"
#include "tests/kernels/cuda/fixture.h"

enum { BLOCKS = 9 };

static uint8_t *random_bytes(size_t n) {
        uint8_t *bytes = buffer(n);

        for (size_t i = 0; i < n; i++)
                bytes[i] = (uint8_t)random_u32();
        return bytes;
}

static void assert_gathered(const struct gpu_gather *a, const uint8_t *pool, const uint32_t *ids) {
        const uint8_t *packed = host_of(a->packed), *zeros = buffer(a->bytes);

        for (uint32_t i = 0; i < a->n; i++) {
                const uint8_t *block = pool + ids[i] * a->blocks.block_bytes;
                const uint8_t *from = ids[i] == GPU_NO_BLOCK ? zeros : block + a->offset;

                if (memcmp(packed + i * a->bytes, from, a->bytes) != 0)
                        ck_abort_msg("gather of %llu bytes at %llu", (unsigned long long)a->bytes,
                                     (unsigned long long)a->offset);
        }
}

/* by: the kernel, copies of the driver, or what is thought to be faster. */
enum by { BY_KERNEL, BY_COPIES, BY_EITHER };

static void gather_by(enum by by, const struct gpu_gather *a, const uint32_t *ids) {
        if (by == BY_KERNEL)
                fixture_ok(gpu_gather(fixture_gpu(), NULL, a));
        else if (by == BY_COPIES)
                fixture_ok(gpu_gather_copies(fixture_gpu(), NULL, a, ids));
        else
                fixture_ok(gpu_gather_fastest(fixture_gpu(), NULL, a, ids, random_u32() % 2));
        fixture_wait();
}

static void gather_case(enum by by, uint32_t n, size_t offset, size_t bytes) {
        size_t block_bytes = offset + bytes + (by == BY_KERNEL || random_u32() % 2 ? 48 : 0);
        size_t pool_bytes = (BLOCKS - 1) * block_bytes + offset + bytes;
        uint32_t *ids = buffer(n * sizeof *ids);
        uint8_t *pool = random_bytes(pool_bytes), *expected = buffer(pool_bytes), *packed = random_bytes(n * bytes);
        struct gpu_gather a = {.blocks = {address_of(pool), block_bytes, address_of(ids)}, .n = n, .offset = offset,
                               .bytes = bytes, .packed = address_of(packed)};

        memcpy(expected, pool, pool_bytes);
        for (uint32_t i = 0; i < n; i++) /* all different, so that a scatter is defined */
                ids[i] = i % 4 == 2 ? GPU_NO_BLOCK : by == BY_KERNEL ? (i * 4 + 1) % BLOCKS : (i + 5) % BLOCKS;
        gather_by(by, &a, ids);
        assert_gathered(&a, pool, ids);
        for (size_t i = 0; i < n * bytes; i++)
                packed[i] = (uint8_t)random_u32();
        for (uint32_t i = 0; i < n; i++)
                if (ids[i] != GPU_NO_BLOCK)
                        memcpy(expected + ids[i] * block_bytes + offset, packed + i * bytes, bytes);
        a.to_blocks = 1;
        gather_by(by, &a, ids);
        ck_assert_mem_eq(pool, expected, pool_bytes);
        buffers_free();
}

START_TEST(gather_and_scatter_copy_exactly) {
        fixture_gpu();
        fixture_seed((uint64_t)_i);
        for (uint32_t n = 1; n <= BLOCKS; n += 2)
                for (size_t bytes = 16; bytes <= 70000; bytes += bytes < 100 ? 16 : 13 * bytes / 16 * 16)
                        for (size_t offset = 0; offset < 64; offset += 48)
                                gather_case(BY_KERNEL, n, offset, bytes);
}
END_TEST

START_TEST(the_drivers_copies_do_the_same) {
        fixture_gpu();
        for (uint32_t n = 1; n <= BLOCKS; n += 4)
                for (size_t bytes = 1; bytes <= 300000; bytes = bytes * 6 + n)
                        for (size_t offset = 0; offset < 64; offset += 35) {
                                gather_case(BY_COPIES, n, offset, bytes);
                                gather_case(BY_EITHER, n, offset / 16 * 16, ALIGN_UP(bytes, 16));
                        }
}
END_TEST

static void clear_case(uint32_t n, size_t offset, size_t bytes) {
        size_t block_bytes = offset + bytes + 32, pool_bytes = (BLOCKS - 1) * block_bytes + offset + bytes;
        uint32_t *ids = buffer(n * sizeof *ids);
        uint8_t *pool = random_bytes(pool_bytes), *expected = buffer(pool_bytes);
        struct gpu_clear a = {.blocks = {address_of(pool), block_bytes, address_of(ids)}, .n = n, .offset = offset,
                              .bytes = bytes};

        memcpy(expected, pool, pool_bytes);
        for (uint32_t i = 0; i < n; i++) {
                ids[i] = i % 3 == 1 ? GPU_NO_BLOCK : (i * 4 + 2) % BLOCKS;
                if (ids[i] != GPU_NO_BLOCK)
                        memset(expected + ids[i] * block_bytes + offset, 0, bytes);
        }
        fixture_ok(gpu_clear(fixture_gpu(), NULL, &a));
        fixture_wait();
        ck_assert_mem_eq(pool, expected, pool_bytes);
        buffers_free();
}

START_TEST(blocks_are_cleared_and_nothing_else) {
        fixture_gpu();
        for (uint32_t n = 1; n <= BLOCKS; n += 2)
                for (size_t bytes = 16; bytes <= 70000; bytes += bytes < 100 ? 16 : 13 * bytes / 16 * 16)
                        clear_case(n, bytes % 96 / 16 * 16, bytes);
}
END_TEST

START_TEST(sizes_are_multiples_of_16) {
        struct gpu *gpu = fixture_gpu();
        struct gpu_gather a = {.blocks.block_bytes = 64, .n = 1, .bytes = 24};

        ck_assert_int_eq(gpu_gather(gpu, NULL, &a), -EINVAL);
        ck_assert(strstr(gpu->why, "multiples of 16"));
        a.bytes = 0;
        ck_assert_int_eq(gpu_gather(gpu, NULL, &a), 0);
}
END_TEST

int main(void) {
        const struct fixture_test tests[] = {
                {gather_and_scatter_copy_exactly, 4},
                {the_drivers_copies_do_the_same, -1},
                {blocks_are_cleared_and_nothing_else, -1},
                {sizes_are_multiples_of_16, -1},
        };

        return fixture_main("cuda: copies", 60, tests, ARRAY_SIZE(tests));
}
