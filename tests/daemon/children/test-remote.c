/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The remote tier of real daemons. A machine gets blocks that another one computed, byte for byte.
 * A server that dies, hangs or returns wrong data costs blocks and nothing else. Blocks on servers
 * cannot be read without the key. The servers are real ones, or the stand-in for Mooncake's.
 */

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/daemon/children/deep.h"
#include "tests/daemon/children/fetched.h"
#include "tests/daemon/children/objects.h"
#include "tests/daemon/children/remote_tier.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

static void start_with_host_tier(void) {
        remote_tier = 1;
        more[0] = "daemon.host_tier=4M";
        start_all();
}

/* With a short timeout, for a remote process that hangs. */
static void start_with_short_waits(void) {
        more[0] = "daemon.remote_timeout=200";
        start_all();
}

/* With a short timeout, for servers that hang. */
static void start_impatiently(void) {
        more[0] = "daemon.remote_timeout=2000";
        start_all();
}

static void start_with_room(void) {
        more[0] = "daemon.pool=32M";
        start_all();
}

/* ---- what machines share --------------------------------------------------------------------- */

START_TEST(the_second_machine_starts_warm) {
        write_chain(&machines[0]);
        ck_assert_uint_eq(resident(&machines[1], tokens), 0);
        ck_assert(fetch(&machines[1]));
        ck_assert_uint_eq(resident(&machines[1], tokens), BLOCKS);
        ck_assert_uint_eq(tier(&machines[1]).hits, BLOCKS);
        ck_assert_uint_eq(tier(&machines[1]).misses, 0);
        ck_assert_uint_eq(tier(&machines[1]).wrong, 0);
        ck_assert(!fetch(&machines[1])); /* all of it is resident */
}
END_TEST

START_TEST(evicted_blocks_come_back) {
        write_chain(&machines[0]);
        evict_all(&machines[0]);
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        peer_ok(machines[0].watcher, MSG(evict, .space = kvd_slice_of("s"), .blocks = 5));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS - 5);
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        ck_assert_uint_eq(tier(&machines[0]).hits, BLOCKS + 5);
}
END_TEST

/* Blocks that two machines computed are sent once. */
START_TEST(what_is_there_is_not_sent_again) {
        write_chain(&machines[0]);
        ck_assert_uint_eq(servers_puts(), BLOCKS);
        write_chain(&machines[1]);
        ck_assert_uint_eq(servers_puts(), BLOCKS);
}
END_TEST

START_TEST(others_are_not_there) {
        uint32_t other[BLOCKS * BLOCK_TOKENS];

        write_chain(&machines[0]);
        memcpy(other, tokens, sizeof other);
        other[5 * BLOCK_TOKENS]++;
        ck_assert(fetch_of(&machines[1], other, 0));
        ck_assert_uint_eq(resident(&machines[1], other), 5);
        other[0]++;
        ck_assert(fetch_of(&machines[1], other, 0));
        ck_assert_uint_eq(resident(&machines[1], other), 0);
        ck_assert(fetch_of(&machines[1], tokens, 1)); /* a salt is another chain */
        ck_assert_uint_eq(tier(&machines[1]).hits, 5);
        ck_assert_uint_eq(tier(&machines[1]).misses, 3);
}
END_TEST

/* Names of objects by key depend on key and salt, and their blocks have fewer words than tokens. */
START_TEST(objects_are_shared_beside_chains) {
        const uint32_t block_tokens = object_tokens[_i];
        kvd_space *first = object_space(machines[0].handle, block_tokens),
                  *second = object_space(machines[1].handle, block_tokens);

        object_seal(first);
        beside_seal(first);
        WAIT_UNTIL(tier(&machines[0]).written_bytes >= 2 * OBJECT_BLOCKS * (uint64_t)OBJECT_BYTES);
        ck_assert_uint_eq(object_below(second), KVD_BELOW_UNKNOWN);
        ck_assert_int_eq(object_fetch(second, OBJECT_SALT + 1), 0);
        ck_assert(!object_is_there(second));
        object_fetch(second, OBJECT_SALT);
        ck_assert(object_is_there(second));
        ck_assert_uint_eq(tier(&machines[1]).hits, OBJECT_BLOCKS);
        ck_assert_int_eq(object_fetch(second, OBJECT_SALT), OBJECT_BLOCKS);
        ck_assert_uint_eq(beside_blocks(second), 0);
        beside_fetch(second);
        ck_assert_uint_eq(beside_blocks(second), OBJECT_BLOCKS);
        kvd_space_close(first);
        kvd_space_close(second);
}
END_TEST

