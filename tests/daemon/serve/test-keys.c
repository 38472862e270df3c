/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Salts, opaque blocks and keys, through libkvd: a lookup finds the blocks that were sealed under
 * exactly that name, or nothing.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/kvd.h"
#include "client/kvd_cuda.h"
#include "client/kvd_methods.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define BT 4u
#define BYTES 256u /* of an opaque block */

/* Tests use fewer than 256 blocks, which are found even with 8-bit keys, where many collide. */

static struct instance in;
static struct peer_end *peer;
static kvd *handle;

static void setup(void) {
        instance_start(&in, (const char *const[]){"daemon.pool=4M", NULL});
        peer = peer_attach(in.socket);
        ck_assert_int_eq(kvd_open(in.socket, &handle), 0);
}

static void teardown(void) {
        handle = kvd_close(handle);
        peer_close(peer);
        instance_end(&in);
}

static void check_clean(const char *space) {
        struct kvd_msg r = {.check_reply.next = 0};

        do {
                r = peer_ok(peer, (struct kvd_msg){.number = KVD_MSG_check,
                                                   .check = {.space = kvd_slice_of(space),
                                                             .cursor = r.check_reply.next}});
                ck_assert_msg(r.check_reply.broken == 0, "%.*s", (int)r.check_reply.first.size,
                              (const char *)r.check_reply.first.data);
        } while (r.check_reply.next);
}

#define PLANES \
        { \
                .layers = 1, .kv_heads = 1, .head_dim = 8, .block_tokens = BT, .dtype = KVD_F32, \
                .vocab = 1000 \
        }
#define OPAQUE(tokens) \
        { .block_tokens = tokens, .block_bytes = BYTES, .layout = "test.v1" }

static kvd_space *open_space(const char *name, const struct kvd_geometry *g, uint32_t kind) {
        const struct kvd_space_options options = {.kind = kind};
        kvd_space *space;

        ck_assert_msg(kvd_space_open(handle, name, g, &options, &space) == 0, "%s", kvd_error());
        return space;
}

/* ---- salts ----------------------------------------------------------------------------------- */

#define CHAIN 40u /* blocks: more than two runs */

static uint64_t salt_of(uint32_t i) {
        return i == 0 ? 0 : i == 1 ? UINT64_MAX : i % 2 ? i : (uint64_t)i << 32;
}

static void seal_salted(kvd_space *space, uint64_t salt, const uint32_t *tokens, uint32_t *ids) {
        struct kvd_block blocks[CHAIN];
        struct kvd_pin pin = {.salt = salt};

        for (uint32_t i = 0; i < CHAIN; i++)
                ck_assert_int_eq(kvd_alloc(space, 1, blocks + i), 1);
        ck_assert_int_eq(kvd_seal(space, &pin, CHAIN / 2, blocks, tokens, CHAIN / 2 * BT),
                         CHAIN / 2);
        ck_assert_int_eq(kvd_seal(space, &pin, CHAIN / 2, blocks + CHAIN / 2,
                                  tokens + CHAIN / 2 * BT, CHAIN / 2 * BT),
                         CHAIN / 2);
        for (uint32_t i = 0; i < CHAIN; i++)
                ids[i] = blocks[i].id;
        kvd_unpin(space, &pin);
        ck_assert(!pin.view && !pin.salt && !pin.n_tokens);
}

START_TEST(chains_of_different_salts_never_share) {
        static const struct kvd_geometry g = PLANES;
        enum { SALTS = 6 };
        uint32_t tokens[CHAIN * BT], sealed[SALTS][CHAIN], ids[CHAIN];
        kvd_space *space = open_space("s", &g, 0);
        bool taken[4096] = {0};

        for (uint32_t i = 0; i < CHAIN * BT; i++)
                tokens[i] = i * 7 % 1000;
        for (uint32_t i = 0; i < SALTS; i++) {
                struct kvd_pin pin = {.salt = salt_of(i)};

                ck_assert_int_eq(kvd_lookup(space, 0, tokens, CHAIN * BT, ids, CHAIN, &pin), 0);
                ck_assert_int_eq(kvd_match_salted(space, 0, salt_of(i), tokens, CHAIN * BT), 0);
                seal_salted(space, salt_of(i), tokens, sealed[i]);
                for (uint32_t b = 0; b < CHAIN; b++) {
                        ck_assert_uint_lt(sealed[i][b], 4096);
                        ck_assert(!taken[sealed[i][b]]);
                        taken[sealed[i][b]] = true;
                }
        }
        for (uint32_t i = 0; i < SALTS; i++) {
                struct kvd_pin pin = {.salt = salt_of(i)};

                ck_assert_int_eq(kvd_match_salted(space, 0, salt_of(i), tokens, CHAIN * BT),
                                 CHAIN * BT);
                ck_assert_int_eq(kvd_lookup(space, 0, tokens, CHAIN * BT, ids, CHAIN, &pin),
                                 CHAIN * BT);
                ck_assert_mem_eq(ids, sealed[i], sizeof ids);
                kvd_unpin(space, &pin);
        }
        seal_salted(space, salt_of(3), tokens, ids); /* sealing them again finds the same blocks */
        ck_assert_mem_eq(ids, sealed[3], sizeof ids);
        check_clean("s");
        kvd_space_close(space);
}
END_TEST

