/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The remote tier on Redis servers, with TLS or without: servers that want a password, a Cluster
 * whose slots move and whose servers die, a lost key, and servers that do not speak Redis.
 */

#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/daemon/children/remote_tier.h"
#include "tests/lib/log_lines.h"
#include "tests/lib/suite.h"

static void start_a_cluster(void) {
        make_tokens();
        if (on_tls())
                make_certificates();
        n_servers = REDIS_CLUSTER;
        redis_start_cluster(servers, on_tls() ? &server_tls : NULL);
}

static void start_on_cluster(void) {
        start_a_cluster();
        for (uint32_t i = 0; i < MACHINES; i++)
                start_machine(&machines[i], "on");
}

/* ---- servers that do not speak Redis --------------------------------------------------------- */

static const struct {
        const char *says; /* reply to any request; NULL: it closes the connection */
        bool slowly;      /* a byte at a time, for ever */
} strange[] = {
        {NULL, false},
        {"", false},
        {"hello", false},
        {"$99999999999999\r\n", false},
        {"*1\r\n*2000000\r\n", false},
        {"+PONG\r\n+PONG\r\n+PONG\r\n", false},
        {"-NOAUTH Authentication required.\r\n", false},
        {"+PONG", true},
        {"-\x1b]0;x\x07 \xff\r\n", false}, /* a control sequence of terminals */
};
static int strange_fd;
static _Atomic bool strange_ends;

static void be_strange(int fd, uint32_t how) {
        char data[512];
        ssize_t n;

        while (strange[how].says && (n = recv(fd, data, sizeof data, 0)) > 0) {
                size_t size = strlen(strange[how].says);

                send(fd, strange[how].says, size, MSG_NOSIGNAL);
                while (strange[how].slowly && !strange_ends && send(fd, "G", 1, MSG_NOSIGNAL) == 1)
                        usleep(20000);
        }
        close(fd);
}

static void *strange_server(void *data) {
        uint32_t how = *(uint32_t *)data;
        int fd;

        while ((fd = accept(strange_fd, NULL, NULL)) >= 0)
                be_strange(fd, how);
        return NULL;
}

static void prepare_for_strange(void) {
        make_tokens();
        if (on_tls())
                make_certificates();
}

static void listen_strangely(void) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t n = sizeof a;

        strange_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        ck_assert_int_eq(bind(strange_fd, (struct sockaddr *)&a, n), 0);
        ck_assert_int_eq(listen(strange_fd, 8), 0);
        ck_assert_int_eq(getsockname(strange_fd, (struct sockaddr *)&a, &n), 0);
        servers[0].port = ntohs(a.sin_port);
}

START_TEST(strange_servers_are_away) {
        uint32_t how = (uint32_t)_i;
        pthread_t thread;

        more[0] = "daemon.remote_timeout=100";
        listen_strangely();
        ck_assert_int_eq(pthread_create(&thread, NULL, strange_server, &how), 0);
        start_machine(&machines[0], "away");
        ck_assert(!fetch(&machines[0]));
        make_chain(&machines[0], tokens);
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        ck_assert_uint_gt(tier(&machines[0]).why.size, 0);
        ck_assert_msg(!strstr(why_away(&machines[0]), "its process ended"), "%s",
                      why_away(&machines[0]));
        strange_ends = true;
        stop_machine(&machines[0]);
        shutdown(strange_fd, SHUT_RDWR);
        pthread_join(thread, NULL);
        close(strange_fd);
}
END_TEST

/* ---- servers that refuse --------------------------------------------------------------------- */

static void start_and_read_log(void) {
        log_catch();
        start_all();
}

static void stop_and_let_log_go(void) {
        stop_all();
        log_let_go();
}

static bool why_has(const char *words) {
        return strstr(why_away(&machines[0]), words);
}