/* ---- bidirectional prefixes ------------------------------------------------------------------ */

static void make_other(uint32_t *of, uint32_t i) {
        memcpy(of, tokens, sizeof tokens);
        of[n_tokens - 1] += i;
}

/* The prefixes begin alike, but all bytes of their blocks differ. */
START_TEST(prefixes_are_shared_whole) {
        uint32_t other[3][BLOCKS * BLOCK_TOKENS], whole = n_tokens;

        for (uint32_t i = 0; i < 3; i++) {
                make_other(other[i], i);
                make_chain(&machines[0], other[i]);
                WAIT_UNTIL(tier(&machines[0]).written_bytes >=
                           (i + 1) * BLOCKS * (uint64_t)BLOCK_BYTES);
        }
        ck_assert_uint_eq(servers_puts(), 3 * BLOCKS);
        for (uint32_t i = 0; i < 3; i++) {
                ck_assert_uint_eq(resident(&machines[1], other[i]), 0);
                ck_assert(fetch_of(&machines[1], other[i], 0));
                ck_assert_uint_eq(resident(&machines[1], other[i]), BLOCKS);
                ck_assert(!fetch_of(&machines[1], other[i], 0));
        }
        ck_assert_uint_eq(tier(&machines[1]).hits, 3 * BLOCKS);
        make_other(other[0], 3);
        ck_assert(fetch_of(&machines[1], other[0], 0));
        ck_assert_uint_eq(resident(&machines[1], other[0]), 0);
        for (n_tokens = whole - BLOCK_TOKENS; n_tokens < BLOCKS * BLOCK_TOKENS; n_tokens++)
                if (n_tokens != whole) {
                        ck_assert(fetch(&machines[1]));
                        ck_assert_uint_eq(resident(&machines[1], tokens), 0);
                }
        ck_assert_uint_eq(tier(&machines[1]).hits, 3 * BLOCKS);
}
END_TEST

START_TEST(a_prefix_without_its_end_comes_back_whole) {
        write_chain(&machines[0]);
        make_chain(&machines[1], tokens);
        usleep(200000); /* blocks that the servers have are not sent */
        ck_assert_uint_eq(servers_puts(), BLOCKS);
        for (uint32_t i = 0; i < MACHINES; i++) {
                peer_ok(machines[i].watcher, MSG(evict, .space = kvd_slice_of("s"), .blocks = 5));
                ck_assert_uint_eq(resident(&machines[i], tokens), 0);
                ck_assert(fetch(&machines[i]));
                ck_assert_uint_eq(resident(&machines[i], tokens), BLOCKS);
                ck_assert_uint_eq(tier(&machines[i]).hits, BLOCKS);
        }
}
END_TEST

/* A space with a fingerprint is found by it, whatever its name; one without by its name. */
START_TEST(spaces_are_found_by_fingerprint) {
        struct kvd_geometry marked = geometry, other = geometry;

        marked.fingerprint[0] = 7;
        other.fingerprint[0] = 8;
        machines[0].space = kvd_space_close(machines[0].space);
        open_space(&machines[0], "one", &marked);
        write_chain(&machines[0]);
        ck_assert(fetch(&machines[1])); /* "s" */
        ck_assert_uint_eq(resident(&machines[1], tokens), 0);
        machines[1].space = kvd_space_close(machines[1].space);
        open_space(&machines[1], "other", &other);
        ck_assert(fetch(&machines[1]));
        ck_assert_uint_eq(resident(&machines[1], tokens), 0);
        machines[1].space = kvd_space_close(machines[1].space);
        open_space(&machines[1], "two", &marked);
        ck_assert(fetch(&machines[1]));
        ck_assert_uint_eq(resident(&machines[1], tokens), BLOCKS);
}
END_TEST

/* ---- servers that die, hang and lie ---------------------------------------------------------- */

START_TEST(a_server_that_hangs_costs_one_fetch) {
        write_chain(&machines[0]);
        evict_all(&machines[0]);
        servers_hang(true);
        fetch(&machines[0]); /* the daemon may already know that they hang */
        WAIT_UNTIL(tier_is(&machines[0], "away"));
        ck_assert_uint_eq(tier(&machines[0]).away, 1);
        /* from now on no fetch has to be waited for, and allocations go on */
        for (uint32_t i = 0; i < 100; i++)
                ck_assert(!fetch(&machines[0]));
        make_chain(&machines[0], tokens);
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        evict_all(&machines[0]);
        servers_hang(false);
        WAIT_UNTIL(tier_is(&machines[0], "on"));
        WAIT_UNTIL((fetch(&machines[0]), resident(&machines[0], tokens) == BLOCKS));
}
END_TEST

