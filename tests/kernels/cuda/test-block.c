/* SPDX-License-Identifier: Apache-2.0 */

/* What all methods do with blocks: a GPU's kernels against the reference, byte for byte. */

#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/util.h"
#include "kernels/block.h"
#include "kernels/cuda/block.h"
#include "tests/kernels/cuda/fixture.h"

static const struct kvd_block_ops *reference(void) {
        return kvd_ops_pick("scalar")->block;
}

static uint8_t *random_bytes(size_t n) {
        uint8_t *bytes = buffer(n);

        for (size_t i = 0; i < n; i++)
                bytes[i] = (uint8_t)random_u32();
        return bytes;
}

static uint8_t *copy_bytes(const uint8_t *from, size_t n) {
        return memcpy(buffer(n), from, n);
}

/* ---- top-k ------------------------------------------------------------------------------------------------------- */

static float a_score(uint32_t kind) {
        static const float odd[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-42f, -1e-42f};

        if (kind == 0 || random_u32() % 5 == 0)
                return odd[random_u32() % ARRAY_SIZE(odd)];
        if (kind == 1)
                return (float)(random_u32() % 7) - 3.0f; /* many are equal */
        return (float)random_u32() / 65536.0f - 32768.0f;
}

static void topk_case(uint32_t rows, uint32_t n, uint32_t slack, uint32_t k, bool later, uint32_t kind) {
        uint32_t stride = n + slack, most = MIN(k, n), *scratch = buffer(n * 4);
        float *scores = buffer(((rows - 1) * stride + n) * sizeof *scores);
        uint32_t *expected = buffer(rows * most * 4), *got = buffer(rows * most * 4);
        struct gpu_topk a = {address_of(got), address_of(scores), stride, rows, n, k, later};

        for (uint32_t i = 0; i < (rows - 1) * stride + n; i++)
                scores[i] = a_score(kind);
        for (uint32_t row = 0; row < rows; row++)
                reference()->topk(expected + row * most, scores + row * stride, n, k, later, scratch);
        fixture_ok(gpu_topk(fixture_gpu(), NULL, &a));
        fixture_wait();
        if (memcmp(expected, got, rows * most * 4) != 0)
                ck_abort_msg("%u rows: %u of %u (+ %u), %s, kind %u", rows, k, n, slack, later ? "later" : "earlier",
                             kind);
        buffers_free();
}

START_TEST(topk_is_that_of_the_reference) {
        static const uint32_t sizes[] = {1, 2, 31, 32, 33, 64, 100, 1000, 1024, 1025, 2047, 5000};

        fixture_gpu();
        fixture_seed((uint64_t)_i);
        for (size_t s = 0; s < ARRAY_SIZE(sizes); s++) {
                uint32_t n = sizes[s], ks[] = {1, n / 8, n / 2, n - 1, n, n + 5};

                for (size_t k = 0; k < ARRAY_SIZE(ks); k++)
                        topk_case(1 + n % 3, n, n % 5, ks[k], (s + k + (size_t)_i) % 2, (uint32_t)(s + k) % 3);
        }
}
END_TEST

START_TEST(topk_of_a_long_row) {
        fixture_gpu();
        topk_case(1, 100000, 0, 777, true, 2);
        topk_case(2, 70001, 3, 35000, false, 1);
}
END_TEST

/* ---- compaction -------------------------------------------------------------------------------------------------- */

enum { PLANES = 4, HEADS = 3, PER_INDEX = 2 };

struct layout {
        uint32_t n_blocks, per_block, bytes;
        size_t head, plane, offset, block_bytes;
};

static struct layout layout_of(uint32_t tokens, uint32_t per_block, uint32_t bytes, size_t slack, size_t offset) {
        struct layout l = {DIV_UP(tokens, per_block), per_block, bytes, .offset = offset};

        l.head = per_block * (bytes + slack);
        l.plane = HEADS * l.head + slack;
        l.block_bytes = offset + PLANES * l.plane;
        return l;
}

/* A pool whose last block ends with its last token, so that what is read or written behind it is a fault. */
static size_t pool_bytes(const struct layout *l, uint32_t blocks, size_t slack) {
        return blocks * l->block_bytes - (PLANES > 1 ? 2 * slack : slack);
}

static uint32_t *some_tokens(uint32_t tokens, uint32_t n) {
        uint32_t *index = buffer(PLANES / PER_INDEX * HEADS * (size_t)(n + 3) * 4);

        for (uint32_t row = 0; row < PLANES / PER_INDEX * HEADS; row++)
                for (uint32_t token = 0, taken = 0; taken < n; token++) /* ascending */
                        if (random_u32() % (tokens - token) < n - taken)
                                index[row * (n + 3) + taken++] = token;
        return index;
}