START_TEST(a_chain_keeps_its_salt) {
        static const struct kvd_geometry g = PLANES;
        uint32_t tokens[2 * BT] = {1, 2, 3, 4, 5, 6, 7, 8};
        kvd_space *space = open_space("s", &g, 0), *whole = open_space("w", &g, KVD_BIDIRECTIONAL);
        struct kvd_pin pin = {.salt = 5};
        struct kvd_block blocks[2];

        for (uint32_t i = 0; i < 2; i++)
                ck_assert_int_eq(kvd_alloc(space, 1, blocks + i), 1);
        ck_assert_int_eq(kvd_seal(space, &pin, 1, blocks, tokens, BT), 1);
        pin.salt = 6; /* would continue a chain of salt 5 */
        ck_assert_int_eq(kvd_seal(space, &pin, 1, blocks + 1, tokens + BT, BT), -EINVAL);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "salt"));
        kvd_free(space, 1, blocks + 1);
        kvd_unpin(space, &pin);

        pin.salt = 1;
        ck_assert_int_eq(kvd_lookup(whole, 0, tokens, BT, (uint32_t[1]){0}, 1, &pin), -EINVAL);
        ck_assert_int_eq(kvd_match_salted(whole, 0, 1, tokens, BT), -EINVAL);
        ck_assert_int_eq(kvd_alloc(whole, 1, blocks), 1);
        ck_assert_int_eq(kvd_seal(whole, &pin, 1, blocks, tokens, BT), -EINVAL);
        kvd_free(whole, 1, blocks);
        kvd_space_close(whole);
        kvd_space_close(space);
}
END_TEST

/* ---- whole prefixes -------------------------------------------------------------------------- */

static void seal_whole(kvd_space *space, const uint32_t *tokens, uint8_t fill) {
        struct kvd_block blocks[CHAIN];
        struct kvd_pin pin = {0};

        for (uint32_t i = 0; i < CHAIN; i++) {
                ck_assert_int_eq(kvd_alloc(space, 1, blocks + i), 1);
                memset(blocks[i].data, fill, kvd_block_bytes(&(struct kvd_geometry)PLANES));
        }
        ck_assert_int_eq(kvd_seal(space, &pin, CHAIN, blocks, tokens, CHAIN * BT), CHAIN);
        kvd_unpin(space, &pin);
}

/* Returns the byte that the prefix's blocks are filled with, or -1 if it is not found. */
static int find_whole(kvd_space *space, const uint32_t *tokens) {
        struct kvd_pin pin = {0};
        uint32_t ids[CHAIN];
        int64_t n = kvd_lookup(space, 0, tokens, CHAIN * BT, ids, CHAIN, &pin);
        int fill = n ? *kvd_pin_block(&pin, ids[0]) : -1;

        ck_assert(n == 0 || n == CHAIN * BT);
        for (uint32_t i = 0; i < n / BT; i++)
                ck_assert_int_eq(*kvd_pin_block(&pin, ids[i]), fill);
        kvd_unpin(space, &pin);
        return fill;
}

/* The remains of a prefix that had lost its end used to hide the new prefix. */
START_TEST(a_prefix_that_was_made_again_is_found) {
        static const struct kvd_geometry g = PLANES;
        kvd_space *space = open_space("w", &g, KVD_BIDIRECTIONAL);
        const struct kvd_msg evict_one = {.number = KVD_MSG_evict,
                                          .evict = {.space = kvd_slice_of("w"), .blocks = 1}};
        uint32_t tokens[CHAIN * BT];

        for (uint32_t i = 0; i < CHAIN * BT; i++)
                tokens[i] = i * 7 % 1000;
        for (uint8_t round = 1; round < 4; round++) {
                seal_whole(space, tokens, round);
                ck_assert_int_eq(find_whole(space, tokens), round);
                check_clean("w");
                peer_ok(peer, evict_one); /* remains are evicted first */
                peer_ok(peer, evict_one);
                ck_assert_int_eq(find_whole(space, tokens), round == 1 ? -1 : round);
                while (find_whole(space, tokens) >= 0)
                        peer_ok(peer, evict_one);
        }
        kvd_space_close(space);
}
END_TEST

