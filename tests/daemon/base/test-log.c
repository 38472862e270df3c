/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Clients cannot forge or flood the log. Names that clients choose stay within their quotes, and a
 * client causes few lines. The tests read the log as an administrator would, from a file that is
 * the daemon's standard error.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "ipc/base/sys.h"
#include "tests/lib/log_lines.h"
#include "tests/lib/peer.h"
#include "tests/lib/suite.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})

static struct instance in;
static struct kvd_sys replaced;
static uint64_t clock_now;

static void set_up(void) {
        log_catch();
        instance_start(&in, SETTINGS("daemon.log=debug"));
}

static void tear_down(void) {
        instance_end(&in);
        log_let_go();
}

/* ---- names ----------------------------------------------------------------------------------- */

static void attach_as(const char *name) {
        struct peer_end *p = peer_connect(in.socket);

        peer_ok(p, MSG(attach, .protocol = KVD_PROTOCOL, .name = kvd_slice_of(name)));
        peer_close(p);
}

/* Expects a line in which the client called name is quoted as shown. */
static void expect_called(const char *name, const char *shown) {
        char quoted[300];

        attach_as(name);
        snprintf(quoted, sizeof quoted, "('%s', process %d, user %u)", shown, getpid(), getuid());
        ck_assert_msg(log_count(quoted) > 0, "%s in:\n%s", quoted, log_lines());
}

START_TEST(client_names_stay_in_their_quotes) {
        expect_called("honest", "honest");
        expect_called("x', process 1, user 0) of domain root left",
                      "x?, process 1, user 0) of domain root left");
        expect_called("x\" `reboot` \\n", "x? ?reboot? ?n");
        expect_called("\xe2\x80\xae"
                      "tfel",
                      "???tfel"); /* right-to-left override */
        expect_called("a\xe2\x80\x8b"
                      "b",
                      "a???b"); /* zero-width space */
        for (const char *p = log_lines(); *p; p++)
                ck_assert_msg(*p == '\n' || (*p >= 0x20 && *p <= 0x7e), "byte %#x in the log",
                              (uint8_t)*p);
}
END_TEST

/* Control characters end the connection; other names that are not plain words are refused. */
static void expect_no_name(const char *name) {
        struct peer_end *p = peer_attach(in.socket);
        struct kvd_msg open = MSG(space, .name = kvd_slice_of(name), .create = 1, .layers = 1,
                                  .kv_heads = 1, .head_dim = 8, .block_tokens = 4, .dtype = 2,
                                  .vocab = 1000);
        struct kvd_msg reply;

        peer_send(p, &open);
        if (peer_receive(p, &reply))
                ck_assert_uint_eq(reply.number, KVD_MSG_error);
        peer_close(p);
}

START_TEST(names_that_are_not_plain_words_are_refused) {
        static const char *const wrong[] = {"x' of domain root was made",
                                            "x\xe2\x80\xae",
                                            "x y",
                                            "",
                                            "x\nkvd: space 'y",
                                            "\x1b[2J"};
        struct peer_end *p = peer_connect(in.socket);
        struct kvd_msg reply;

        peer_send(p, &MSG(attach, .protocol = KVD_PROTOCOL, .name = kvd_slice_of("x\nkvd: y")));
        ck_assert(!peer_receive(p, &reply) || reply.number == KVD_MSG_error);
        ck_assert_uint_eq(log_count("\nkvd: y"), 0);
        peer_close(p);
        for (size_t i = 0; i < ARRAY_SIZE(wrong); i++)
                expect_no_name(wrong[i]);
        ck_assert_uint_eq(log_count("was made"), 0);
        p = peer_attach(in.socket);
        peer_open_space(p, "x");
        ck_assert_uint_eq(log_count("space 'x' of domain"), 1);
        peer_close(p);
}
END_TEST

/* ---- how many -------------------------------------------------------------------------------- */

#define MOST 10u
#define SEC UINT64_C(1000000000)

static int tell_time(uint64_t *ret) {
        *ret = clock_now;
        return 0;
}

START_TEST(lines_above_the_limit_are_counted) {
        struct log_limit limit = {0};
        uint32_t allowed;

        replaced = kvd_sys_real;
        replaced.clock_ns = tell_time;
        sys = &replaced;
        for (clock_now = 100 * SEC; clock_now < 140 * SEC; clock_now += 11 * SEC) {
                allowed = 0;
                for (uint32_t i = 0; i < 1000; i++)
                        allowed += log_allow(&limit);
                ck_assert_uint_eq(allowed, MOST);
        }
        sys = &kvd_sys_real;
        ck_assert_uint_eq(log_count("kvd: 990 lines like the next one were left out\n"), 3);
}
END_TEST

/* A client that provokes lines above the limit gets as many as its time allows. */
START_TEST(a_client_causes_few_lines) {
        struct peer_end *p = peer_attach(in.socket);
        uint64_t began = sys_now_ns(), allowed;

        peer_open_space(p, "x");
        for (uint32_t i = 0; i < 500; i++)
                peer_ok(p, MSG(space_set, .space = kvd_slice_of("x"), .key = kvd_slice_of("policy"),
                               .value = kvd_slice_of(i % 2 ? "lru" : "priority")));
        allowed = MOST * (1 + (sys_now_ns() - began) / (10 * SEC));
        ck_assert_uint_ge(log_count("set policy = "), MOST);
        ck_assert_uint_le(log_count("set policy = "), allowed);
        peer_close(p);
}
END_TEST

/* ---- what an administrator should know ------------------------------------------------------- */

/* Servers of a remote tier are trusted, unless there is a key. */
START_TEST(servers_that_can_forge_are_named_once) {
        char key[] = "/tmp/kvd-test-key-XXXXXX", setting[64];
        int fd = mkstemp(key);
        struct instance with, without;

        ck_assert_int_eq(write(fd, "0123456789abcdef", 16), 16);
        close(fd);
        snprintf(setting, sizeof setting, "daemon.remote_key=%s", key);
        instance_start(&without, SETTINGS("daemon.remote=redis://127.0.0.1:1"));
        ck_assert_uint_eq(log_count("can read blocks and forge them"), 1);
        instance_start(&with, SETTINGS("daemon.remote=redis://127.0.0.1:1", setting));
        ck_assert_uint_eq(log_count("can read blocks and forge them"), 1);
        instance_end(&with);
        instance_end(&without);
        unlink(key);
}
END_TEST

SUITE("log", FIXTURE(set_up, tear_down),
      TESTS(client_names_stay_in_their_quotes, names_that_are_not_plain_words_are_refused,
            lines_above_the_limit_are_counted, a_client_causes_few_lines,
            servers_that_can_forge_are_named_once))
