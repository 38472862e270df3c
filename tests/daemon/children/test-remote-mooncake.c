/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What is special about the remote tier on Mooncake Store: a library that is missing or too old,
 * its arguments, and all the ways in which its calls fail. The library is the stand-in.
 */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/daemon/children/remote_tier.h"
#include "tests/lib/mooncake.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

static void expect_why(const char *text) {
        struct kvd_msg_tier_info_reply t = tier(&machines[0]);
        char why[128];

        ck_assert_msg(strstr(kvd_slice_copy(t.why, why, sizeof why), text), "%s", why);
}

static void makes_a_chain(void) {
        make_chain(&machines[0], tokens);
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
}

/* Servers that are away get no requests, and all else works. */
static void works_without(void) {
        ck_assert(!fetch(&machines[0]));
        makes_a_chain();
}

/* ---- the library ----------------------------------------------------------------------------- */

START_TEST(there_is_no_library) {
        static const char *const paths[] = {"", "/nonexistent/libmooncake_store.so"};

        unsetenv("LD_LIBRARY_PATH"); /* by which meson makes the stand-in found */
        snprintf(library, sizeof library, "%s", paths[_i]);
        start_machine(&machines[0], "away");
        expect_why("Mooncake cannot be loaded: ");
        expect_why("libmooncake_store.so: cannot open");
        works_without();
}
END_TEST

START_TEST(a_call_is_missing) {
        snprintf(library, sizeof library, "%s", getenv("KVD_TEST_MOONCAKE_OLD"));
        start_machine(&machines[0], "away");
        expect_why("has no mooncake_store_batch_get_into");
        works_without();
}
END_TEST

static void expect_setup(const char *said) {
        start_machine(&machines[0], "on");
        ck_assert_str_eq(mooncake_setup(), said);
        stop_machine(&machines[0]);
}

START_TEST(arguments_of_the_library) {
        expect_setup("127.0.0.1 P2PHANDSHAKE 0 1 tcp '' 127.0.0.1:50051");
        more[0] = "daemon.remote_metadata=http://meta:8080/metadata";
        more[1] = "daemon.remote_devices=auto";
        expect_setup("127.0.0.1 http://meta:8080/metadata 0 1 rdma '' 127.0.0.1:50051");
        more[1] = "daemon.remote_devices=mlx5_0,mlx5_1";
        expect_setup(
                "127.0.0.1 http://meta:8080/metadata 0 1 rdma 'mlx5_0,mlx5_1' 127.0.0.1:50051");
        more[0] = "daemon.remote=mooncake://localhost";
        start_machine(&machines[0], "on");
        ck_assert_ptr_nonnull(strstr(mooncake_setup(), " localhost:50051"));
}
END_TEST

START_TEST(a_password_is_refused) {
        struct instance in;

        instance_make_dir(&in);
        instance_run(&in,
                     (const char *const[]){"--private", in.dir, "--pool", "4M", "--backend", "host",
                                           "--set", "daemon.remote=mooncake://127.0.0.1", "--set",
                                           "daemon.remote_password=/dev/null", NULL},
                     false);
        ck_assert_int_ne(wait_status(in.pid), 0);
        instance_sweep(&in);
}
END_TEST

/* ---- the store ------------------------------------------------------------------------------- */

/* No client waits for a master that is away. If it has lost its data, blocks are written again. */
START_TEST(the_master_dies_and_comes_back) {
        mooncake_fails("dead");
        start_machine(&machines[0], "away");
        expect_why("setup failed: -1");
        works_without();
        mooncake_fails("");
        WAIT_UNTIL(tier_is(&machines[0], "on"));
        WAIT_UNTIL(tier(&machines[0]).written_bytes >= BLOCKS * (uint64_t)BLOCK_BYTES);
        mooncake_fails("dead");
        WAIT_UNTIL(tier_is(&machines[0], "away"));
        expect_why("batch_is_exist returned -900");
        works_without();
        mooncake_forget();
        mooncake_fails("");
        WAIT_UNTIL(mooncake_calls("put") == 2 * BLOCKS);
        ck_assert_uint_eq(mooncake_calls("setup"), 1);
}
END_TEST

/* A process whose call does not return is replaced. */
START_TEST(a_call_never_returns) {
        pid_t pid;

        more[0] = "daemon.remote_timeout=100";
        start_machine(&machines[0], "on");
        WAIT_UNTIL((make_chain(&machines[0], tokens), mooncake_calls("put") == BLOCKS));
        evict_all(&machines[0]);
        pid = remote_process(&machines[0]);
        mooncake_fails("hang");
        WAIT_UNTIL(tier_is(&machines[0], "away"));
        WAIT_UNTIL(remote_process(&machines[0]) > 0 && remote_process(&machines[0]) != pid);
        works_without();
        evict_all(&machines[0]);
        mooncake_fails("");
        WAIT_UNTIL((fetch(&machines[0]), resident(&machines[0], tokens) == BLOCKS));
}
END_TEST

/* Blocks that are wrong, or may be because their lease has expired, are dropped. */
START_TEST(wrong_blocks_are_dropped) {
        static const struct {
                const char *how;
                uint64_t wrong;
        } ways[] = {{"flip", BLOCKS}, {"checksum", BLOCKS}, {"lease", 0}};

        start_machine(&machines[0], "on");
        write_chain(&machines[0]);
        evict_all(&machines[0]);
        mooncake_fails(ways[_i].how);
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), 0);
        ck_assert_uint_eq(tier(&machines[0]).wrong, ways[_i].wrong);
        ck_assert_uint_eq(tier(&machines[0]).misses, BLOCKS);
        ck_assert(tier_is(&machines[0], "on"));
        mooncake_fails("");
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
}
END_TEST