/* Each lookup used to wait for a whole second until the process was killed. */
START_TEST(a_remote_process_that_hangs_is_not_waited_for) {
        pid_t pid;

        write_chain(&machines[0]);
        evict_all(&machines[0]);
        pid = remote_process(&machines[0]);
        ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        fetch(&machines[0]);
        WAIT_UNTIL(tier_is(&machines[0], "away"));
        ck_assert(!fetch(&machines[0]));
        ck_assert_int_eq(kill(pid, SIGCONT), 0);
        WAIT_UNTIL((fetch(&machines[0]), resident(&machines[0], tokens) == BLOCKS));
        ck_assert_int_eq(remote_process(&machines[0]), pid);
}
END_TEST

/* Blocks on a server that lost its data are written again. */
START_TEST(a_server_that_forgot_is_told_again) {
        write_chain(&machines[0]);
        servers_forget();
        WAIT_UNTIL(tier(&machines[0]).written_bytes >= 2 * BLOCKS * (uint64_t)BLOCK_BYTES);
        /* the other machine may notice only now that its connection is closed */
        WAIT_UNTIL((fetch(&machines[1]), resident(&machines[1], tokens) == BLOCKS));
}
END_TEST

/* All blocks used to be offered to them again a thousand times a second. */
START_TEST(full_servers_are_asked_now_and_then) {
        uint64_t errors, began;

        servers_fill(true);
        make_chain(&machines[0], tokens);
        WAIT_UNTIL(tier(&machines[0]).errors >= BLOCKS);
        errors = tier(&machines[0]).errors;
        began = sys_now_ns();
        WAIT_UNTIL(tier(&machines[0]).errors >= errors + 2 * BLOCKS);
        ck_assert_uint_ge(sys_now_ns() - began, 100000000);
        ck_assert(tier_is(&machines[0], "on"));
        ck_assert_uint_eq(tier(&machines[0]).written_bytes, 0);
        ck_assert_msg(strstr(why_away(&machines[0]),
                             on_mooncake() ? "batch_put_from returned -200" : "OOM "),
                      "%s", why_away(&machines[0]));
        servers_fill(false);
        WAIT_UNTIL(tier(&machines[0]).written_bytes >= BLOCKS * (uint64_t)BLOCK_BYTES);
}
END_TEST

static uint32_t which; /* a byte of a value */

static size_t flip(uint8_t *value, size_t n) {
        value[which % n] ^= 1;
        return n;
}

static size_t cut(uint8_t *value, size_t n) {
        return n - 1;
}

static size_t grow(uint8_t *value, size_t n) {
        value[n] = 0;
        return n + 1;
}

static size_t empty(uint8_t *value, size_t n) {
        return 0;
}

/* Replaces the value by that of another block. */
static size_t swap(uint8_t *value, size_t n) {
        static uint8_t first[BLOCK_BYTES * 2];
        static size_t n_first;

        if (!n_first)
                memcpy(first, value, n_first = n);
        else
                memcpy(value, first, n);
        return n;
}

START_TEST(lies_are_misses) {
        static size_t (*const lies[])(uint8_t *, size_t) = {flip, flip, flip,  flip, flip,
                                                            cut,  grow, empty, swap};
        static const uint32_t at[] = {3, 17, 25, 40, 9999};
        uint32_t n;

        which = (uint32_t)_i < ARRAY_SIZE(at) ? at[_i] : 0;
        write_chain(&machines[0]);
        n = servers_change(lies[_i]);
        ck_assert_uint_eq(n, BLOCKS);
        ck_assert(fetch(&machines[1]));
        /* swap does not change one value, which may be the first block's */
        ck_assert_uint_le(resident(&machines[1], tokens), lies[_i] == swap);
        ck_assert_uint_ge(tier(&machines[1]).wrong, BLOCKS - 1);
        ck_assert(tier_is(&machines[1], "on"));
}
END_TEST

/* ---- long chains ----------------------------------------------------------------------------- */

/*
 * Only the first 15,360 tokens of a chain used to come. The other machine has the first 1,024 from
 * its own computation; its daemon dies after the first part.
 */
