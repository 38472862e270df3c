/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Keys and layout: every hash variant gives the same keys, keys of the paper's profile equal those
 * of the paper, and bad headers are refused.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "ipc/base/device.h"
#include "ipc/base/key.h"
#include "ipc/base/pack.h"
#include "ipc/base/place.h"
#include "ipc/base/wide.h"
#include "tests/lib/suite.h"

static struct kvd_index make_index(uint32_t keys) {
        struct kvd_index ix = {
                .magic = KVD_INDEX_MAGIC,
                .version = KVD_LAYOUT_VERSION,
                .geometry = {.layers = 4,
                             .kv_heads = 2,
                             .head_dim = 64,
                             .dtype = KVD_dtype_f16,
                             .vocab = 32000},
                .kind = KVD_kind_causal,
                .keys = keys,
                .policy = KVD_policy_lru,
                .segment_blocks = 64,
                .n_shards = 1,
                .max_segments = 8,
                .capacity = 512,
                .run_capacity = 65,
        };
        const char *why;

        ck_assert_int_eq(kvd_shape_normalise(&ix.geometry, &why), 0);
        ix.block_bytes = ix.shard_bytes = kvd_shape_bytes(&ix.geometry);
        ix.segment_bytes = ix.segment_blocks * ix.block_bytes;
        for (uint32_t i = 0; i < KVD_SECRET_BYTES; i++)
                ix.secret[i] = (uint8_t)(i * 73 + 5);
        kvd_index_lay_out(&ix);
        return ix;
}

START_TEST(hash_variants_are_equal) {
        static uint8_t data[4200];
        struct kvd_index ix = make_index(KVD_keys_serve);
        const struct kvd_wide *best = kvd_wide_best();

        for (size_t i = 0; i < sizeof data; i++)
                data[i] = (uint8_t)(i * 31 + i / 7);
        for (size_t n = 0; n < 4100; n += n < 300 ? 1 : 97)
                for (size_t off = 0; off < 3; off++) {
                        XXH128_hash_t want = XXH3_128bits_withSecret(data + off, n, ix.secret,
                                                                     sizeof ix.secret);
                        struct kvd_key a = kvd_wide_plain.hash(data + off, n, ix.secret),
                                       b = best->hash(data + off, n, ix.secret);

                        ck_assert_uint_eq(a.lo, want.low64);
                        ck_assert_uint_eq(a.hi, want.high64);
                        ck_assert(kvd_key_equal(a, b));
                }
}
END_TEST

/* Unpacks one token by the description in pack.h. */
static uint32_t unpacked(const uint32_t *packed, uint32_t n, uint32_t bits, uint32_t token) {
        uint32_t half = n / 2, i = token % half, side = token / half * 16, j = i / 8, per, high = 0;

        if (bits) {
                per = 16 / bits;
                high = packed[half + j / per * 8 + i % 8] >> (side + j % per * bits);
        }
        return (high & ((1u << bits) - 1)) << 16 | (packed[i] >> side & 0xffff);
}

static void fill_tokens(uint32_t *tokens, uint32_t n, uint32_t vocab, uint32_t seed) {
        for (uint32_t i = 0; i < n; i++) {
                seed = seed * 1664525 + 1013904223;
                tokens[i] = (uint32_t)((uint64_t)seed * vocab >> 32);
        }
        tokens[seed % n] = vocab - 1;
}