/* ---- keys ------------------------------------------------------------------------------------ */

static uint32_t key_bytes_of(const struct kvd_geometry *g) {
        return 4 * (g->block_tokens < 8 ? g->block_tokens : 8);
}

/* Keys contain words of all ones or zeros. Different keys differ in the last byte, too. */
static void make_key(uint32_t i, uint8_t *key, uint32_t bytes) {
        memset(key, i % 3 ? 0xff : 0, bytes);
        memcpy(key + 8, &i, sizeof i);
        key[bytes - 1] = (uint8_t)i;
}

static void fill_object(kvd_space *space, uint32_t n, uint8_t fill, struct kvd_block *blocks) {
        for (uint32_t i = 0; i < n; i++) {
                ck_assert_int_eq(kvd_alloc(space, 1, blocks + i), 1);
                memset(blocks[i].data, fill + (int)i, BYTES);
        }
}

static void seal_salted_object(kvd_space *space, uint64_t salt, const uint8_t *key, uint32_t n,
                               uint8_t fill, uint32_t *ids) {
        struct kvd_block blocks[20];
        struct kvd_pin pin = {.salt = salt};

        fill_object(space, n, fill, blocks);
        ck_assert_msg(kvd_seal_key(space, key, n, blocks, &pin) == (int)n, "%s", kvd_error());
        for (uint32_t i = 0; i < n; i++)
                ids[i] = blocks[i].id;
        ck_assert_uint_eq(pin.n_blocks, n);
        ck_assert_uint_eq(pin.salt, salt);
        kvd_unpin(space, &pin);
}

static void seal_object(kvd_space *space, const uint8_t *key, uint32_t n, uint8_t fill,
                        uint32_t *ids) {
        seal_salted_object(space, 0, key, n, fill, ids);
}

/* Returns the byte that the object's blocks are filled with, or -1 if it is not found. */
static int find_object(kvd_space *space, uint64_t salt, const uint8_t *key, uint32_t n) {
        struct kvd_pin pin = {.salt = salt};
        uint32_t ids[20];
        int fill = -1;

        kvd_catch_up(space); /* maps what another process has made the pool grow by */
        if (kvd_lookup_keys(space, key, 1, n, ids, &pin) == 1)
                fill = *kvd_pin_block(&pin, ids[0]);
        for (uint32_t i = 0; fill >= 0 && i < n; i++)
                ck_assert_uint_eq(kvd_pin_block(&pin, ids[i])[BYTES - 1], (uint8_t)(fill + (int)i));
        kvd_unpin(space, &pin);
        return fill;
}

static const struct kvd_geometry keyed[] =
        {OPAQUE(4),
         OPAQUE(5),
         OPAQUE(6),
         OPAQUE(7),
         OPAQUE(8),
         OPAQUE(9),
         OPAQUE(16),
         OPAQUE(256),
         OPAQUE(4096),
         {.block_tokens = 4, .block_bytes = BYTES, .layout = "test.v1", .vocab = 10},
         {.block_tokens = 32, .block_bytes = BYTES, .layout = "test.v1", .vocab = 70000}};
#define KEYED (sizeof keyed / sizeof *keyed)

START_TEST(keys_find_their_objects) {
        const struct kvd_geometry g = keyed[_i];
        enum { KEYS = 14 };
        uint32_t key_bytes = key_bytes_of(&g), n = _i % 5 == 4 ? 17 : 1 + (uint32_t)_i,
                 sealed[KEYS][20];
        kvd_space *space = open_space("keys", &g, 0);
        uint32_t blocks[(KEYS + 1) * 20];
        uint8_t keys[(KEYS + 1) * 32];
        struct kvd_pin pins[KEYS + 1] = {{0}};

        for (uint32_t i = 0; i <= KEYS; i++)
                make_key(i, keys + i * key_bytes, key_bytes);
        ck_assert_int_eq(kvd_lookup_keys(space, keys, KEYS + 1, n, blocks, pins), 0);
        for (uint32_t i = 0; i < KEYS; i++)
                seal_object(space, keys + i * key_bytes, n, (uint8_t)i, sealed[i]);
        ck_assert_int_eq(kvd_lookup_keys(space, keys, KEYS + 1, n, blocks, pins), KEYS);
        ck_assert(!pins[KEYS].view && pins[KEYS].n_blocks == 0);
        for (uint32_t i = 0; i < KEYS; i++) {
                ck_assert_uint_eq(pins[i].n_blocks, n);
                ck_assert_mem_eq(blocks + i * n, sealed[i], n * sizeof *blocks);
                for (uint32_t b = 0; b < n; b++)
                        ck_assert_uint_eq(kvd_pin_block(&pins[i], blocks[i * n + b])[BYTES - 1],
                                          (uint8_t)(i + b));
                kvd_unpin(space, &pins[i]);
        }
        check_clean("keys");
        kvd_space_close(space);
}
END_TEST