/* A replica after a fail-over. */
START_TEST(a_replica_says_why_it_takes_nothing) {
        char place[32];

        snprintf(place, sizeof place, "127.0.0.1:%u", servers[0].port);
        ck_assert_str_eq(REDIS(&servers[0], "REPLICAOF", "127.0.0.1", "1"), "OK");
        REDIS(&servers[0], "CONFIG", "SET", "replica-serve-stale-data", "yes");
        make_chain(&machines[0], tokens);
        WAIT_UNTIL(tier(&machines[0]).errors >= BLOCKS);
        ck_assert(tier_is(&machines[0], "on"));
        ck_assert_msg(why_has("last error: ") && why_has(place) && why_has(": READONLY "), "%s",
                      why_away(&machines[0]));
        WAIT_UNTIL(tier(&machines[0]).errors >= 3 * BLOCKS);
        ck_assert_uint_ge(log_count("READONLY"), 1);
        ck_assert_uint_le(log_count("READONLY"), 10);
}
END_TEST

/* A request that the server did not permit used to count as a miss, not as an error. */
START_TEST(a_server_that_may_not_be_asked_says_so) {
        write_chain(&machines[0]);
        ck_assert_str_eq(REDIS(&servers[0], "ACL", "SETUSER", "default", "-exists"), "OK");
        ck_assert(fetch(&machines[1]));
        WAIT_UNTIL(tier(&machines[1]).errors >= BLOCKS);
        ck_assert_msg(strstr(why_away(&machines[1]), "NOPERM"), "%s", why_away(&machines[1]));
        ck_assert_str_eq(REDIS(&servers[0], "ACL", "SETUSER", "default", "+exists", "-get"), "OK");
        ck_assert(fetch(&machines[1]));
        WAIT_UNTIL(tier(&machines[1]).errors >= 2 * BLOCKS);
        ck_assert_uint_eq(resident(&machines[1], tokens), 0);
        ck_assert_uint_ge(log_count("NOPERM"), 1);
}
END_TEST

START_TEST(servers_that_answer_again_are_said_to) {
        ck_assert_int_eq(kill(servers[0].pid, SIGKILL), 0);
        WAIT_UNTIL(tier_is(&machines[0], "away"));
        ck_assert_uint_ge(log_count("remote: 1 of 1 servers is away: 127.0.0.1:"), 1);
        redis_again(&servers[0], on_tls() ? &server_tls : NULL);
        WAIT_UNTIL(tier_is(&machines[0], "on"));
        WAIT_UNTIL(log_count("remote: 1 of 1 servers answer") > 0);
}
END_TEST

/* ---- passwords ------------------------------------------------------------------------------- */