START_TEST(packed_tokens_are_all_there_and_no_others) {
        static const struct {
                uint32_t vocab, high_bits;
        } of[] = {{2, 0},      {65536, 0},  {65537, 1},   {128256, 1},  {131073, 2},
                  {262144, 2}, {262208, 4}, {1048577, 8}, {16777216, 8}};
        static uint32_t tokens[KVD_RUN_TOKENS_MOST], packed[KVD_PACKED_MOST],
                plain[KVD_PACKED_MOST];
        uint32_t vocab = of[_i].vocab;

        for (uint32_t bt = 1; bt <= KVD_MAX_PLANE_TOKENS; bt += bt < 20 ? 1 : 59) {
                struct kvd_shape shape = {.vocab = vocab, .block_tokens = bt};
                uint32_t n = KVD_RUN_BLOCKS * bt, words = kvd_packed_words(&shape, n);
                uint32_t bits = of[_i].high_bits;

                fill_tokens(tokens, n, vocab, bt);
                ck_assert_uint_le(words, n / 2 + n * bits / 32 + 8);
                ck_assert_ptr_eq(kvd_pack(&shape, tokens, n, packed), packed);
                for (uint32_t i = 0; i < n; i++)
                        ck_assert_uint_eq(unpacked(packed, n, bits, i), tokens[i]);
                kvd_wide_plain.pack(plain, tokens, n, bits);
                ck_assert_mem_eq(plain, packed, words * sizeof *packed);
                tokens[n / 3] = 1u << (16 + bits);
                ck_assert_ptr_null(kvd_pack(&shape, tokens, n, packed));
                tokens[n / 3] = UINT32_MAX;
                ck_assert_ptr_null(kvd_pack(&shape, tokens, n, packed));
        }
}
END_TEST

START_TEST(tokens_without_a_bound_are_not_packed) {
        static const uint32_t tokens[KVD_RUN_BLOCKS] = {UINT32_MAX, 0, 5};
        struct kvd_shape none = {.block_tokens = 1},
                         large = {.block_tokens = 1, .vocab = (1u << 24) + 1};

        ck_assert_ptr_eq(kvd_pack(&none, tokens, KVD_RUN_BLOCKS, NULL), tokens);
        ck_assert_ptr_eq(kvd_pack(&large, tokens, KVD_RUN_BLOCKS, NULL), tokens);
        ck_assert_uint_eq(kvd_packed_words(&none, KVD_RUN_BLOCKS), KVD_RUN_BLOCKS);
        ck_assert_uint_eq(kvd_packed_words(&large, KVD_RUN_BLOCKS), KVD_RUN_BLOCKS);
}
END_TEST

START_TEST(paper_keys_are_xxh64_of_the_ids) {
        static const uint32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
        struct kvd_index ix = make_index(KVD_keys_paper);
        struct kvd_key key = kvd_key_prefix(&ix, ids, 10);

        ck_assert_uint_eq(key.lo, XXH64(ids, sizeof ids, 0));
        /* xxhash.xxh64(array.array('I', range(1, 11))) in Python */
        ck_assert_uint_eq(key.lo, UINT64_C(0xf918d63f618a8445));
}
END_TEST

START_TEST(paper_keys_match_known_vectors) {
        static const uint8_t bytes[] = {1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0};
        static const uint32_t ids[] = {1, 2, 3};
        struct kvd_index ix = make_index(KVD_keys_paper);

        ck_assert_uint_eq(kvd_key_prefix(&ix, ids, 0).lo, UINT64_C(0xef46db3751d8e999));
        ck_assert_uint_eq(kvd_key_prefix(&ix, ids, 3).lo, XXH64(bytes, sizeof bytes, 0));
        ck_assert_uint_eq(XXH3_64bits(bytes, 0), UINT64_C(0x2d06800538d394c2));
}
END_TEST

START_TEST(keys_depend_on_all_that_they_should) {
        static const uint32_t a[16] = {1, 2, 3}, b[16] = {1, 2, 4};
        struct kvd_index ix = make_index(KVD_keys_serve), other = ix;
        struct kvd_key root = kvd_key_root(&ix, 0, 0), key = kvd_key_block(&ix, root, a, 16);

        other.secret[0] ^= 1;
        ck_assert(!kvd_key_equal(root, kvd_key_root(&ix, 1, 0)));
        ck_assert(!kvd_key_equal(root, kvd_key_root(&ix, 0, 1)));
        ck_assert(!kvd_key_equal(root, kvd_key_root(&ix, 0, UINT64_C(1) << 63)));
        ck_assert(!kvd_key_equal(key, kvd_key_block(&ix, root, b, 16)));
        ck_assert(!kvd_key_equal(key, kvd_key_block(&ix, root, a, 15)));
        ck_assert(!kvd_key_equal(key, kvd_key_block(&ix, key, a, 16)));
        ck_assert(!kvd_key_equal(key, kvd_key_block(&other, root, a, 16)));
        ck_assert(!kvd_key_equal(kvd_key_prefix_root(&ix, key, 0),
                                 kvd_key_prefix_root(&ix, root, 0)));
}
END_TEST