START_TEST(a_chain_of_any_length_comes) {
        kvd_space *deep = deep_space(machines[0].handle, 0);
        uint32_t found, before = 0, below;

        deep_seal(deep, DEEP_BLOCKS);
        WAIT_UNTIL(tier(&machines[0]).written_bytes >= DEEP_BYTES);
        kvd_space_close(deep);
        for (uint32_t i = 0; i < 2; i++) {
                deep = deep_space(machines[1].handle, 0);
                deep_seal(deep, 16);
                ck_assert(deep_fetch(deep));
                if (i)
                        break;
                kvd_space_close(deep);
                kill_machine(&machines[1]);
        }
        while ((found = deep_resident(deep, &below)) < DEEP_TOKENS) {
                ck_assert_uint_gt(found, before);
                before = found;
                ck_assert(deep_fetch(deep));
        }
        ck_assert(!deep_fetch(deep));
        ck_assert_uint_eq(tier(&machines[1]).wrong, 0);
        kvd_space_close(deep);
}
END_TEST

/* All of the prefix comes to that machine, where none of it is. */
static void expect_deep(struct machine *m) {
        kvd_space *deep = deep_space(m->handle, KVD_BIDIRECTIONAL);
        uint32_t below;

        ck_assert_uint_eq(deep_resident(deep, &below), 0);
        ck_assert_uint_eq(below, KVD_BELOW_UNKNOWN);
        ck_assert(deep_fetch(deep));
        ck_assert_uint_eq(deep_resident(deep, &below), DEEP_TOKENS);
        ck_assert(!deep_fetch(deep));
        ck_assert_uint_eq(tier(m).hits, DEEP_BLOCKS);
        ck_assert_uint_eq(tier(m).misses, 0);
        kvd_space_close(deep);
}

/* Nothing comes of a prefix that differs in the token at `at`, or has only the first n. */
static void expect_no_other(struct machine *m, uint32_t at, uint32_t n) {
        kvd_space *deep = deep_space(m->handle, KVD_BIDIRECTIONAL);
        static uint32_t other[DEEP_TOKENS];
        struct kvd_pin pin = {0};
        uint32_t id;
        int64_t r;
        int fd;

        memcpy(other, deep_tokens(), sizeof other);
        other[at]++;
        r = kvd_fetch(deep, 0, 0, other, n, &fd);
        ck_assert(fetch_ended(r, fd));
        ck_assert_int_eq(kvd_lookup(deep, 0, other, n, &id, 1, &pin), 0);
        ck_assert_uint_eq(tier(m).hits, 0);
        kvd_space_close(deep);
}

/*
 * One of more than 15,360 tokens or 512 blocks was never written. The other machine's daemon dies
 * before it fetches, and the writer's before it fetches what it wrote.
 */
START_TEST(a_prefix_of_any_length_comes) {
        static const uint32_t others[] = {0, 15360, 70000, DEEP_TOKENS - 1};
        kvd_space *deep;

        deep_block_tokens = _i ? 16 : 64;
        deep = deep_space(machines[0].handle, KVD_BIDIRECTIONAL);
        deep_seal(deep, DEEP_BLOCKS);
        WAIT_UNTIL(tier(&machines[0]).written_bytes >= DEEP_BYTES);
        kvd_space_close(deep);
        for (uint32_t i = 0; i < ARRAY_SIZE(others); i++)
                expect_no_other(&machines[1], others[i], DEEP_TOKENS);
        expect_no_other(&machines[1], DEEP_TOKENS - 1, DEEP_TOKENS - 1);
        for (uint32_t i = 0; i < 2; i++) {
                kill_machine(&machines[i]);
                expect_deep(&machines[i]);
        }
        ck_assert_uint_eq(servers_puts(), DEEP_BLOCKS);
        ck_assert_uint_eq(tier(&machines[1]).wrong, 0);
}
END_TEST

/* ---- processes killed in the middle ---------------------------------------------------------- */

/* Its requests fail, and the next process does them again. */
START_TEST(the_process_is_killed_in_the_middle) {
        make_chain(&machines[0], tokens);
        for (uint32_t i = 0; i < 6; i++) {
                usleep(2000 * i);
                kill_remote_process(&machines[0]);
        }
        WAIT_UNTIL(tier(&machines[0]).written_bytes >= BLOCKS * (uint64_t)BLOCK_BYTES);
        for (uint32_t i = 0; i < 6; i++) {
                struct pollfd p = {.events = POLLIN, .fd = -1};

                evict_all(&machines[0]);
                ck_assert_int_ge(kvd_fetch(machines[0].space, 0, 0, tokens, BLOCKS * BLOCK_TOKENS,
                                           &p.fd),
                                 0);
                usleep(2000 * i);
                kill_remote_process(&machines[0]);
                ck_assert_int_eq(p.fd < 0 ? 1 : poll(&p, 1, PATIENCE_MS), 1);
                if (p.fd >= 0)
                        close(p.fd);
        }
        WAIT_UNTIL((fetch(&machines[0]), resident(&machines[0], tokens) == BLOCKS));
        ck_assert_uint_eq(tier(&machines[0]).wrong, 0);
}
END_TEST