START_TEST(an_object_is_found_whole_or_not) {
        static const struct kvd_geometry g = OPAQUE(8);
        kvd_space *space = open_space("keys", &g, 0);
        struct kvd_pin pin = {0};
        uint32_t ids[20], blocks[20];
        uint8_t key[32];

        make_key(1, key, sizeof key);
        seal_object(space, key, 18, 0, ids);
        ck_assert_int_eq(kvd_lookup_keys(space, key, 1, 18, blocks, &pin), 1);
        /* the pin is in use */
        ck_assert_int_eq(kvd_lookup_keys(space, key, 1, 18, blocks, &pin), -EINVAL);
        kvd_unpin(space, &pin);
        ck_assert_int_eq(kvd_lookup_keys(space, key, 1, 19, blocks, &pin), 0);
        peer_ok(peer, (struct kvd_msg){.number = KVD_MSG_evict,
                                       .evict = {.space = kvd_slice_of("keys"),
                                                 .blocks = 1}}); /* its last block */
        ck_assert_int_eq(kvd_lookup_keys(space, key, 1, 18, blocks, &pin), 0);
        ck_assert_ptr_null(pin.view);
        seal_object(space, key, 18, 0, blocks); /* adds only the missing block */
        ck_assert_mem_eq(ids, blocks, 17 * sizeof *ids);
        ck_assert_int_eq(kvd_lookup_keys(space, key, 1, 18, blocks, &pin), 1);
        kvd_unpin(space, &pin);
        check_clean("keys");
        kvd_space_close(space);
}
END_TEST

START_TEST(keys_need_a_space_for_them) {
        static const struct kvd_geometry geometries[] = {PLANES, OPAQUE(3), OPAQUE(8)};
        uint32_t blocks[1];
        uint8_t key[64] = {0};
        char name[8];

        for (uint32_t i = 0; i < 3; i++) {
                kvd_space *space;
                struct kvd_pin pin = {0};
                struct kvd_block block = {0};
                int fd;

                snprintf(name, sizeof name, "s%u", i);
                space = open_space(name, &geometries[i], i == 2 ? KVD_BIDIRECTIONAL : 0);
                ck_assert_int_eq(kvd_lookup_keys(space, key, 1, 1, blocks, &pin), -EINVAL);
                ck_assert_ptr_nonnull(strstr(kvd_error(), "block_tokens of 4 or more"));
                ck_assert_int_eq(kvd_fetch_key(space, 0, key, 1, &fd), -EINVAL);
                ck_assert_int_eq(kvd_seal_key(space, key, 1, &block, &pin), -EINVAL);
                ck_assert_int_eq(kvd_post_key(space, 0, key, 1, &block), -EINVAL);
                kvd_space_close(space);
        }
}
END_TEST

/* ---- objects beside chains ------------------------------------------------------------------- */

#define WORDS 8u /* of a key where blocks have 8 tokens or more */

static void seal_tokens(kvd_space *space, uint64_t salt, const uint32_t *tokens, uint32_t n,
                        uint32_t n_blocks) {
        struct kvd_pin pin = {.salt = salt};
        struct kvd_block blocks[4];

        fill_object(space, n_blocks, 100, blocks);
        ck_assert_int_eq(kvd_seal(space, &pin, n_blocks, blocks, tokens, n), n_blocks);
        kvd_unpin(space, &pin);
}

/*
 * The planted tokens are the words of the key: a full block of them, repeated as an object repeats
 * them, and a part-filled block. Both are there under the same salt.
 */
