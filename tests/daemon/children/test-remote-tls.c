/* SPDX-License-Identifier: Apache-2.0 */

/*
 * TLS to Redis servers: which certificates are accepted, and connections that break or deliver
 * single bytes. Tests of the remote tier that run with TLS check that blocks come back unchanged.
 */

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/daemon/children/remote_tier.h"
#include "tests/lib/certificates.h"
#include "tests/lib/suite.h"

static void prepare(void) {
        make_tokens();
        make_certificates();
        more[0] = "daemon.remote_timeout=10000";
}

static void start_server(const struct redis_tls *tls) {
        n_servers = 1;
        redis_start(&servers[0], tls);
}

static void start_own(void) {
        prepare();
        start_server(&server_tls);
}

/* Returns "daemon.SETTING=PATH" for a file of tls_folder. */
static const char *with_file(const char *setting, const char *file) {
        static char lines[16][160]; /* more than a test needs */
        static uint32_t n;
        char *line = lines[n++ % ARRAY_SIZE(lines)];

        snprintf(line, sizeof lines[0], "daemon.%s=%s/%s", setting, tls_folder, file);
        return line;
}

static void goes_round(void) {
        write_chain(&machines[0]);
        evict_all(&machines[0]);
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        ck_assert_uint_eq(tier(&machines[0]).wrong, 0);
}

/* Waits until its server, which was away, is on, and all blocks are fetched. */
static void comes_back(void) {
        WAIT_UNTIL(tier_is(&machines[0], "on"));
        WAIT_UNTIL((evict_all(&machines[0]), fetch(&machines[0]),
                    resident(&machines[0], tokens) == BLOCKS));
}

static void is_away(const char *why) {
        start_machine(&machines[0], "away");
        ck_assert_msg(strstr(why_away(&machines[0]), why), "%s", why_away(&machines[0]));
        ck_assert(!fetch(&machines[0]));
        stop_machine(&machines[0]);
}

/* ---- servers' certificates ------------------------------------------------------------------- */

static const struct {
        const char *names, *issuer; /* of the server's certificate */
        int days;
        const char *host, *ca, *why; /* address and CA that kvd uses; why: NULL if it is accepted */
} servers_that[] = {
        {"IP:127.0.0.1", "ca", 30, "127.0.0.1", "ca.pem", NULL},
        {"DNS:localhost", "ca", 30, "localhost", "ca.pem", NULL},
        {"DNS:localhost", NULL, 30, "localhost", "other.pem", NULL}, /* it is its own CA */
        {"IP:127.0.0.1", "ca", 30, "127.0.0.1", "strangers.pem", "certificate verify failed: "},
        {"IP:127.0.0.1", "ca", 30, "127.0.0.1", NULL, "certificate verify failed: "},
        {"IP:127.0.0.1", NULL, 30, "127.0.0.1", "ca.pem",
         "certificate verify failed: self-signed certificate"},
        {"IP:127.0.0.1", "ca", -1, "127.0.0.1", "ca.pem",
         "certificate verify failed: certificate has expired"},
        {"DNS:elsewhere", "ca", 30, "localhost", "ca.pem",
         "certificate verify failed: hostname mismatch"},
        {"DNS:localhost", "ca", 30, "127.0.0.1", "ca.pem",
         "certificate verify failed: IP address mismatch"},
};

START_TEST(certificates_are_verified) {
        const char *ca = servers_that[_i].ca, *why = servers_that[_i].why;

        certificate_make(tls_folder, "strangers", NULL, NULL, 30);
        certificate_make(tls_folder, "other", servers_that[_i].names, servers_that[_i].issuer,
                         servers_that[_i].days);
        start_server(&(struct redis_tls){.folder = tls_folder, .name = "other"});
        tls_host = servers_that[_i].host;
        more[1] = ca ? with_file("remote_ca", ca) : "daemon.remote_ca=";
        if (why) {
                is_away(why);
                return;
        }
        start_machine(&machines[0], "on");
        goes_round();
}
END_TEST

/* A server whose certificate is renewed is used again. */
START_TEST(a_renewed_certificate_is_believed) {
        certificate_make(tls_folder, "other", "IP:127.0.0.1", "ca", -1);
        start_server(&(struct redis_tls){.folder = tls_folder, .name = "other"});
        start_machine(&machines[0], "away");
        redis_again(&servers[0], &server_tls);
        WAIT_UNTIL(tier_is(&machines[0], "on"));
        goes_round();
}
END_TEST

/* ---- kvd's certificate ----------------------------------------------------------------------- */

START_TEST(a_server_asks_for_a_certificate) {
        start_server(&(struct redis_tls){.folder = tls_folder, .name = "server", .asks = true});
        is_away("certificate required");
        certificate_make(tls_folder, "strangers", NULL, NULL, 30);
        certificate_make(tls_folder, "kvd", "DNS:kvd", "strangers", 30);
        more[1] = with_file("remote_certificate", "kvd.pem");
        more[2] = with_file("remote_certificate_key", "kvd.key");
        is_away("unknown ca");
        certificate_make(tls_folder, "kvd", "DNS:kvd", "ca", 30);
        start_machine(&machines[0], "on");
        goes_round();
        kill_remote_process(&machines[0]); /* the next one gets the files, too */
        goes_round();
}
END_TEST