/* Other machines find blocks that had arrived by then, and no wrong ones. */
START_TEST(the_daemon_is_killed_in_the_middle) {
        for (uint32_t i = 0; i < 4; i++) {
                make_chain(&machines[0], tokens);
                usleep(3000 * i);
                kill_machine(&machines[0]);
                fetch(&machines[1]);
                resident(&machines[1], tokens);
        }
        write_chain(&machines[0]);
        WAIT_UNTIL((fetch(&machines[1]), resident(&machines[1], tokens) == BLOCKS));
        for (uint32_t i = 0; i < 4; i++) {
                int fd = -1;

                ck_assert_int_ge(kvd_fetch(machines[0].space, 0, 0, tokens, BLOCKS * BLOCK_TOKENS,
                                           &fd),
                                 0);
                usleep(3000 * i);
                if (fd >= 0)
                        close(fd);
                kill_machine(&machines[0]);
        }
        WAIT_UNTIL((fetch(&machines[0]), resident(&machines[0], tokens) == BLOCKS));
        ck_assert_uint_eq(tier(&machines[0]).wrong + tier(&machines[1]).wrong, 0);
}
END_TEST

/* ---- keys ------------------------------------------------------------------------------------ */

static bool seen_in_the_clear;

static size_t look(uint8_t *value, size_t n) {
        uint8_t block[BLOCK_BYTES];

        oracle_fill(block, sizeof block, oracle_seed(SEED, tokens, BLOCK_TOKENS));
        seen_in_the_clear |= memmem(value, n, block, 64) || memmem(value, n, tokens, 64);
        return n;
}

static void start_with_keys(void) {
        make_key(0, 1);
        make_key(1, 1);
        start_all();
}

static void start_with_other_keys(void) {
        make_key(0, 1);
        make_key(1, 2);
        start_all();
}

START_TEST(the_same_key_shares) {
        write_chain(&machines[0]);
        ck_assert_uint_eq(servers_change(look), BLOCKS);
        ck_assert(!seen_in_the_clear);
        ck_assert(fetch(&machines[1]));
        ck_assert_uint_eq(resident(&machines[1], tokens), BLOCKS);
}
END_TEST

START_TEST(another_key_finds_nothing) {
        write_chain(&machines[0]);
        ck_assert(fetch(&machines[1]));
        ck_assert_uint_eq(resident(&machines[1], tokens), 0);
        ck_assert_uint_eq(tier(&machines[1]).hits, 0);
}
END_TEST

/* ---- prefixes -------------------------------------------------------------------------------- */

static void start_as(uint32_t machine, const char *domain, const char *prefix) {
        static char users[64], named[64];

        snprintf(users, sizeof users, "domain %s.users=%u", domain, getuid());
        snprintf(named, sizeof named, "domain %s.remote_prefix=%s", domain, prefix);
        more[0] = users;
        more[1] = named;
        start_machine(&machines[machine], "on");
}

START_TEST(domains_with_the_same_prefix_share) {
        start_as(0, "a", "x");
        start_as(1, "b", "x");
        write_chain(&machines[0]);
        ck_assert(fetch(&machines[1]));
        ck_assert_uint_eq(resident(&machines[1], tokens), BLOCKS);
}
END_TEST

START_TEST(domains_with_different_prefixes_share_nothing) {
        start_as(0, "a", "x");
        start_as(1, "a", "y");
        write_chain(&machines[0]);
        ck_assert(fetch(&machines[1]));
        ck_assert_uint_eq(resident(&machines[1], tokens), 0);
}
END_TEST

