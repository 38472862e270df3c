/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Servers of the remote tier, to which the test connects as the remote process does: names with
 * several addresses, names that are not found, and which servers get the password.
 */

#include "daemon/process/remote/servers.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/lib/certificates.h"
#include "tests/lib/fake_server.h"
#include "tests/lib/instance.h"
#include "tests/lib/suite.h"

static struct servers servers; /* each test has its own, as it is a process */

/* ---- names ----------------------------------------------------------------------------------- */

/* Names that only this test knows. */
static struct name {
        const char *name, *addresses[3]; /* terminated by NULL */
        bool silent;                     /* a lookup waits for the gate */
} known[4];

static void name_is(uint32_t i, const char *name, const char *first, const char *second) {
        known[i] = (struct name){.name = name, .addresses = {first, second}};
}

typedef int lookup_fn(const char *, const char *, const struct addrinfo *, struct addrinfo **);

/* A name server that is silent until the gate is opened; lookups fail after SILENT_S seconds. */
#define SILENT_S 600

static sem_t gate;
static _Atomic uint32_t begun, ended; /* lookups at it */

static int ask_silent_server(void) {
        struct timespec until;
        int r;

        begun++;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += SILENT_S;
        r = sem_timedwait(&gate, &until) == 0 ? sem_post(&gate) : EAI_AGAIN; /* it stays open */
        ended++;
        return r;
}

/* Replaces libc's, which is called for each address of a known name; the results are chained. */
int getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                struct addrinfo **ret) {
        lookup_fn *real = (lookup_fn *)dlsym(RTLD_NEXT, "getaddrinfo");
        struct name *name = NULL;
        int r = 0;

        for (uint32_t i = 0; i < ARRAY_SIZE(known); i++)
                if (known[i].name && strcmp(known[i].name, host) == 0)
                        name = &known[i];
        if (!name || hints->ai_flags & AI_NUMERICHOST)
                return real(host, port, hints, ret);
        *ret = NULL;
        if (name->silent)
                r = ask_silent_server();
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

/* Returns the number of servers that do not answer. */
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

/* host: NULL if the text is refused */
static void address_is(const char *text, const char *host, uint16_t port) {
        struct servers s = {0};
        const struct link *link = NULL;
        char whole[64];
        struct kvd_why why;
        int r;

        snprintf(whole, sizeof whole, "redis://%s", text);
        r = servers_parse(&s, whole, &why);
        ck_assert_msg((r == 0) == (host != NULL), "%s: %d", text, r);
        for (uint32_t i = 0; i < SERVERS; i++)
                if (s.links[i].host[0])
                        link = &s.links[i];
        if (host) {
                ck_assert_str_eq(link->host, host);
                ck_assert_uint_eq(link->port, port);
        }
}

/* The last part of an IPv6 address used to be taken for a port. */
START_TEST(an_address_with_colons_is_in_brackets) {
        address_is("cache", "cache", 6379);
        address_is("cache:7000", "cache", 7000);
        address_is("[2001:db8::1]", "2001:db8::1", 6379);
        address_is("[2001:db8::1]:7000", "2001:db8::1", 7000);
        address_is("2001:db8::1", NULL, 0);
        address_is("::1:6379", NULL, 0);
        address_is("[::1", NULL, 0);
        address_is("[::1]7000", NULL, 0);
        address_is("[]:7000", NULL, 0);
        address_is("cache:", NULL, 0);
        address_is("cache:70000", NULL, 0);
        address_is("cache:7x", NULL, 0);
}
END_TEST

/* A slow machine needs several attempts. */
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
        ck_assert_uint_eq(away(), 1); /* errors of the last attempt are not repeated */
        why_is("both:%u: 127.0.0.77: Connection refused; 127.0.0.78: Connection refused", port);
}
END_TEST

/* A name that is an address is not repeated. */
START_TEST(an_address_that_did_not_answer_is_named_once) {
        uint16_t port = fake_server_refuses("127.0.0.78");

        use("127.0.0.78:%u", port);
        ck_assert_uint_eq(away(), 1);
        why_is("127.0.0.78:%u: Connection refused", port);
}
END_TEST

/* ---- names that take long -------------------------------------------------------------------- */