START_TEST(every_changed_header_field_is_refused) {
        struct kvd_index good = make_index(KVD_keys_serve), bad;
        uint64_t bytes = good.size;

        ck_assert_int_eq(kvd_index_validate(&good, bytes), 0);
        ck_assert_int_eq(kvd_index_validate(&good, bytes - 1), -EPROTO);
        for (size_t i = 0; i < offsetof(struct kvd_index, secret) / 4; i++) {
                uint32_t *word = (uint32_t *)&bad + i;
                uint32_t before;

                bad = good;
                before = *word;
                *word = 0xfffffff1;
                /*
                 * instance, fingerprint, kind and the like are any value; sizes and offsets must
                 * fit together
                 */
                if (kvd_index_validate(&bad, bytes) == 0) {
                        ck_assert_uint_le(bad.size, bytes);
                        ck_assert_uint_eq(bad.capacity, good.capacity);
                        ck_assert_uint_eq(bad.desc_off, good.desc_off);
                        ck_assert_uint_eq(bad.run_off, good.run_off);
                        ck_assert_uint_eq(bad.table_slots, good.table_slots);
                        ck_assert_uint_eq(bad.run_capacity, good.run_capacity);
                        ck_assert_uint_eq(bad.segment_bytes, good.segment_bytes);
                }
                ck_assert_uint_ne(before, 0xfffffff1);
        }
}
END_TEST

START_TEST(shards_must_add_up) {
        static const struct {
                uint32_t backend, n_shards, parts; /* shard_bytes: the block's, divided by that */
                bool good;
        } cases[] = {{KVD_BACKEND_HOST, 1, 1, true},
                     {KVD_BACKEND_HOST, 2, 2, false},
                     {KVD_BACKEND_VMM, 1, 1, true},
                     {KVD_BACKEND_VMM, 2, 2, true},
                     {KVD_BACKEND_VMM, KVD_SHARDS, KVD_SHARDS, true},
                     {KVD_BACKEND_VMM, 0, 1, false},
                     {KVD_BACKEND_VMM, 2, 1, false},
                     {KVD_BACKEND_VMM, 1, 2, false},
                     {KVD_BACKEND_VMM, 2 * KVD_SHARDS, 2 * KVD_SHARDS, false}};

        for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
                struct kvd_index ix = make_index(KVD_keys_serve);

                ix.backend = cases[i].backend;
                ix.n_shards = cases[i].n_shards;
                ix.shard_bytes = ix.block_bytes / cases[i].parts;
                kvd_index_lay_out(&ix);
                ck_assert_int_eq(kvd_index_validate(&ix, ix.size), cases[i].good ? 0 : -EPROTO);
                ix.promise_off ^= 4096;
                ck_assert_int_eq(kvd_index_validate(&ix, ix.size), -EPROTO);
        }
}
END_TEST