/* Servers go away while a worker moves what they sent. Its blocks used to stay reserved forever. */
START_TEST(servers_go_away_while_a_worker_copies) {
        pid_t worker = child_of(machines[1].in.pid, "kvd-worker");
        struct pollfd p = {.events = POLLIN};

        write_chain(&machines[0]);
        ck_assert_int_gt(worker, 0);
        ck_assert_int_eq(kill(worker, SIGSTOP), 0);
        ck_assert_int_ge(kvd_fetch(machines[1].space, 0, 0, tokens, BLOCKS * BLOCK_TOKENS, &p.fd),
                         0);
        WAIT_UNTIL(servers_gets() >= BLOCKS);
        usleep(100000); /* so that the daemon has probably received them */
        servers_hang(true);
        WAIT_UNTIL(tier_is(&machines[1], "away"));
        ck_assert_int_eq(poll(&p, 1, PATIENCE_MS), 1);
        close(p.fd);
        ck_assert_int_eq(kill(worker, SIGCONT), 0);
        WAIT_UNTIL(tier(&machines[1]).queue == 0);
        servers_hang(false);
        WAIT_UNTIL(tier_is(&machines[1], "on"));
        WAIT_UNTIL((fetch(&machines[1]), resident(&machines[1], tokens) == BLOCKS));
}
END_TEST

/* Blocks in host memory come from there, and the servers get no request. */
START_TEST(the_nearer_tier_answers) {
        struct kvd_msg_tier_info_reply host;

        write_chain(&machines[0]);
        WAIT_UNTIL(peer_ok(machines[0].watcher, MSG(tier_info)).tier_info_reply.written_bytes >=
                   BLOCKS * (uint64_t)(BLOCK_BYTES + 4096));
        evict_all(&machines[0]);
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        host = peer_ok(machines[0].watcher, MSG(tier_info)).tier_info_reply;
        ck_assert(kvd_slice_is(host.name, "host"));
        ck_assert_uint_eq(host.hits, BLOCKS);
        ck_assert_uint_eq(tier(&machines[0]).hits, 0);
}
END_TEST

/* A real store keeps its contents, so each test uses another key and thus other names. */
static void start_on_real(void) {
        uint8_t key = (uint8_t)time(NULL);

        sleep(1);
        make_key(0, key);
        make_key(1, key);
        start_all();
}

/* On a real store, only tests run that neither make it fail nor inspect its contents. */
static bool is_real(void) {
        return getenv("KVD_TEST_REAL");
}

SUITE("remote", SKIP_IF(!servers_are_there()),
      WHEN(is_real(), FIXTURE(start_on_real, stop_all),
           TESTS(the_second_machine_starts_warm, evicted_blocks_come_back, others_are_not_there,
                 spaces_are_found_by_fingerprint, the_process_is_killed_in_the_middle,
                 the_daemon_is_killed_in_the_middle),
           exit(suite_run(&suite_))),
      FIXTURE(start_all, stop_all),
      TESTS(the_second_machine_starts_warm, evicted_blocks_come_back,
            what_is_there_is_not_sent_again, others_are_not_there, spaces_are_found_by_fingerprint,
            a_server_that_forgot_is_told_again, full_servers_are_asked_now_and_then,
            the_process_is_killed_in_the_middle, the_daemon_is_killed_in_the_middle),
      LOOPS(9, lies_are_misses), LOOPS(3, objects_are_shared_beside_chains), CASE("hang"),
      FIXTURE(start_impatiently, stop_all), TESTS(a_server_that_hangs_costs_one_fetch),
      CASE("process"), FIXTURE(start_with_short_waits, stop_all),
      TESTS(a_remote_process_that_hangs_is_not_waited_for),
      WHEN(instance_on_gpu(), TESTS(servers_go_away_while_a_worker_copies), CASE("host tier"),
           FIXTURE(start_with_host_tier, stop_all),
           TESTS(the_nearer_tier_answers, the_second_machine_starts_warm)),
      CASE("deep"), FIXTURE(start_with_room, stop_all), TESTS(a_chain_of_any_length_comes),
      LOOPS(2, a_prefix_of_any_length_comes), CASE("whole"), FIXTURE(start_whole, stop_all),
      TESTS(prefixes_are_shared_whole, a_prefix_without_its_end_comes_back_whole),
      WHEN(!instance_on_gpu(), /* a GPU changes only the way of blocks, not keys */
           CASE("key"), FIXTURE(start_with_keys, stop_all), TESTS(the_same_key_shares),
           CASE("other keys"), FIXTURE(start_with_other_keys, stop_all),
           TESTS(another_key_finds_nothing), CASE("prefixes"), FIXTURE(start_a_server, stop_all),
           TESTS(domains_with_the_same_prefix_share,
                 domains_with_different_prefixes_share_nothing)))