START_TEST(an_object_is_never_a_chain_of_its_words) {
        static const struct kvd_geometry g[] = {OPAQUE(8), OPAQUE(16)};
        kvd_space *space = open_space("keys", &g[_i], 0);
        uint32_t words[4 * WORDS], ids[4], n_blocks = _i ? 1 : 3, n = n_blocks * WORDS;
        uint8_t key[32];

        make_key(4, key, sizeof key);
        for (uint32_t i = 0; i < 4; i++)
                memcpy(words + i * WORDS, key, sizeof key);
        seal_tokens(space, 7, words, n, n_blocks);
        ck_assert_int_eq(kvd_match_salted(space, 0, 7, words, n), n);
        for (uint32_t i = 1; i <= 3; i++)
                ck_assert_int_eq(find_object(space, 7, key, i), -1);
        make_key(5, key, sizeof key);
        for (uint32_t i = 0; i < 4; i++)
                memcpy(words + i * WORDS, key, sizeof key);
        seal_salted_object(space, 7, key, 3, 1, ids);
        ck_assert_int_eq(kvd_match_salted(space, 0, 7, words, 3 * WORDS), 0);
        ck_assert_int_eq(kvd_match_salted(space, 0, 7, words, WORDS), 0);
        seal_tokens(space, 7, words, n, n_blocks);
        ck_assert_int_eq(kvd_match_salted(space, 0, 7, words, n), n);
        ck_assert_int_eq(find_object(space, 7, key, 3), 1);
        check_clean("keys");
        kvd_space_close(space);
}
END_TEST

START_TEST(objects_of_other_salts_are_others) {
        static const struct kvd_geometry g = OPAQUE(16);
        kvd_space *space = open_space("keys", &g, 0);
        uint8_t key[32];
        uint32_t ids[4];

        make_key(1, key, sizeof key);
        for (uint8_t salt = 0; salt < 4; salt++) {
                ck_assert_int_eq(find_object(space, salt, key, 2), -1);
                seal_salted_object(space, salt, key, 2, (uint8_t)(10 * salt), ids);
        }
        for (uint8_t salt = 0; salt < 4; salt++)
                ck_assert_int_eq(find_object(space, salt, key, 2), 10 * salt);
        check_clean("keys");
        kvd_space_close(space);
}
END_TEST

/* A chain of tokens behind an object, and an object behind a chain, would be neither. */
START_TEST(tokens_do_not_follow_an_object) {
        static const struct kvd_geometry g = OPAQUE(8);
        kvd_space *space = open_space("keys", &g, 0);
        uint32_t ids[1], words[WORDS] = {0};
        struct kvd_pin pin = {0};
        struct kvd_block block;
        uint8_t key[32];
        int fd;

        make_key(1, key, sizeof key);
        seal_object(space, key, 1, 0, ids);
        ck_assert_int_eq(kvd_lookup_keys(space, key, 1, 1, ids, &pin), 1);
        fill_object(space, 1, 9, &block);
        ck_assert_int_eq(kvd_seal(space, &pin, 1, &block, words, WORDS), -EINVAL);
        ck_assert_int_eq(kvd_post(space, &pin, 1, &block, words, WORDS), -EINVAL);
        ck_assert_int_eq(kvd_seal_key(space, key, 1, &block, &pin), -EINVAL);
        kvd_unpin(space, &pin);
        pin.group = 65535;
        ck_assert_int_eq(kvd_seal(space, &pin, 1, &block, words, WORDS), -EINVAL);
        ck_assert_int_eq(kvd_lookup(space, 65535, words, WORDS, ids, 1, &pin), -EINVAL);
        ck_assert_int_eq(kvd_fetch(space, 65535, 0, words, WORDS, &fd), -EINVAL);
        kvd_free(space, 1, &block);
        check_clean("keys");
        kvd_space_close(space);
}
END_TEST

/* A poster keeps its own blocks, whether or not another one was first. */
START_TEST(a_posted_object_is_found) {
        static const struct kvd_geometry g = OPAQUE(32);
        kvd_space *space = open_space("keys", &g, 0);
        struct kvd_block blocks[2][3];
        uint8_t key[32];

        make_key(1, key, sizeof key);
        for (uint32_t i = 0; i < 2; i++) {
                fill_object(space, 3, (uint8_t)(20 + i), blocks[i]);
                ck_assert_msg(kvd_post_key(space, 5, key, 3, blocks[i]) == 3, "%s", kvd_error());
                ck_assert_int_eq(kvd_flush(space), 0);
                ck_assert_int_eq(find_object(space, 5, key, 3), 20);
                ck_assert_int_eq(blocks[i][2].data[0], 22 + (int)i);
        }
        ck_assert_int_eq(kvd_post_key(space, 5, key, 3, blocks[0]), -ESTALE); /* posted already */
        kvd_free(space, 3, blocks[0]);
        kvd_free(space, 3, blocks[1]);
        ck_assert_int_eq(find_object(space, 5, key, 3), 20);
        ck_assert_int_eq(find_object(space, 0, key, 3), -1);
        check_clean("keys");
        kvd_space_close(space);
}
END_TEST