START_TEST(impossible_geometries_are_refused) {
        struct kvd_shape good = {.layers = 4,
                                 .kv_heads = 2,
                                 .head_dim = 64,
                                 .dtype = KVD_dtype_f16,
                                 .vocab = 9};
        const char *why;

#define BAD(field, value) \
        do { \
                struct kvd_shape g = good; \
                g.field = value; \
                ck_assert_int_eq(kvd_shape_normalise(&g, &why), -EINVAL); \
                ck_assert_ptr_nonnull(strstr(why, #field)); \
        } while (0)
        BAD(layers, 0);
        BAD(kv_heads, 70000);
        BAD(head_dim, 0);
        BAD(block_tokens, 257);
        BAD(layer_groups, 3);
        BAD(dtype, 9);
        BAD(order, 3);
        BAD(rope, 4);
        BAD(state_width, 1 << 21);
        BAD(vocab, 0);
        good.dtype = KVD_dtype_q4;
        BAD(head_dim, 63);
        BAD(state_width, 64);
        good.dtype = KVD_dtype_q8;
        BAD(head_dim, 65);
        BAD(state_width, 2);
#undef BAD
}
END_TEST

/* By the text of ipc/base/format.h, for a plane of 10 rows. */
START_TEST(blocks_have_room_for_scales) {
        static const struct {
                uint32_t dtype, dim, row;
        } rows[] = {{KVD_dtype_f32, 64, 256}, {KVD_dtype_f16, 64, 128}, {KVD_dtype_bf16, 7, 14},
                    {KVD_dtype_i8, 64, 64},   {KVD_dtype_q8, 64, 68},   {KVD_dtype_q8, 128, 136},
                    {KVD_dtype_q8, 2, 6},     {KVD_dtype_q8, 66, 74},   {KVD_dtype_q4, 64, 36},
                    {KVD_dtype_q4, 128, 72},  {KVD_dtype_q4, 2, 5},     {KVD_dtype_q4, 80, 48},
                    {KVD_dtype_e4m3, 33, 33}, {KVD_dtype_e5m2, 64, 64}};

        for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
                struct kvd_shape g = {.layers = 3,
                                      .kv_heads = 2,
                                      .head_dim = rows[i].dim,
                                      .block_tokens = 5,
                                      .dtype = rows[i].dtype,
                                      .vocab = 9};
                const char *why;

                ck_assert_int_eq(kvd_shape_normalise(&g, &why), 0);
                ck_assert_uint_eq(kvd_shape_bytes(&g), ALIGN_UP(3 * 2 * 10 * rows[i].row, 64));
        }
}
END_TEST

/* The rows of copies are behind those of blocks. */
START_TEST(a_place_has_a_row) {
        static const struct kvd_index ix = {.capacity = 10, .n_places = 7};

        ck_assert_uint_eq(kvd_places(&ix), 7);
        for (uint32_t place = 0; place < 7; place++)
                ck_assert_uint_eq(kvd_copy_row(&ix, place), 10 + place);
}
END_TEST

/* In shared memory, the value that MIN and MAX compare must be the one that they return. */
START_TEST(bounds_are_asked_once) {
        uint32_t asked = 0;

        ck_assert_uint_eq(MIN(++asked, 5u), 1);
        ck_assert_uint_eq(MAX(0u, MIN(5u, ++asked)), 2);
        ck_assert_uint_eq(asked, 2);
        ck_assert_int_eq(MAX(MIN(-3, 4), MAX(-7, -5)), -3);
}
END_TEST

/* Three slots per entry, but never more than 2^31: the number must fit in a word. */
START_TEST(a_table_has_so_many_slots_at_most) {
        uint32_t most = UINT32_C(1) << 31;

        ck_assert_uint_eq(kvd_table_slots(1), 64);
        ck_assert_uint_eq(kvd_table_slots(1000), 3000);
        ck_assert_uint_eq(kvd_table_slots(most / 4 * 3), most);
        ck_assert_uint_eq(kvd_table_slots(most), most);
        ck_assert_uint_eq(kvd_table_slots(UINT64_C(1) << 33), most);
}
END_TEST

SUITE("base",
      TESTS(hash_variants_are_equal, bounds_are_asked_once, tokens_without_a_bound_are_not_packed),
      LOOPS(9, packed_tokens_are_all_there_and_no_others),
      WHEN(KVD_HASH_BITS == 128,
           TESTS(paper_keys_are_xxh64_of_the_ids, paper_keys_match_known_vectors,
                 keys_depend_on_all_that_they_should)),
      TESTS(every_changed_header_field_is_refused, shards_must_add_up,
            impossible_geometries_are_refused, blocks_have_room_for_scales, a_place_has_a_row,
            a_table_has_so_many_slots_at_most))