static void compact_reference(uint8_t *to, const uint32_t *to_ids, uint8_t *from, const uint32_t *from_ids,
                              const struct layout *l, size_t slack, const uint32_t *index, uint32_t n) {
        uint8_t *to_blocks[64], *from_blocks[64];

        for (uint32_t b = 0; b < l->n_blocks; b++) {
                to_blocks[b] = to + to_ids[b] * l->block_bytes;
                from_blocks[b] = from + from_ids[b] * l->block_bytes;
        }
        for (uint32_t plane = 0; plane < PLANES; plane++)
                for (uint32_t head = 0; head < HEADS; head++) {
                        size_t offset = l->offset + plane * l->plane + head * l->head;
                        struct kvd_slots target = {to_blocks, offset, l->bytes + slack, l->per_block, l->bytes};
                        struct kvd_slots source = {from_blocks, offset, l->bytes + slack, l->per_block, l->bytes};

                        reference()->compact(&target, &source,
                                             index + (size_t)(plane / PER_INDEX * HEADS + head) * (n + 3), n);
                }
}

static uint32_t *shuffled_ids(uint32_t n, uint32_t first) {
        uint32_t *ids = buffer(n * 4);

        for (uint32_t i = 0; i < n; i++)
                ids[i] = first + (i * 7 + 3) % n;
        return ids;
}

/* apart: into other blocks; else in place. */
static void compact_case(uint32_t tokens, uint32_t per_block, uint32_t bytes, size_t slack, size_t offset, bool apart) {
        struct layout l = layout_of(tokens, per_block, bytes, slack, offset);
        uint32_t n = tokens * 2 / 3, blocks = l.n_blocks * (apart ? 2 : 1), *index = some_tokens(tokens, n);
        size_t size = pool_bytes(&l, blocks, slack);
        uint8_t *pool = random_bytes(size), *expected = copy_bytes(pool, size);
        uint32_t *from = shuffled_ids(l.n_blocks, 0), *to = apart ? shuffled_ids(l.n_blocks, l.n_blocks) : from;
        struct gpu_slots slots = {{address_of(pool), l.block_bytes, address_of(from)}, offset, l.plane, l.head,
                                  bytes + slack, per_block, 0};
        struct gpu_compact a = {slots, slots, address_of(index), n + 3, PLANES, HEADS, PER_INDEX, n, bytes, apart};

        a.to.blocks.ids = address_of(to);
        compact_reference(expected, to, expected, from, &l, slack, index, n);
        fixture_ok(gpu_compact(fixture_gpu(), NULL, &a));
        fixture_wait();
        if (memcmp(expected, pool, size) != 0)
                ck_abort_msg("%u tokens of %u bytes (+ %zu) at %zu, %u in a block%s", tokens, bytes, slack, offset,
                             per_block, apart ? "" : ", in place");
        buffers_free();
}

START_TEST(compaction_is_that_of_the_reference) {
        static const uint32_t bytes[] = {1, 6, 16, 48, 100, 256, 1040};
        static const uint32_t per_block[] = {1, 16, 13};

        fixture_gpu();
        fixture_seed((uint64_t)_i);
        for (size_t b = 0; b < ARRAY_SIZE(bytes); b++)
                for (size_t p = 0; p < ARRAY_SIZE(per_block); p++) {
                        compact_case(40, per_block[p], bytes[b], 0, 0, p % 2);
                        compact_case(40, per_block[p], bytes[b], 16, 32, (p + 1) % 2);
                }
        compact_case(16 * 37, 16, 256, 0, 64, false); /* many tiles */
        compact_case(16 * 37, 16, 256, 0, 64, true);
}
END_TEST

START_TEST(compaction_passes_over_what_is_not_there) {
        enum { TOKENS = 8, BYTES = 16 };
        uint8_t *pool = random_bytes(2 * TOKENS * BYTES), *before = copy_bytes(pool, 2 * TOKENS * BYTES);
        uint32_t *from = buffer(8), *to = buffer(8), *index = buffer(TOKENS * 4);
        struct gpu_slots slots = {.blocks = {address_of(pool), TOKENS / 2 * BYTES, address_of(from)}, .slot = BYTES,
                                  .per_block = TOKENS / 2};
        struct gpu_compact a = {slots, slots, address_of(index), TOKENS, 1, 1, 1, TOKENS, BYTES, 1};

        from[0] = 0;
        from[1] = GPU_NO_BLOCK;
        to[0] = 2;
        to[1] = 3;
        a.to.blocks.ids = address_of(to);
        for (uint32_t i = 0; i < TOKENS; i++)
                index[i] = i;
        fixture_ok(gpu_compact(fixture_gpu(), NULL, &a));
        fixture_wait();
        memcpy(before + TOKENS * BYTES, before, TOKENS / 2 * BYTES);
        ck_assert_mem_eq(pool, before, 2 * TOKENS * BYTES);
}
END_TEST