/* A producer posts the first n blocks of an object of three, and is killed. */
static void die_after(uint32_t n, const struct kvd_geometry *g, const uint8_t *key) {
        struct kvd_block blocks[3];
        kvd *own;
        kvd_space *space;

        if (kvd_open(in.socket, &own) < 0 || kvd_space_open(own, "keys", g, NULL, &space) < 0 ||
            kvd_alloc(space, 3, blocks) != 3)
                die("%s", kvd_error());
        for (uint32_t i = 0; i < 3; i++)
                memset(blocks[i].data, 1 + (int)i, BYTES);
        if (n && kvd_post_key(space, 0, key, n, blocks) != (int)n)
                die("%s", kvd_error());
        kill(getpid(), SIGKILL);
}

START_TEST(an_object_whose_producer_was_killed_halfway_is_not_found) {
        static const struct kvd_geometry g = OPAQUE(16);
        kvd_space *space = open_space("keys", &g, 0);
        uint32_t ids[3], n = (uint32_t)_i;
        uint8_t key[32];
        pid_t pid;

        make_key(1, key, sizeof key);
        pid = fork();
        if (pid == 0)
                die_after(n, &g, key);
        ck_assert_int_eq(wait_status(pid), 128 + SIGKILL);
        WAIT_UNTIL(find_object(space, 0, key, n ? n : 1) == (n ? 1 : -1));
        ck_assert_int_eq(find_object(space, 0, key, 3), -1);
        seal_object(space, key, 3, 1, ids); /* whole, by somebody else */
        ck_assert_int_eq(find_object(space, 0, key, 3), 1);
        check_clean("keys");
        kvd_space_close(space);
}
END_TEST

/* ---- opaque blocks --------------------------------------------------------------------------- */

static struct kvd_msg set_policy(const char *policy) {
        return (struct kvd_msg){.number = KVD_MSG_space_set,
                                .space_set = {.space = kvd_slice_of("o"),
                                              .key = kvd_slice_of("policy"),
                                              .value = kvd_slice_of(policy)}};
}

START_TEST(an_opaque_space_refuses_the_methods) {
        static const struct kvd_geometry g = OPAQUE(16);
        static const struct kvd_space_options priority = {.policy = KVD_PRIORITY};
        static const char *const settings[] = {"memshare",    "keydiff.budget", "kvreviver",
                                               "bicache.tau", "hshare",         NULL};
        kvd_space *space = open_space("o", &g, 0), *other;
        struct kvd_layer_view view;
        kvd_sequence *sequence;

        for (uint32_t i = 0; settings[i]; i++) {
                ck_assert_int_eq(kvd_space_set(space, settings[i], 1), -EOPNOTSUPP);
                ck_assert_msg(strstr(kvd_error(), "opaque") && strstr(kvd_error(), "test.v1"), "%s",
                              kvd_error());
        }
        peer_refused(peer, set_policy("priority"), -EOPNOTSUPP);
        peer_ok(peer, set_policy("fifo"));
        ck_assert_int_eq(kvd_sequence_open(space, 8, &sequence), -EOPNOTSUPP);
        ck_assert_int_eq(kvd_layer_view(space, 0, &view), -EINVAL);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "opaque"));
        ck_assert_int_eq(kvd_space_open(handle, "p", &g, &priority, &other), -EOPNOTSUPP);
        kvd_space_close(space);
}
END_TEST

/* If vocab is 0, any 32-bit word is a token. Blocks have the requested size. */
START_TEST(an_opaque_space_is_a_space) {
        static const struct kvd_geometry g = OPAQUE(BT);
        uint32_t tokens[2 * BT] = {UINT32_MAX, 0, UINT32_MAX - 1, 7, 8, UINT32_MAX}, ids[2];
        kvd_space *space = open_space("o", &g, 0);
        struct kvd_block blocks[2];
        struct kvd_pin pin = {0};

        for (uint32_t i = 0; i < 2; i++) {
                ck_assert_int_eq(kvd_alloc(space, 1, blocks + i), 1);
                memset(blocks[i].data, (int)i + 1, BYTES);
        }
        ck_assert_int_eq(kvd_seal(space, &pin, 2, blocks, tokens, 6), 2);
        ck_assert_uint_eq(pin.block_bytes, BYTES);
        kvd_unpin(space, &pin);
        ck_assert_int_eq(kvd_lookup(space, 0, tokens, 6, ids, 2, &pin), 6);
        for (uint32_t i = 0; i < 2; i++)
                ck_assert_uint_eq(kvd_pin_block(&pin, ids[i])[BYTES - 1], i + 1);
        kvd_unpin(space, &pin);
        check_clean("o");
        kvd_space_close(space);
}
END_TEST

