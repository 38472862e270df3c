/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Servers of the remote tier, as the remote process connects to them, in the test's own process: the
 * addresses that a name has, names that are not found, and which servers are told the password.
 */

#include "daemon/remote/servers.h"

#include <dlfcn.h>
#include <netdb.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/daemon/fake_server.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

static struct servers servers; /* of this test: each has a process */

/* ---- names ----------------------------------------------------------------------------------- */

/* Names that only this test knows. */
static struct name {
        const char *name, *addresses[3]; /* NULL ends them */
} names[4];

static void name_is(uint32_t i, const char *name, const char *first, const char *second) {
        names[i] = (struct name){.name = name, .addresses = {first, second}};
}

typedef int lookup_fn(const char *, const char *, const struct addrinfo *, struct addrinfo **);

/* In place of libc's: each address is its own list there, and they are chained here. */
int getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                struct addrinfo **ret) {
        lookup_fn *real = (lookup_fn *)dlsym(RTLD_NEXT, "getaddrinfo");
        struct name *name = NULL;
        int r = 0;

        for (uint32_t i = 0; i < ARRAY_SIZE(names); i++)
                if (names[i].name && strcmp(names[i].name, host) == 0)
                        name = &names[i];
        if (!name)
                return real(host, port, hints, ret);
        *ret = NULL;
        for (uint32_t i = 0; r == 0 && name->addresses[i]; i++) {
                r = real(name->addresses[i], port, hints, ret);
                ret = &(*ret)->ai_next;
        }
        return r;
}

/* ---- helpers --------------------------------------------------------------------------------- */

static void use(const char *format, ...) {
        char text[512] = "redis://";
        struct kvd_why why;
        va_list words;

        va_start(words, format);
        vsnprintf(text + strlen(text), sizeof text - strlen(text), format, words);
        va_end(words);
        ck_assert_msg(servers_parse(&servers, text, &why) == 0, "%s", why.line);
        servers.timeout_ns = UINT64_C(10000000000);
}

/* How many do not answer. */
static uint32_t away(void) {
        uint32_t n;

        servers_open(&servers);
        return servers_away(&servers, &n);
}

static void why_is(const char *format, ...) {
        char expected[256];
        va_list words;

        va_start(words, format);
        vsnprintf(expected, sizeof expected, format, words);
        va_end(words);
        ck_assert_str_eq(servers_why(&servers), expected);
}

/* ---- addresses ------------------------------------------------------------------------------- */

START_TEST(the_next_address_of_a_name_is_tried_if_one_refuses) {
        struct fake_server server = {0};

        fake_server_start(&server, "127.0.0.1", 0);
        name_is(0, "both", "127.0.0.77", "127.0.0.1");
        use("both:%u", server.port);
        ck_assert_uint_eq(away(), 0);
        ck_assert_uint_eq(server.connections, 1);
}
END_TEST

/* A slow machine tries again; it was never up before. */
START_TEST(the_next_address_of_a_name_is_tried_if_one_is_silent) {
        struct fake_server silent = {0}, server = {0};

        fake_server_silent(&silent, "127.0.0.77", 0);
        fake_server_start(&server, "127.0.0.1", silent.port);
        name_is(0, "both", "127.0.0.77", "127.0.0.1");
        use("both:%u", server.port);
        servers.timeout_ns = UINT64_C(400000000);
        WAIT_UNTIL(away() == 0);
}
END_TEST

START_TEST(each_address_of_a_name_that_did_not_answer_is_named) {
        uint16_t port = fake_server_refuses("127.0.0.78");

        name_is(0, "both", "127.0.0.77", "127.0.0.78");
        use("both:%u", port);
        ck_assert_uint_eq(away(), 1);
        why_is("both:%u: 127.0.0.77: Connection refused; 127.0.0.78: Connection refused", port);
        ck_assert_uint_eq(away(), 1); /* what was said before is not said again */
        why_is("both:%u: 127.0.0.77: Connection refused; 127.0.0.78: Connection refused", port);
}
END_TEST

/* What is an address already is not said twice. */
START_TEST(an_address_that_did_not_answer_is_named_once) {
        uint16_t port = fake_server_refuses("127.0.0.78");

        use("127.0.0.78:%u", port);
        ck_assert_uint_eq(away(), 1);
        why_is("127.0.0.78:%u: Connection refused", port);
}
END_TEST

SUITE("servers", CASE("addresses"),
      TESTS(the_next_address_of_a_name_is_tried_if_one_refuses,
            the_next_address_of_a_name_is_tried_if_one_is_silent,
            each_address_of_a_name_that_did_not_answer_is_named,
            an_address_that_did_not_answer_is_named_once))
