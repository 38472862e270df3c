/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The cache outlives the daemon: after kvd was killed, blocks that a client published are found by
 * another, byte for byte, and readers still hold their blocks.
 */

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

#define BT 16u
#define CHAIN 8u /* blocks */

static const struct kvd_geometry geometry = {.layers = 2,
                                             .kv_heads = 2,
                                             .head_dim = 8,
                                             .block_tokens = BT,
                                             .dtype = KVD_F16,
                                             .vocab = 1 << 24};

static struct instance in;
static kvd *handle;
static kvd_space *space;

static void set_up(void) {
        static char pages[64];

        instance_make_dir(&in);
        setenv("TMPDIR", in.dir, 1);
        const char *pool = getenv("KVD_TEST_POOL") ?: "8M";

        snprintf(pages, sizeof pages, "daemon.pages=%s", getenv("KVD_TEST_PAGES") ?: "small");
        instance_run(&in,
                     (const char *const[]){"--keep", "--private", in.dir, "--pool", pool, "--set",
                                           "daemon.segment=256K", "--set", pages, "--backend",
                                           "host", NULL},
                     true);
}

static void open_space(void) {
        ck_assert_int_eq(kvd_open(in.socket, &handle), 0);
        ck_assert_int_eq(kvd_space_open(handle, "s", &geometry, NULL, &space), 0);
}

static void close_space(void) {
        space = kvd_space_close(space);
        kvd_close(handle);
}

static void tear_down(void) {
        instance_expect_clean(&in);
        instance_stop(&in);
        instance_sweep(&in);
}

static bool asked; /* kvd is asked to end, as for an upgrade, rather than killed */

/* Kills kvd, or asks it to end, and waits for that. */
static void kill_kvd(void) {
        pid_t pid = child_of(in.pid, NULL);

        ck_assert_int_gt(pid, 0);
        kill(asked ? in.pid : pid, asked ? SIGUSR2 : SIGKILL);
        WAIT_UNTIL(kill(pid, 0) < 0);
}

static void tokens_of(uint32_t chain, uint32_t tokens[CHAIN * BT]) {
        for (uint32_t i = 0; i < CHAIN * BT; i++)
                tokens[i] = chain * 1000 + i;
}

/* Fills and seals a chain; returns the number of blocks sealed. */
static uint32_t publish(uint32_t chain, struct kvd_pin *pin) {
        uint32_t tokens[CHAIN * BT], n = 0;
        struct kvd_block blocks[CHAIN];
        int r = 0;

        tokens_of(chain, tokens);
        *pin = (struct kvd_pin){0};
        while (n < CHAIN && (r = kvd_alloc(space, CHAIN - n, blocks + n)) > 0)
                n += (uint32_t)r;
        for (uint32_t i = 0; i < n; i++)
                oracle_fill(blocks[i].data, kvd_block_bytes(&geometry),
                            oracle_seed(1, tokens, (i + 1) * BT));
        r = n ? kvd_seal(space, pin, n, blocks, tokens, n * BT) : 0;
        if (r <= 0)
                kvd_free(space, n, blocks);
        return r > 0 ? (uint32_t)r : 0;
}

/* Checks every byte of the chain's blocks that are found; returns their number. */
static uint32_t check(uint32_t chain, struct kvd_pin *pin) {
        uint32_t tokens[CHAIN * BT], ids[CHAIN];
        int64_t n;

        tokens_of(chain, tokens);
        *pin = (struct kvd_pin){0};
        n = kvd_lookup(space, 0, tokens, CHAIN * BT, ids, CHAIN, pin);
        ck_assert_int_ge(n, 0);
        for (uint32_t i = 0; i < pin->n_blocks; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(pin, ids[i]), pin->block_bytes,
                                               oracle_seed(1, tokens, (i + 1) * BT)),
                                  0);
        return pin->n_blocks;
}

static uint32_t check_all(uint32_t n_chains) {
        struct kvd_pin pin;
        uint32_t found = 0;

        ck_assert_int_eq(kvd_catch_up(space), 0);
        for (uint32_t i = 0; i < n_chains; i++) {
                found += check(i, &pin);
                kvd_unpin(space, &pin);
        }
        return found;
}