START_TEST(another_opaque_geometry_is_refused_by_name) {
        static const struct kvd_geometry good = OPAQUE(8), planes = PLANES;
        static const struct {
                struct kvd_geometry g;
                const char *field;
        } others[] = {
                {{.block_tokens = 8, .block_bytes = 512, .layout = "test.v1"}, "block_bytes"},
                {{.block_tokens = 8, .block_bytes = BYTES, .layout = "test.v2"}, "layout"},
                {{.block_tokens = 8, .block_bytes = BYTES, .layout = "test.v1", .vocab = 9},
                 "vocab"},
                {{.block_tokens = 4, .block_bytes = BYTES, .layout = "test.v1"}, "block_tokens"},
                {{.block_tokens = 8, .block_bytes = BYTES, .layout = "test.v1", .fingerprint = {1}},
                 "fingerprint"},
                {PLANES, "block_bytes"},
        };
        kvd_space *space = open_space("o", &good, 0), *other;

        for (uint32_t i = 0; i < sizeof others / sizeof *others; i++) {
                ck_assert_int_eq(kvd_space_open(handle, "o", &others[i].g, NULL, &other), -EEXIST);
                ck_assert_msg(strstr(kvd_error(), others[i].field), "%s", kvd_error());
        }
        kvd_space_close(space);
        space = open_space("planes", &planes, 0);
        ck_assert_int_eq(kvd_space_open(handle, "planes", &good, NULL, &other), -EEXIST);
        kvd_space_close(space);
}
END_TEST

/* ---- sizes of blocks ------------------------------------------------------------------------- */

#define MANY 20u /* blocks; more than the ring of posts has room for if they have 4,096 tokens */

/* Seals two blocks, and posts the others. */
static void publish_many(kvd_space *space, uint32_t bt, const uint32_t *tokens) {
        struct kvd_block blocks[MANY];
        struct kvd_pin pin = {0};
        uint32_t done = 2;

        for (uint32_t i = 0; i < MANY; i++)
                fill_object(space, 1, (uint8_t)i, &blocks[i]);
        ck_assert_int_eq(kvd_seal(space, &pin, 2, blocks, tokens, 2 * bt), 2);
        while (done < MANY) {
                int r = kvd_post(space, &pin, MANY - done, blocks + done, tokens + done * bt,
                                 (MANY - done) * bt);

                ck_assert_msg(r > 0, "%s", kvd_error());
                done += (uint32_t)r;
        }
        ck_assert_int_eq(kvd_flush(space), 0);
        kvd_free(space, MANY - 2, blocks + 2);
        kvd_unpin(space, &pin);
}

/* The first and the last token of each block decide. */
static void compare_many(kvd_space *space, uint32_t bt, uint32_t *tokens) {
        uint32_t ids[MANY];
        struct kvd_pin pin = {0};

        ck_assert_int_eq(kvd_lookup(space, 0, tokens, MANY * bt, ids, MANY, &pin), MANY * bt);
        for (uint32_t i = 0; i < MANY; i++)
                ck_assert_uint_eq(kvd_pin_block(&pin, ids[i])[BYTES - 1], i);
        kvd_unpin(space, &pin);
        for (uint32_t i = 0; i < 2 * MANY; i++) {
                uint32_t *token = tokens + i / 2 * bt + i % 2 * (bt - 1);

                *token ^= 1;
                ck_assert_int_eq(kvd_match(space, 0, tokens, MANY * bt), i / 2 * bt);
                *token ^= 1;
        }
        ck_assert_int_eq(kvd_match(space, 0, tokens, MANY * bt - 1), (MANY - 1) * bt);
}

START_TEST(blocks_of_any_size_are_compared_in_full) {
        static const uint32_t sizes[] = {1,   2,    15,   255,  256,  257,
                                         528, 1023, 1600, 2144, 4095, 4096};
        const struct kvd_geometry g = OPAQUE(sizes[_i]);
        static uint32_t tokens[MANY * 4096];
        kvd_space *space = open_space("sizes", &g, 0);

        for (uint32_t i = 0; i < MANY * sizes[_i]; i++)
                tokens[i] = i * 2654435761u;
        publish_many(space, sizes[_i], tokens);
        compare_many(space, sizes[_i], tokens);
        check_clean("sizes");
        kvd_space_close(space);
}
END_TEST