/* ---- servers that speak something else ------------------------------------------------------- */

/* Such a server may take the handshake for the beginning of a command and wait for the rest. */
START_TEST(a_server_without_tls_is_away) {
        more[0] = "daemon.remote_timeout=500";
        start_server(NULL);
        start_machine(&machines[0], "away");
        WAIT_UNTIL(strstr(why_away(&machines[0]), "it does not speak TLS") ||
                   strstr(why_away(&machines[0]),
                          "it did not continue the TLS handshake within 500 ms"));
        ck_assert(!fetch(&machines[0]));
}
END_TEST

/* It sends an invalid reply, and mostly closes the connection before the reply is read. */
START_TEST(a_server_with_tls_wants_it) {
        char remote[64];

        start_server(&server_tls);
        snprintf(remote, sizeof remote, "daemon.remote=redis://127.0.0.1:%u", servers[0].port);
        more[1] = remote;
        more[2] = "daemon.remote_ca=";
        start_machine(&machines[0], "away");
        ck_assert_msg(strstr(why_away(&machines[0]), "it sent an invalid reply") ||
                              strstr(why_away(&machines[0]), "reset by peer") ||
                              strstr(why_away(&machines[0]), "it closed the connection"),
                      "%s", why_away(&machines[0]));
        ck_assert(!fetch(&machines[0]));
}
END_TEST

/* ---- connections that break or deliver single bytes ------------------------------------------ */

/* Forwards connections in small pieces, and cuts them after a number of bytes. */
static struct {
        int fd;
        uint16_t to;
        pthread_t thread;
        _Atomic uint64_t most;   /* bytes to the client, after which a connection is cut */
        _Atomic uint64_t single; /* number of first bytes in each direction that go one by one */
        _Atomic uint32_t cuts;
} proxy;

static int connect_to_server(void) {
        struct sockaddr_in a = {.sin_family = AF_INET,
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                .sin_port = htons(proxy.to)};
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
                return fd;
        close(fd);
        return -1;
}

/* Returns false if one of them has ended, or the connection is to be cut. */
static bool carry_over(int from, int to, uint64_t *carried, uint64_t most) {
        static uint8_t data[1021]; /* not the size of a record */
        size_t wanted = *carried < proxy.single ? 1 : sizeof data;
        ssize_t n = recv(from, data, MIN(wanted, most - *carried), 0);

        if (n <= 0 || send(to, data, (size_t)n, MSG_NOSIGNAL) != n)
                return false;
        *carried += (uint64_t)n;
        if (*carried >= most)
                proxy.cuts++;
        return *carried < most;
}

static void carry_all(int client, int server) {
        struct pollfd p[2] = {{.fd = client, .events = POLLIN}, {.fd = server, .events = POLLIN}};
        uint64_t up = 0, down = 0;
        bool goes = true;

        while (goes && poll(p, 2, -1) > 0) {
                if (p[0].revents)
                        goes = carry_over(client, server, &up, UINT64_MAX);
                if (goes && p[1].revents)
                        goes = carry_over(server, client, &down, proxy.most);
        }
}

static void *be_proxy(void *data) {
        int client, server, one = 1;

        while ((client = accept(proxy.fd, NULL, NULL)) >= 0) {
                server = connect_to_server();
                setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                if (server >= 0)
                        carry_all(client, server);
                close(client);
                close(server);
        }
        return NULL;
}

/* Machines that start later connect to the proxy. */
static void start_proxy(uint64_t most, uint64_t single) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t n = sizeof a;

        start_own();
        proxy.most = most;
        proxy.single = single;
        proxy.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        ck_assert_int_eq(bind(proxy.fd, (struct sockaddr *)&a, n), 0);
        ck_assert_int_eq(listen(proxy.fd, 8), 0);
        ck_assert_int_eq(getsockname(proxy.fd, (struct sockaddr *)&a, &n), 0);
        proxy.to = servers[0].port;
        servers[0].port = ntohs(a.sin_port);
        ck_assert_int_eq(pthread_create(&proxy.thread, NULL, be_proxy, NULL), 0);
}

static void stop_proxy(void) {
        stop_all(); /* first, so that no connection is left */
        shutdown(proxy.fd, SHUT_RDWR);
        pthread_join(proxy.thread, NULL);
        close(proxy.fd);
}

static void start_dripping(void) {
        start_proxy(UINT64_MAX, 20000);
}

/* Records come in pieces, even their headers and the handshake. */
START_TEST(bytes_come_one_by_one) {
        start_machine(&machines[0], "on");
        goes_round();
}
END_TEST

static void start_whole_wire(void) {
        start_proxy(UINT64_MAX, 0);
}