/* A call may fail with the daemon that got it; the next call goes to the next daemon. */
static void publish_all(uint32_t from, uint32_t n_chains) {
        struct kvd_pin pin;

        for (uint32_t i = from; i < from + n_chains; i++) {
                WAIT_UNTIL(publish(i, &pin) == CHAIN);
                kvd_unpin(space, &pin);
        }
}

/*
 * Runs a client in a process: what it holds from a previous daemon is only freed when its process
 * ends. A failed ck_assert ends the process with another status.
 */
static void in_a_client(void (*run)(void)) {
        pid_t pid = fork();

        if (pid == 0) {
                open_space();
                run();
                close_space();
                _exit(0);
        }
        ck_assert_int_eq(wait_status(pid), 0);
}

START_TEST(another_client_finds_all_of_it) {
        pid_t pid = fork();

        if (pid == 0) {
                open_space();
                publish_all(0, 40);
                close_space();
                _exit(0);
        }
        ck_assert_int_eq(wait_status(pid), 0);
        for (int i = 0; i < 3; i++) {
                kill_kvd();
                open_space();
                ck_assert_uint_eq(check_all(40), 40 * CHAIN);
                close_space();
        }
}
END_TEST

static void publish_and_find(void) {
        for (uint32_t i = 0; i < 5; i++) {
                publish_all(i * 10, 9);
                kill_kvd();
                publish_all(i * 10 + 9, 1); /* by the next daemon */
                if (check_all((i + 1) * 10) != (i + 1) * 10 * CHAIN)
                        _exit(1);
        }
}

/* It goes on with the handles that it has. */
START_TEST(the_same_client_finds_it_and_goes_on) {
        in_a_client(publish_and_find);
}
END_TEST

static void hold_and_fill(void) {
        uint32_t tokens[CHAIN * BT], ids[CHAIN];
        struct kvd_pin held;
        uint32_t wrong = 0;
        pid_t pid;

        publish_all(7, 1);
        tokens_of(7, tokens);
        held = (struct kvd_pin){0};
        if (kvd_lookup(space, 0, tokens, CHAIN * BT, ids, CHAIN, &held) != CHAIN * BT)
                die("not found");
        kill_kvd();
        pid = fork();
        if (pid == 0) {
                open_space(); /* 8 MiB hold 512 chains */
                publish_all(1000, 3000);
                _exit(0);
        }
        if (wait_status(pid) != 0)
                die("the other client failed");
        for (uint32_t i = 0; i < CHAIN; i++)
                wrong += oracle_wrong(kvd_pin_block(&held, ids[i]), held.block_bytes,
                                      oracle_seed(1, tokens, (i + 1) * BT));
        if (wrong)
                die("%u wrong bytes", wrong);
        kvd_unpin(space, &held);
}

/* A reader's blocks are not reused while another client fills the pool several times. */
START_TEST(a_reader_keeps_its_blocks) {
        asked = _i;
        in_a_client(hold_and_fill);
}
END_TEST

static void publish_in_time(void) {
        uint64_t began, most = 0;

        for (uint32_t i = 0; i < 5; i++) {
                publish_all(i * 10, 9);
                began = sys_now_ns();
                kill_kvd();
                publish_all(i * 10 + 9, 1);
                most = MAX(most, sys_now_ns() - began);
        }
        printf("from kvd's death to the next published block: %.1f ms at most\n",
               (double)most / 1e6);
        fflush(stdout);
}

/* Prints the time, but sets no limit, as the machine may be busy. */
START_TEST(how_long_it_takes_to_publish_again) {
        in_a_client(publish_in_time);
}
END_TEST

SUITE("outlive", FIXTURE(set_up, tear_down),
      TESTS(another_client_finds_all_of_it, the_same_client_finds_it_and_goes_on),
      LOOPS(2, a_reader_keeps_its_blocks), TESTS(how_long_it_takes_to_publish_again))