static void write_password(const char *text) {
        int fd;

        snprintf(password_file, sizeof password_file, "/var/tmp/kvd-remote-password-%d", getpid());
        fd = open(password_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        ck_assert_int_eq(write(fd, text, strlen(text)), strlen(text));
        close(fd);
}

static void forget_password(void) {
        unlink(password_file);
        password_file[0] = 0;
}

/* Expects this state, and this message about the server, of a machine with that password. */
static void with_password(const char *text, const char *state, const char *why) {
        if (text)
                write_password(text);
        start_machine(&machines[0], state);
        ck_assert_msg(strstr(why_away(&machines[0]), why), "%s", why_away(&machines[0]));
        if (strcmp(state, "on") == 0) {
                write_chain(&machines[0]);
                evict_all(&machines[0]);
                kill_remote_process(&machines[0]);
                ck_assert(fetch(&machines[0]));
                ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        }
        stop_machine(&machines[0]);
        forget_password();
}

START_TEST(a_password_is_told) {
        ck_assert_str_eq(REDIS(&servers[0], "CONFIG", "SET", "requirepass", "open:sesame"), "OK");
        with_password(NULL, "away", "NOAUTH");
        with_password("sesame\n", "away", "WRONGPASS");
        with_password(":open:sesame\n", "on", "");
}
END_TEST

START_TEST(a_user_is_told) {
        ck_assert_str_eq(REDIS(&servers[0], "ACL", "SETUSER", "kvd", "on", ">sesame", "~*",
                               "+@all"),
                         "OK");
        ck_assert_str_eq(REDIS(&servers[0], "CONFIG", "SET", "requirepass", "another"), "OK");
        with_password("kvd:another", "away", "WRONGPASS");
        with_password("kvd:sesame", "on", "");
}
END_TEST

/* Names all servers, or only one with TLS, as the others have its certificate. */
static void name_all(char *line, size_t size) {
        size_t n = (size_t)snprintf(line, size, "daemon.remote=%s://",
                                    on_tls() ? "rediss" : "redis");

        for (uint32_t i = 0; i < (on_tls() ? 1 : n_servers); i++)
                n += (size_t)snprintf(line + n, size - n, "%s127.0.0.1:%u", i ? "," : "",
                                      servers[i].port);
        more[0] = line;
}

START_TEST(a_cluster_asks_for_a_password) {
        char remote[96];

        for (uint32_t i = 0; i < n_servers; i++)
                ck_assert_str_eq(REDIS(&servers[i], "CONFIG", "SET", "requirepass", "sesame"),
                                 "OK");
        name_all(remote, sizeof remote);
        write_password("sesame");
        start_machine(&machines[0], "on");
        ck_assert_uint_eq(tier(&machines[0]).servers, REDIS_CLUSTER);
        write_chain(&machines[0]);
        evict_all(&machines[0]);
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        forget_password();
}
END_TEST

/* ---- settings -------------------------------------------------------------------------------- */

static void refused(const char *setting) {
        struct instance in;

        instance_make_dir(&in);
        instance_run(&in,
                     (const char *const[]){"--private", in.dir, "--pool", "4M", "--backend", "host",
                                           "--set", "daemon.remote=redis://127.0.0.1:1", "--set",
                                           setting, NULL},
                     false);
        ck_assert_int_ne(wait_status(in.pid), 0);
        instance_sweep(&in);
}

START_TEST(settings_that_make_no_sense_are_refused) {
        char setting[96];

        refused("daemon.remote=127.0.0.1:6379");
        refused("daemon.remote=redis://");
        refused("daemon.remote=redis://host:0");
        refused("daemon.remote=redis://host:65536");
        refused("daemon.remote=redis://host,,other");
        refused("daemon.remote=redis://user:sesame@host");
        refused("daemon.remote=rediss://host:0");
        refused("daemon.remote_library=/lib/libmooncake_store.so"); /* with redis:// */
        refused("daemon.remote=http://host:80");
        refused("daemon.remote=mooncake://");
        refused("daemon.remote=mooncake://host:0");
        refused("daemon.remote=mooncake://host,other");
        refused("daemon.remote_key=/nonexistent");
        refused("domain d.remote_prefix=a:b");
        make_key(0, 1);
        snprintf(setting, sizeof setting, "daemon.remote_key=%s", key_file[0]);
        ck_assert_int_eq(chmod(key_file[0], 0644), 0); /* others may read it */
        refused(setting);
        ck_assert_int_eq(truncate(key_file[0], 15), 0);
        ck_assert_int_eq(chmod(key_file[0], 0600), 0); /* it is too short */
        refused(setting);
        unlink(key_file[0]);
        refused("daemon.remote_password=/nonexistent");
        write_password("two\nlines");
        snprintf(setting, sizeof setting, "daemon.remote_password=%s", password_file);
        refused(setting);
        write_password("");
        refused(setting);
        write_password("sesame");
        ck_assert_int_eq(chmod(password_file, 0640), 0);
        refused(setting);
        forget_password();
}
END_TEST

/* ---- a Cluster ------------------------------------------------------------------------------- */

START_TEST(a_cluster_is_one) {
        write_chain(&machines[0]);
        ck_assert_uint_eq(tier(&machines[0]).servers, REDIS_CLUSTER);
        for (uint32_t i = 0; i < REDIS_CLUSTER; i++)
                ck_assert_str_ne(REDIS(&servers[i], "DBSIZE"), "0");
        ck_assert(fetch(&machines[1]));
        ck_assert_uint_eq(resident(&machines[1], tokens), BLOCKS);
}
END_TEST

/* Returns the number of chains whose first block is found. */
static uint32_t fetch_each(struct machine *m, uint32_t chains) {
        uint32_t found = 0;

        for (uint32_t i = 0; i < chains; i++) {
                uint32_t chain[BLOCKS * BLOCK_TOKENS];

                for (uint32_t k = 0; k < ARRAY_SIZE(chain); k++)
                        chain[k] = i * 10000 + k;
                fetch_of(m, chain, 0);
                found += resident(m, chain) > 0;
        }
        return found;
}

START_TEST(one_of_a_cluster_dies) {
        uint32_t chain[BLOCKS * BLOCK_TOKENS], found;

        for (uint32_t i = 0; i < 12; i++) {
                uint64_t written = tier(&machines[0]).written_bytes;

                for (uint32_t k = 0; k < ARRAY_SIZE(chain); k++)
                        chain[k] = i * 10000 + k;
                make_chain(&machines[0], chain);
                WAIT_UNTIL(tier(&machines[0]).written_bytes >=
                           written + BLOCKS * (uint64_t)BLOCK_BYTES);
        }
        redis_stop(&servers[2]);
        WAIT_UNTIL(tier_is(&machines[1], "partly"));
        ck_assert_uint_eq(tier(&machines[1]).away, 1);
        found = fetch_each(&machines[1], 12);
        ck_assert_uint_gt(found, 0);
        ck_assert_uint_lt(found, 12);
        ck_assert_uint_eq(tier(&machines[1]).wrong, 0);
}
END_TEST

/* Requests for a slot that has moved go to its new server at once. */
START_TEST(a_slot_moves) {
        char id[64], slot[8];

        write_chain(&machines[0]);
        snprintf(id, sizeof id, "%.40s", REDIS(&servers[1], "CLUSTER", "MYID"));
        for (uint32_t i = 0; i < 100; i++) {
                snprintf(slot, sizeof slot, "%u", i);
                for (uint32_t k = 0; k < REDIS_CLUSTER; k++)
                        ck_assert_str_eq(REDIS(&servers[k], "CLUSTER", "SETSLOT", slot, "NODE", id),
                                         "OK");
        }
        evict_all(&machines[0]);
        make_chain(&machines[1], tokens);
        ck_assert(tier_is(&machines[0], "on"));
        WAIT_UNTIL(tier(&machines[1]).written_bytes >= BLOCKS * (uint64_t)BLOCK_BYTES);
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
}
END_TEST

/* ---- bidirectional prefixes ------------------------------------------------------------------ */

/* One of its blocks is missing on the servers. */
START_TEST(a_prefix_with_a_hole_is_missed) {
        char key[128];

        write_chain(&machines[0]);
        snprintf(key, sizeof key, "%s", REDIS(&servers[0], "RANDOMKEY"));
        ck_assert_str_eq(REDIS(&servers[0], "DEL", key), "1");
        ck_assert(fetch(&machines[1]));
        ck_assert_uint_eq(resident(&machines[1], tokens), 0);
        ck_assert_uint_eq(tier(&machines[1]).hits, 0);
        make_chain(&machines[1], tokens); /* only the missing block is sent */
        WAIT_UNTIL(servers_puts() == BLOCKS + 1);
        evict_all(&machines[0]);
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
}
END_TEST

SUITE("remote-redis", SKIP_IF(!servers_are_there()), CASE("cluster"),
      FIXTURE(start_on_cluster, stop_all),
      TESTS(a_cluster_is_one, one_of_a_cluster_dies, a_slot_moves), CASE("password"),
      FIXTURE(start_a_server, stop_all), TESTS(a_password_is_told, a_user_is_told),
      CASE("password of a cluster"), FIXTURE(start_a_cluster, stop_all),
      TESTS(a_cluster_asks_for_a_password), CASE("whole"), FIXTURE(start_whole, stop_all),
      TESTS(a_prefix_with_a_hole_is_missed), CASE("refusals"),
      FIXTURE(start_and_read_log, stop_and_let_log_go),
      TESTS(a_replica_says_why_it_takes_nothing, a_server_that_may_not_be_asked_says_so,
            servers_that_answer_again_are_said_to),
      CASE("strange"), FIXTURE(prepare_for_strange, stop_all),
      LOOPS(ARRAY_SIZE(strange), strange_servers_are_away),
      TESTS(settings_that_make_no_sense_are_refused))