/*
 * The current connection and later ones are cut in the handshake, between records or within one,
 * without a closing alert.
 */
START_TEST(a_wire_is_cut_anywhere) {
        static const uint32_t most[] = {1, 100, 1500, 5000, 30000, 100000, 500000};
        uint32_t cuts;

        start_machine(&machines[0], "on");
        write_chain(&machines[0]);
        for (uint32_t i = 0; i < ARRAY_SIZE(most); i++) {
                cuts = proxy.cuts;
                proxy.most = most[i];
                WAIT_UNTIL((evict_all(&machines[0]), fetch(&machines[0]), proxy.cuts > cuts + 1));
                proxy.most = UINT64_MAX;
                comes_back();
        }
        ck_assert_uint_eq(tier(&machines[0]).wrong, 0);
}
END_TEST

/* ---- a server that dies ---------------------------------------------------------------------- */

START_TEST(a_server_dies_in_the_middle_and_comes_back) {
        start_machine(&machines[0], "on");
        for (uint32_t i = 0; i < 6; i++) {
                struct pollfd p = {.events = POLLIN};

                write_chain(&machines[0]);
                evict_all(&machines[0]);
                ck_assert_int_ge(kvd_fetch(machines[0].space, 0, 0, tokens, n_tokens, &p.fd), 0);
                usleep(1500 * i);
                redis_again(&servers[0], &server_tls);
                ck_assert(p.fd < 0 || poll(&p, 1, PATIENCE_MS) == 1);
                close(p.fd);
                WAIT_UNTIL(tier_is(&machines[0], "on"));
                resident(&machines[0], tokens);
        }
        make_chain(&machines[0], tokens);
        WAIT_UNTIL(atoi(REDIS(&servers[0], "DBSIZE")) == BLOCKS); /* it had lost its data */
        comes_back();
        ck_assert_uint_eq(tier(&machines[0]).wrong, 0);
}
END_TEST

/* ---- settings -------------------------------------------------------------------------------- */

static void refused(const char *remote, const char *const *files, const char *why) {
        char command[1024], said[1024];
        size_t n;
        FILE *f;

        n = (size_t)snprintf(command, sizeof command,
                             "%s --private %s/run --pool 4M --backend host --set daemon.remote=%s",
                             getenv("KVD"), tls_folder, remote);
        for (; *files; files++)
                n += (size_t)snprintf(command + n, sizeof command - n, " --set %s", *files);
        snprintf(command + n, sizeof command - n, " 2>&1");
        f = popen(command, "r");
        said[fread(said, 1, sizeof said - 1, f)] = 0;
        ck_assert_int_ne(pclose(f), 0);
        ck_assert_msg(strstr(said, why), "%s", said);
}
#define REFUSED(remote, why, ...) refused(remote, SETTINGS(__VA_ARGS__), why)

START_TEST(files_that_make_no_sense_are_refused) {
        const char *good = with_file("remote_certificate", "server.pem");
        const char *key = with_file("remote_certificate_key", "server.key");
        char path[96];

        certificate_lock_key(tls_folder, "server", "locked");
        REFUSED("redis://h", "for rediss:// servers", with_file("remote_ca", "ca.pem"));
        REFUSED("mooncake://h", "for rediss:// servers", with_file("remote_ca", "ca.pem"));
        REFUSED("rediss://h", "No such file", with_file("remote_ca", "none"));
        REFUSED("rediss://h", "remote_ca: no certificates in PEM",
                with_file("remote_ca", "server.key"));
        REFUSED("rediss://h", "remote_ca /tmp: it is not a regular file", "daemon.remote_ca=/tmp");
        REFUSED("rediss://h", "need each other", good);
        REFUSED("rediss://h", "need each other", key);
        REFUSED("rediss://h", "does not match remote_certificate", good,
                with_file("remote_certificate_key", "ca.key"));
        REFUSED("rediss://h", "no private key in PEM", good,
                with_file("remote_certificate_key", "locked.key"));
        snprintf(path, sizeof path, "%s/server.key", tls_folder);
        ck_assert_int_eq(chmod(path, 0640), 0);
        REFUSED("rediss://h", "others may read or change it", good, key);
}
END_TEST

SUITE("remote-tls", SKIP_IF(!redis_has_tls()), CASE("certificates"), FIXTURE(prepare, stop_all),
      LOOPS(ARRAY_SIZE(servers_that), certificates_are_verified),
      TESTS(a_renewed_certificate_is_believed, a_server_asks_for_a_certificate,
            a_server_without_tls_is_away, a_server_with_tls_wants_it,
            files_that_make_no_sense_are_refused),
      CASE("death"), FIXTURE(start_own, stop_all),
      TESTS(a_server_dies_in_the_middle_and_comes_back), CASE("drips"),
      FIXTURE(start_dripping, stop_proxy), TESTS(bytes_come_one_by_one), CASE("cuts"),
      FIXTURE(start_whole_wire, stop_proxy), TESTS(a_wire_is_cut_anywhere))