/* ---- four bits --------------------------------------------------------------------------------------------------- */

static void pack_case(uint32_t n, uint32_t dim, uint32_t group, size_t slack, enum kvd_number type) {
        size_t size = type == KVD_NUMBER_F32 ? 4 : 2, packed = n * kvd_packed_4_bytes(dim, group);
        size_t wide = ((n - 1) * (dim + slack) + dim) * size;
        uint8_t *rows = random_bytes(wide), *expected = buffer(packed), *got = buffer(packed);
        uint8_t *back = buffer(wide), *got_back = buffer(wide);
        struct gpu_pack_4 a = {address_of(rows), address_of(got), dim + slack, n, dim, group, type, 0};

        if (dim % 3 == 0) /* zeros of both signs, and a few larger numbers: which zero is the least? */
                for (size_t i = 0; i < wide; i++)
                        rows[i] = (i + 1) % size ? 0 : (uint8_t)"\0\x80\x40\x41"[random_u32() % 4];
        reference()->pack_4(expected, rows, dim + slack, n, dim, group, type);
        reference()->unpack_4(back, dim + slack, expected, n, dim, group, type);
        fixture_ok(gpu_pack_4(fixture_gpu(), NULL, &a));
        a.rows = address_of(got_back);
        a.unpack = 1;
        fixture_ok(gpu_pack_4(fixture_gpu(), NULL, &a));
        fixture_wait();
        if (memcmp(expected, got, packed) != 0 || memcmp(back, got_back, wide) != 0)
                ck_abort_msg("%u rows of %u (+ %zu) in groups of %u, type %d", n, dim, slack, group, (int)type);
        buffers_free();
}

/* Any bytes: NaNs, infinities and subnormal numbers are among them. */
START_TEST(four_bits_are_those_of_the_reference) {
        static const uint32_t groups[] = {0, 2, 16, 18, 32, 64}, rows[] = {1, 2, 7};

        fixture_gpu();
        fixture_seed((uint64_t)_i);
        for (uint32_t type = KVD_NUMBER_F32; type <= KVD_NUMBER_BF16; type++)
                for (size_t g = 0; g < ARRAY_SIZE(groups); g++)
                        for (size_t r = 0; r < ARRAY_SIZE(rows); r++)
                                for (uint32_t dim = 1; dim < 150; dim += dim < 36 ? 1 : 23)
                                        pack_case(rows[r], dim, groups[g], dim % 3, type);
        pack_case(600, 128, 32, 0, KVD_NUMBER_BF16);
}
END_TEST

START_TEST(what_cannot_be_is_refused) {
        struct gpu *gpu = fixture_gpu();
        struct gpu_topk topk = {.rows = 2, .n = 10, .k = 3, .stride = 9};
        struct gpu_pack_4 pack = {.n = 1, .dim = 10, .group = 3, .number = 1, .stride = 10};
        struct gpu_compact compact = {.planes = 1, .heads = 1, .n = 1, .bytes = 1};

        ck_assert_int_eq(gpu_topk(gpu, NULL, &topk), -EINVAL);
        ck_assert_int_eq(gpu_pack_4(gpu, NULL, &pack), -EINVAL);
        ck_assert_int_eq(gpu_compact(gpu, NULL, &compact), -EINVAL);
        ck_assert(strstr(gpu->why, "compact"));
        topk.k = pack.n = compact.n = 0; /* nothing to do is done */
        ck_assert(gpu_topk(gpu, NULL, &topk) == 0 && gpu_pack_4(gpu, NULL, &pack) == 0 &&
                  gpu_compact(gpu, NULL, &compact) == 0);
}
END_TEST

int main(void) {
        const struct fixture_test tests[] = {
                {topk_is_that_of_the_reference, 3},
                {topk_of_a_long_row, -1},
                {compaction_is_that_of_the_reference, 3},
                {compaction_passes_over_what_is_not_there, -1},
                {four_bits_are_those_of_the_reference, 2},
                {what_cannot_be_is_refused, -1},
        };

        return fixture_main("cuda: blocks", 60, tests, ARRAY_SIZE(tests));
}