/* A silent name server must not delay servers whose addresses are known. */
START_TEST(a_name_that_takes_long_holds_up_no_other) {
        struct fake_server server = {0}, other = {0};

        ck_assert_int_eq(sem_init(&gate, 0, 0), 0);
        fake_server_start(&server, "127.0.0.1", 0);
        fake_server_start(&other, "127.0.0.2", 0);
        name_is(0, "slow", "127.0.0.2", NULL);
        known[0].silent = true;
        use("127.0.0.1:%u,slow:%u", server.port, other.port);
        servers.timeout_ns = UINT64_C(200000000);
        WAIT_UNTIL(away() == 1); /* a slow machine needs several attempts */
        ck_assert_uint_eq(ended, 0);
        WAIT_UNTIL(away() == 1); /* the lookup is neither waited for nor repeated */
        ck_assert_uint_eq(ended, 0);
        ck_assert_uint_eq(begun, 1);
        why_is("slow:%u: its name is still being looked up: a name server is slow or silent",
               other.port);
        sem_post(&gate);
        WAIT_UNTIL(away() == 0);
}
END_TEST

START_TEST(a_name_that_does_not_exist_is_said) {
        use("kvd.invalid:1");
        name_is(0, "kvd.invalid", NULL, NULL);
        ck_assert_uint_eq(away(), 1);
        why_is("kvd.invalid:1: Name or service not known");
}
END_TEST

/* ---- replies --------------------------------------------------------------------------------- */

/* No memory has been allocated for a reply yet. */
START_TEST(no_bytes_are_no_reply) {
        struct resp reply;
        size_t used = 1;

        ck_assert_int_eq(resp_take_whole(NULL, 0, 100, &reply, &used), 0);
        ck_assert_uint_eq(used, 0);
}
END_TEST

/* ---- passwords ------------------------------------------------------------------------------- */

#define OTHERS 20u

static struct fake_server named[2], others[OTHERS];

/* The reply of a Cluster of these nodes to CLUSTER SLOTS. Each has a share of the slots. */
static const char *cluster_of(uint32_t n, struct fake_server *const *nodes) {
        static char text[8192];
        size_t at = (size_t)snprintf(text, sizeof text, "*%u\r\n", n);

        for (uint32_t i = 0; i < n; i++)
                at += (size_t)snprintf(text + at, sizeof text - at,
                                       "*3\r\n:%u\r\n:%u\r\n*2\r\n$%zu\r\n%s\r\n:%u\r\n",
                                       SLOTS * i / n, SLOTS * (i + 1) / n - 1,
                                       strlen(nodes[i]->host), nodes[i]->host, nodes[i]->port);
        return text;
}

/* Starts a named server, and others at other addresses or at other ports of its address. */
static void start_others(void) {
        struct fake_server *nodes[OTHERS + 1] = {&named[0]};
        char host[16];

        fake_server_start(&named[0], "127.0.0.1", 0);
        for (uint32_t i = 0; i < OTHERS; i++) {
                snprintf(host, sizeof host, "127.0.0.%u", i < OTHERS / 2 ? 1 : i);
                fake_server_start(&others[i], host, 0);
                nodes[i + 1] = &others[i];
        }
        named[0].slots = cluster_of(OTHERS + 1, nodes);
}

/* Number of passwords that servers got that the configuration does not name. */
static uint32_t passwords_of_others(void) {
        uint32_t n = 0;

        for (uint32_t i = 0; i < OTHERS; i++)
                n += others[i].passwords;
        return n;
}

START_TEST(a_server_cannot_send_the_password_to_others) {
        start_others();
        use("127.0.0.1:%u", named[0].port);
        servers_password(&servers, "sesame");
        for (uint32_t i = 0; i < 3; i++)
                ck_assert_uint_eq(away(), OTHERS);
        ck_assert_uint_eq(passwords_of_others(), 0);
        for (uint32_t i = 0; i < OTHERS; i++)
                ck_assert_uint_eq(others[i].commands, 0);
        ck_assert_uint_eq(named[0].passwords, 1);
        ck_assert_ptr_nonnull(strstr(servers_why(&servers), "it is not listed in remote"));
}
END_TEST

START_TEST(others_are_asked_if_there_is_no_password) {
        start_others();
        use("127.0.0.1:%u", named[0].port);
        ck_assert_uint_eq(away(), 0);
        ck_assert_uint_eq(passwords_of_others(), 0);
}
END_TEST

static void start_both(void) {
        fake_server_start(&named[0], "127.0.0.1", 0);
        fake_server_start(&named[1], "127.0.0.2", 0);
        named[0].slots = named[1].slots =
                cluster_of(2, (struct fake_server *[]){&named[0], &named[1]});
}

START_TEST(a_cluster_that_is_named_gets_the_password) {
        start_both();
        use("127.0.0.1:%u,127.0.0.2:%u", named[0].port, named[1].port);
        servers_password(&servers, "sesame");
        ck_assert_uint_eq(away(), 0);
        ck_assert_uint_eq(named[0].passwords, 1);
        ck_assert_uint_eq(named[1].passwords, 1);
}
END_TEST