START_TEST(blocks_that_are_too_large_are_refused_in_words) {
        static const struct kvd_geometry opaque = OPAQUE(4097), planes = {.layers = 1,
                                                                          .kv_heads = 1,
                                                                          .head_dim = 8,
                                                                          .block_tokens = 257,
                                                                          .dtype = KVD_F32,
                                                                          .vocab = 1000};
        kvd_space *space;

        ck_assert_int_eq(kvd_space_open(handle, "s", &opaque, NULL, &space), -EINVAL);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "1 to 4096"));
        ck_assert_int_eq(kvd_space_open(handle, "s", &planes, NULL, &space), -EINVAL);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "1 to 256"));
        ck_assert_uint_eq(kvd_block_bytes(&opaque), 0);
        ck_assert_uint_eq(kvd_block_bytes(&planes), 0);
}
END_TEST

/* ---- arguments ------------------------------------------------------------------------------- */

START_TEST(wrong_arguments_are_refused_in_words) {
        static const struct kvd_geometry g = PLANES;
        static const struct {
                struct kvd_space_options options;
                const char *says;
        } bad[] = {{{.flags = 4}, "flags"},   {{.flags = UINT32_MAX}, "flags"},
                   {{.policy = 7}, "policy"}, {{.kind = 3}, "kind"},
                   {{.keys = 3}, "keys"},     {{.max_blocks = UINT64_MAX}, "max_blocks"}};
        kvd_space *space;
        kvd *other;

        for (uint32_t i = 0; i < sizeof bad / sizeof *bad; i++) {
                ck_assert_int_eq(kvd_space_open(handle, "s", &g, &bad[i].options, &space), -EINVAL);
                ck_assert_msg(strstr(kvd_error(), bad[i].says), "%s", kvd_error());
        }
        ck_assert_int_eq(kvd_space_open(handle, NULL, &g, NULL, &space), -EINVAL);
        ck_assert_int_eq(kvd_space_open(handle, "s", NULL, NULL, &space), -EINVAL);
        ck_assert_int_eq(kvd_open(in.dir, &other), -ENOTSOCK);
        ck_assert_ptr_nonnull(strstr(kvd_error(), "folder"));
}
END_TEST

/* No chain contains unknown ids, but the blocks before them are found. */
START_TEST(a_token_beyond_the_vocabulary_is_not_found) {
        static const struct kvd_geometry g = PLANES;
        uint32_t tokens[2 * BT] = {1, 2, 3, 4, 1000, 1001, 1002, 1003};
        kvd_space *space = open_space("s", &g, 0);
        struct kvd_block block;
        struct kvd_pin pin = {0};

        ck_assert_int_eq(kvd_alloc(space, 1, &block), 1);
        ck_assert_int_eq(kvd_seal(space, &pin, 1, &block, tokens, BT), 1);
        kvd_unpin(space, &pin);
        ck_assert_int_eq(kvd_match(space, 0, tokens, 2 * BT), BT);
        kvd_space_close(space);
}
END_TEST

START_TEST(a_fingerprint_depends_on_every_part) {
        uint64_t a[2] = {0}, b[2] = {0}, c[2] = {0}, d[2] = {0}, none[2] = {0};

        kvd_fingerprint(a, "ab", 2);
        kvd_fingerprint(b, "a", 1);
        kvd_fingerprint(b, "b", 1);
        kvd_fingerprint(c, "b", 1);
        kvd_fingerprint(c, "a", 1);
        kvd_fingerprint(d, "a", 1);
        ck_assert_mem_ne(a, b, sizeof a);
        ck_assert_mem_ne(b, c, sizeof a);
        kvd_fingerprint(d, "b", 1);
        ck_assert_mem_eq(b, d, sizeof b);
        kvd_fingerprint(d, NULL, 0);
        ck_assert_mem_ne(b, d, sizeof b);
        kvd_fingerprint(none, NULL, 0);
        ck_assert(none[0] && none[1]);
}
END_TEST

SUITE("keys", FIXTURE(setup, teardown),
      TESTS(chains_of_different_salts_never_share, a_chain_keeps_its_salt,
            a_prefix_that_was_made_again_is_found),
      LOOPS(KEYED, keys_find_their_objects), LOOPS(2, an_object_is_never_a_chain_of_its_words),
      LOOPS(12, blocks_of_any_size_are_compared_in_full),
      LOOPS(3, an_object_whose_producer_was_killed_halfway_is_not_found),
      TESTS(an_object_is_found_whole_or_not, keys_need_a_space_for_them,
            objects_of_other_salts_are_others, tokens_do_not_follow_an_object,
            a_posted_object_is_found, blocks_that_are_too_large_are_refused_in_words,
            an_opaque_space_refuses_the_methods, an_opaque_space_is_a_space,
            another_opaque_geometry_is_refused_by_name, wrong_arguments_are_refused_in_words,
            a_token_beyond_the_vocabulary_is_not_found, a_fingerprint_depends_on_every_part))