/* A process is replaced after a crash or a failed transfer, which may still write to its memory. */
START_TEST(the_process_is_replaced) {
        static const char *const ways[] = {"transfer", "crash"};
        pid_t pid;

        start_machine(&machines[0], "on");
        write_chain(&machines[0]);
        evict_all(&machines[0]);
        pid = remote_process(&machines[0]);
        mooncake_fails(ways[_i]);
        fetch(&machines[0]);
        ck_assert_uint_eq(resident(&machines[0], tokens), 0);
        WAIT_UNTIL(remote_process(&machines[0]) > 0 && remote_process(&machines[0]) != pid);
        makes_a_chain(); /* may already use the next process */
        evict_all(&machines[0]);
        mooncake_fails("");
        WAIT_UNTIL((fetch(&machines[0]), resident(&machines[0], tokens) == BLOCKS));
        ck_assert_uint_eq(tier(&machines[0]).wrong, 0);
}
END_TEST

/* Incomplete puts of a dead client used to count as written, though no client could finish them. */
START_TEST(another_client_died_in_the_middle) {
        start_machine(&machines[0], "on");
        mooncake_fails("begun");
        make_chain(&machines[0], tokens);
        WAIT_UNTIL(tier(&machines[0]).errors >= BLOCKS);
        ck_assert(tier_is(&machines[0], "on"));
        ck_assert_uint_eq(tier(&machines[0]).written_bytes, 0);
        mooncake_fails(""); /* the master has dropped them */
        WAIT_UNTIL(mooncake_calls("put") == BLOCKS);
}
END_TEST

START_TEST(a_call_fails_as_a_whole) {
        start_machine(&machines[0], "on");
        write_chain(&machines[0]);
        mooncake_fails("throws");
        WAIT_UNTIL(tier_is(&machines[0], "away"));
        expect_why("batch_is_exist failed: -1");
        mooncake_fails("");
        WAIT_UNTIL(tier_is(&machines[0], "on"));
}
END_TEST

START_TEST(a_slow_store_is_used) {
        mooncake_fails("slow");
        start_machine(&machines[0], "on");
        write_chain(&machines[0]);
        evict_all(&machines[0]);
        WAIT_UNTIL((fetch(&machines[0]), resident(&machines[0], tokens) == BLOCKS));
        ck_assert_uint_eq(tier(&machines[0]).wrong, 0);
}
END_TEST

/* ---- large blocks ---------------------------------------------------------------------------- */

#define LARGE (UINT64_C(20) << 20)

static const struct kvd_geometry large = {.layers = 40,
                                          .kv_heads = 64,
                                          .head_dim = 64,
                                          .block_tokens = BLOCK_TOKENS,
                                          .dtype = KVD_F32,
                                          .vocab = 1u << 20};

static void make_large(struct machine *m) {
        struct kvd_pin pin = {0};
        struct kvd_block block;

        ck_assert_msg(kvd_alloc(m->space, 1, &block) == 1, "%s", kvd_error());
        oracle_fill(block.data, LARGE, SEED);
        ck_assert_msg(kvd_seal(m->space, &pin, 1, &block, tokens, BLOCK_TOKENS) >= 0, "%s",
                      kvd_error());
        kvd_unpin(m->space, &pin);
}

static bool has_large(struct machine *m) {
        struct kvd_pin pin = {0};
        uint32_t id;
        int64_t n;

        fetch(m);
        kvd_catch_up(m->space);
        n = kvd_lookup(m->space, 0, tokens, BLOCK_TOKENS, &id, 1, &pin);
        if (n == BLOCK_TOKENS)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(&pin, id), LARGE, SEED), 0);
        kvd_unpin(m->space, &pin);
        return n == BLOCK_TOKENS;
}

/* The memory that is registered with the library becomes too small, and is replaced. */
START_TEST(a_record_is_larger_than_the_memory) {
        more[0] = "daemon.pool=128M";
        more[1] = "daemon.segment=32M";
        for (uint32_t i = 0; i < MACHINES; i++) {
                start_machine(&machines[i], "on");
                if (i == 0)
                        write_chain(&machines[0]);
                else
                        ck_assert(fetch(&machines[1]));
                machines[i].space = kvd_space_close(machines[i].space);
                open_space(&machines[i], "large", &large);
        }
        make_large(&machines[0]);
        WAIT_UNTIL(tier(&machines[0]).written_bytes >= LARGE);
        WAIT_UNTIL(has_large(&machines[1]));
        ck_assert_uint_eq(tier(&machines[1]).wrong, 0);
}
END_TEST

SUITE("remote-mooncake", SKIP_IF(!on_mooncake()), FIXTURE(start_a_server, stop_all),
      LOOPS(2, there_is_no_library),
      TESTS(a_call_is_missing, arguments_of_the_library, a_password_is_refused,
            the_master_dies_and_comes_back, a_call_never_returns),
      LOOPS(3, wrong_blocks_are_dropped), LOOPS(2, the_process_is_replaced),
      TESTS(another_client_died_in_the_middle, a_call_fails_as_a_whole, a_slow_store_is_used,
            a_record_is_larger_than_the_memory))