/* A Cluster reports addresses. Those to which configured names resolve are trusted. */
START_TEST(a_cluster_that_is_named_by_names_gets_the_password) {
        start_both();
        name_is(0, "one", "127.0.0.1", NULL);
        name_is(1, "two", "127.0.0.2", NULL);
        use("one:%u,two:%u", named[0].port, named[1].port);
        servers_password(&servers, "sesame");
        ck_assert_uint_eq(away(), 0);
}
END_TEST

/* ---- passwords, with TLS --------------------------------------------------------------------- */

static char folder[] = "/tmp/kvd-servers-XXXXXX";

static void make_folder(void) {
        ck_assert_ptr_nonnull(mkdtemp(folder));
        certificate_make(folder, "ca", NULL, NULL, 30);
}

static void remove_folder(void) {
        char command[64];

        snprintf(command, sizeof command, "rm -rf %s", folder);
        ck_assert_int_eq(system(command), 0);
}

static void start_with_certificate(struct fake_server *s, const char *host, const char *name,
                                   const char *names) {
        certificate_make(folder, name, names, "ca", 30);
        s->folder = folder;
        s->name = name;
        fake_server_start(s, host, 0);
}

static void trust_ca(void) {
        struct tls_files files = TLS_NO_FILES;
        struct kvd_why why;
        char path[64];

        snprintf(path, sizeof path, "%s/ca.pem", folder);
        files.ca = open(path, O_RDONLY | O_CLOEXEC);
        ck_assert_msg(tls_context_new(&files, &servers.tls, &why) == 0, "%s", why.line);
        close(files.ca);
}

static const struct {
        const char *names; /* in the other server's certificate */
        bool gets;
} certificates[] = {
        {"DNS:localhost,IP:127.0.0.2", true},
        {"DNS:*.example,IP:127.0.0.2", false},
        {"DNS:localhost.example,IP:127.0.0.2", false},
        {"IP:127.0.0.2", false},
};

/* The other server's certificate is valid for the address that the Cluster reports. */
START_TEST(with_tls_the_password_goes_to_certificates_of_named_servers) {
        bool gets = certificates[_i].gets;

        start_with_certificate(&named[0], "127.0.0.1", "named", "DNS:localhost,IP:127.0.0.1");
        start_with_certificate(&others[0], "127.0.0.2", "other", certificates[_i].names);
        named[0].slots = others[0].slots =
                cluster_of(2, (struct fake_server *[]){&named[0], &others[0]});
        use("localhost:%u", named[0].port);
        trust_ca();
        servers_password(&servers, "sesame");
        ck_assert_uint_eq(away(), !gets);
        ck_assert_uint_eq(others[0].passwords, gets);
        ck_assert(gets || strstr(servers_why(&servers), "it is not listed in remote"));
}
END_TEST

/* The server at the first address does not speak TLS. */
START_TEST(the_next_address_of_a_name_is_tried_if_one_has_no_tls) {
        struct fake_server plain = {0};

        certificate_make(folder, "named", "DNS:both", "ca", 30);
        named[0].folder = folder;
        named[0].name = "named";
        fake_server_start(&plain, "127.0.0.2", 0);
        fake_server_start(&named[0], "127.0.0.1", plain.port);
        name_is(0, "both", "127.0.0.2", "127.0.0.1");
        use("both:%u", plain.port);
        trust_ca();
        servers.timeout_ns = UINT64_C(400000000);
        WAIT_UNTIL(away() == 0); /* a slow machine needs several attempts */
        ck_assert_uint_gt(plain.connections, 0);
        ck_assert_uint_eq(plain.commands, 0);
}
END_TEST

SUITE("servers", CASE("addresses"),
      TESTS(the_next_address_of_a_name_is_tried_if_one_refuses,
            the_next_address_of_a_name_is_tried_if_one_is_silent,
            each_address_of_a_name_that_did_not_answer_is_named,
            an_address_that_did_not_answer_is_named_once, an_address_with_colons_is_in_brackets),
      TESTS(no_bytes_are_no_reply), CASE("slow names"),
      TESTS(a_name_that_takes_long_holds_up_no_other, a_name_that_does_not_exist_is_said),
      CASE("passwords"),
      TESTS(a_server_cannot_send_the_password_to_others, others_are_asked_if_there_is_no_password,
            a_cluster_that_is_named_gets_the_password,
            a_cluster_that_is_named_by_names_gets_the_password),
      CASE("certificates"), FIXTURE(make_folder, remove_folder),
      TESTS(the_next_address_of_a_name_is_tried_if_one_has_no_tls),
      LOOPS(ARRAY_SIZE(certificates), with_tls_the_password_goes_to_certificates_of_named_servers))
