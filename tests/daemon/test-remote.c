/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The remote tier of real daemons on real servers: what one machine computed another one has, byte
 * for byte; a server that dies, hangs or lies costs blocks and nothing else; and what is on the
 * servers is nobody's who has not the key.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "client/kvd.h"
#include "ipc/base/util.h"
#include "tests/lib/oracle.h"
#include "tests/lib/peer.h"
#include "tests/lib/redis.h"
#include "tests/lib/suite.h"

#define MSG(name_, ...) ((struct kvd_msg){.number = KVD_MSG_##name_, .name_ = {__VA_ARGS__}})
#define BLOCK_TOKENS 16u
#define BLOCKS 48u
#define BLOCK_BYTES 16384u
#define SEED 17u
#define MACHINES 2u

static struct machine { /* a daemon and a client of it */
        struct instance in;
        struct peer_end *watcher;
        kvd *handle;
        kvd_space *space;
} machines[MACHINES];

static struct redis servers[REDIS_CLUSTER];
static uint32_t n_servers;
static char key_file[MACHINES][64]; /* "": without */
static char password_file[64];      /* "": without */
static const char *more = "daemon.remote_depth=0", *host_tier = "daemon.host_tier=0";
static uint32_t remote_tier; /* its number: copies of the host come before it */
static uint32_t tokens[BLOCKS * BLOCK_TOKENS];
static const struct kvd_geometry geometry = {.layers = 1,
                                             .kv_heads = 2,
                                             .head_dim = 64,
                                             .block_tokens = BLOCK_TOKENS,
                                             .dtype = KVD_F32,
                                             .vocab = 1u << 20};

/* ---- machines -------------------------------------------------------------------------------- */

static struct kvd_msg_tier_info_reply tier(struct machine *m) {
        return peer_ok(m->watcher, MSG(tier_info, .tier = remote_tier)).tier_info_reply;
}

static bool tier_is(struct machine *m, const char *state) {
        struct kvd_msg_tier_info_reply t = tier(m);

        return t.state.size == strlen(state) && memcmp(t.state.data, state, t.state.size) == 0;
}

static void open_space(struct machine *m, const char *name, const struct kvd_geometry *of) {
        ck_assert_msg(kvd_space_open(m->handle, name, of, NULL, &m->space) == 0, "%s",
                      kvd_error());
}

static void start_machine(struct machine *m, const char *state) {
        char remote[128], key[160], password[160];
        uint32_t number = (uint32_t)(m - machines);

        snprintf(remote, sizeof remote, "daemon.remote=redis://127.0.0.1:%u", servers[0].port);
        snprintf(key, sizeof key, "daemon.remote_key=%s", key_file[number]);
        snprintf(password, sizeof password, "daemon.remote_password=%s", password_file);
        instance_start(&m->in, SETTINGS("daemon.pool=4M", "daemon.segment=1M", remote, key, password, more,
                                        host_tier, "daemon.host_tier_depth=0"));
        m->watcher = peer_attach(m->in.socket);
        WAIT_UNTIL(tier_is(m, state));
        ck_assert_msg(kvd_open(m->in.socket, &m->handle) == 0, "%s", kvd_error());
        open_space(m, "s", &geometry);
}

static void stop_machine(struct machine *m) {
        if (!m->watcher)
                return;
        m->space = kvd_space_close(m->space);
        m->handle = kvd_close(m->handle);
        m->watcher = peer_close(m->watcher);
        instance_end_clean(&m->in);
}

static void make_tokens(void) {
        for (uint32_t i = 0; i < ARRAY_SIZE(tokens); i++)
                tokens[i] = 1000 + i;
}

static void start_a_server(void) {
        make_tokens();
        n_servers = 1;
        redis_start(&servers[0]);
}

static void start_all(void) {
        start_a_server();
        for (uint32_t i = 0; i < MACHINES; i++)
                start_machine(&machines[i], "on");
}

static void start_with_host_tier(void) {
        remote_tier = 1;
        host_tier = "daemon.host_tier=4M";
        start_all();
}

static void start_a_cluster(void) {
        make_tokens();
        n_servers = REDIS_CLUSTER;
        redis_start_cluster(servers);
}

static void start_on_cluster(void) {
        start_a_cluster();
        for (uint32_t i = 0; i < MACHINES; i++)
                start_machine(&machines[i], "on");
}

static void stop_all(void) {
        for (uint32_t i = 0; i < MACHINES; i++)
                stop_machine(&machines[i]);
        for (uint32_t i = 0; i < n_servers; i++)
                redis_stop(&servers[i]);
        for (uint32_t i = 0; i < MACHINES; i++)
                if (key_file[i][0])
                        unlink(key_file[i]);
}

/* ---- chains ---------------------------------------------------------------------------------- */

static void make_chain(struct machine *m, const uint32_t *of) {
        struct kvd_block blocks[BLOCKS];
        struct kvd_pin pin = {0};
        uint32_t n = 0;

        while (n < BLOCKS) {
                int r = kvd_alloc(m->space, BLOCKS - n, blocks + n);

                ck_assert_msg(r > 0, "%s", kvd_error());
                n += (uint32_t)r;
        }
        for (uint32_t i = 0; i < BLOCKS; i++)
                oracle_fill(blocks[i].data, BLOCK_BYTES,
                            oracle_seed(SEED, of, (i + 1) * BLOCK_TOKENS));
        ck_assert_msg(kvd_seal(m->space, &pin, BLOCKS, blocks, of, BLOCKS * BLOCK_TOKENS) >= 0,
                      "%s", kvd_error());
        kvd_unpin(m->space, &pin);
}

/* The blocks that are resident; all of them must be right. */
static uint32_t resident(struct machine *m, const uint32_t *of) {
        struct kvd_pin pin = {0};
        uint32_t ids[BLOCKS];
        int64_t n;

        kvd_catch_up(m->space);
        n = kvd_lookup(m->space, 0, of, BLOCKS * BLOCK_TOKENS, ids, BLOCKS, &pin);
        ck_assert_int_ge(n, 0);
        for (uint32_t i = 0; i < n / BLOCK_TOKENS; i++)
                ck_assert_uint_eq(oracle_wrong(kvd_pin_block(&pin, ids[i]), BLOCK_BYTES,
                                               oracle_seed(SEED, of, (i + 1) * BLOCK_TOKENS)),
                                  0);
        kvd_unpin(m->space, &pin);
        return (uint32_t)(n / BLOCK_TOKENS);
}

/* Waits until it has ended. False: there was nothing to wait for. */
static bool fetch_of(struct machine *m, const uint32_t *of, uint64_t salt) {
        struct pollfd p = {.events = POLLIN};
        int64_t n = kvd_fetch(m->space, 0, salt, of, BLOCKS * BLOCK_TOKENS, &p.fd);

        ck_assert_msg(n >= 0, "%s", kvd_error());
        if (p.fd < 0)
                return false;
        ck_assert_int_eq(poll(&p, 1, PATIENCE_MS), 1);
        close(p.fd);
        return true;
}

static bool fetch(struct machine *m) {
        return fetch_of(m, tokens, 0);
}

static void evict_all(struct machine *m) {
        struct kvd_msg_evict_reply r;

        do {
                r = peer_ok(m->watcher, MSG(evict, .space = kvd_slice_of("s"))).evict_reply;
        } while (r.more);
        ck_assert_uint_eq(resident(m, tokens), 0);
}

static void write_chain(struct machine *m) {
        make_chain(m, tokens);
        WAIT_UNTIL(tier(m).written_bytes >= BLOCKS * (uint64_t)BLOCK_BYTES);
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
        ck_assert(!fetch(&machines[1])); /* all of it is there */
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

/* What another machine computed as well is not sent twice. */
START_TEST(what_is_there_is_not_sent_again) {
        write_chain(&machines[0]);
        ck_assert_uint_eq(redis_calls(&servers[0], "set"), BLOCKS);
        write_chain(&machines[1]);
        ck_assert_uint_eq(redis_calls(&servers[0], "set"), BLOCKS);
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

/* A space with a fingerprint is found by it, whatever its name; one without by its name. */
START_TEST(spaces_are_what_their_fingerprint_says) {
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
        ck_assert_int_eq(kill(servers[0].pid, SIGSTOP), 0);
        fetch(&machines[0]); /* it may be known by now that it hangs */
        WAIT_UNTIL(tier_is(&machines[0], "away"));
        ck_assert_uint_eq(tier(&machines[0]).away, 1);
        /* from now on nobody waits: there is no descriptor, and allocations go on */
        for (uint32_t i = 0; i < 100; i++)
                ck_assert(!fetch(&machines[0]));
        make_chain(&machines[0], tokens);
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        evict_all(&machines[0]);
        ck_assert_int_eq(kill(servers[0].pid, SIGCONT), 0);
        WAIT_UNTIL(tier_is(&machines[0], "on"));
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
}
END_TEST

/* What was on a server that lost all is written again. */
START_TEST(a_server_that_forgot_is_told_again) {
        write_chain(&machines[0]);
        REDIS(&servers[0], "FLUSHALL");
        REDIS(&servers[0], "CLIENT", "KILL", "TYPE", "normal");
        WAIT_UNTIL(tier(&machines[0]).written_bytes >= 2 * BLOCKS * (uint64_t)BLOCK_BYTES);
        /* the other one may find only now that its connection is closed */
        WAIT_UNTIL((fetch(&machines[1]), resident(&machines[1], tokens) == BLOCKS));
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

/* A value that is right, but another block's. */
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
        static size_t (*const lies[])(uint8_t *, size_t) = {flip, flip, flip, flip, flip,
                                                            cut,  grow, empty, swap};
        static const uint32_t at[] = {3, 17, 25, 40, 9999};
        uint32_t n;

        which = (uint32_t)_i < ARRAY_SIZE(at) ? at[_i] : 0;
        write_chain(&machines[0]);
        n = redis_change(&servers[0], "", lies[_i]);
        ck_assert_uint_eq(n, BLOCKS);
        ck_assert(fetch(&machines[1]));
        /* swap leaves one as it was, which may be the first */
        ck_assert_uint_le(resident(&machines[1], tokens), lies[_i] == swap);
        ck_assert_uint_ge(tier(&machines[1]).wrong, BLOCKS - 1);
        ck_assert(tier_is(&machines[1], "on"));
}
END_TEST

/* ---- key files ------------------------------------------------------------------------------- */

static void make_key(uint32_t machine, uint8_t byte) {
        uint8_t key[32];
        int fd;

        memset(key, byte, sizeof key);
        snprintf(key_file[machine], sizeof key_file[machine], "/var/tmp/kvd-remote-key-%d-%u",
                 getpid(), machine);
        fd = open(key_file[machine], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        ck_assert_int_eq(write(fd, key, sizeof key), sizeof key);
        close(fd);
}

/* ---- servers that are none ------------------------------------------------------------------- */

static const struct {
        const char *says; /* to whatever it is told; NULL: it hangs up */
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
};
static int strange_fd;
static _Atomic bool strange_ends;

static void be_strange(int fd, uint32_t how) {
        char data[512];
        ssize_t n;

        while (strange[how].says && (n = recv(fd, data, sizeof data, 0)) > 0) {
                size_t size = strlen(strange[how].says);

                send(fd, strange[how].says, size, MSG_NOSIGNAL);
                while (strange[how].slowly && !strange_ends &&
                       send(fd, "G", 1, MSG_NOSIGNAL) == 1)
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

        make_tokens();
        listen_strangely();
        ck_assert_int_eq(pthread_create(&thread, NULL, strange_server, &how), 0);
        start_machine(&machines[0], "away");
        ck_assert(!fetch(&machines[0]));
        make_chain(&machines[0], tokens);
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
        ck_assert_uint_gt(tier(&machines[0]).why.size, 0);
        strange_ends = true;
        stop_machine(&machines[0]);
        shutdown(strange_fd, SHUT_RDWR);
        pthread_join(thread, NULL);
        close(strange_fd);
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

/* The process that has the connections; 0: there is none. */
static pid_t remote_process(const struct machine *m) {
        return child_of(m->in.pid, "kvd-remote");
}

/* The next one is told the password, too. */
static void kill_remote_process(struct machine *m) {
        pid_t pid = remote_process(m);

        ck_assert_int_gt(pid, 0);
        kill(pid, SIGKILL);
        WAIT_UNTIL(remote_process(m) > 0 && remote_process(m) != pid && tier_is(m, "on"));
}

/* How a machine is with that password, and what it says of its server then. */
static void with_password(const char *text, const char *state, const char *why) {
        struct kvd_msg_tier_info_reply t;
        char said[128];

        if (text)
                write_password(text);
        start_machine(&machines[0], state);
        t = tier(&machines[0]);
        ck_assert_msg(strstr(kvd_slice_copy(t.why, said, sizeof said), why), "%s", said);
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
        ck_assert_str_eq(REDIS(&servers[0], "ACL", "SETUSER", "kvd", "on", ">sesame", "~*", "+@all"),
                         "OK");
        ck_assert_str_eq(REDIS(&servers[0], "CONFIG", "SET", "requirepass", "another"), "OK");
        with_password("kvd:another", "away", "WRONGPASS");
        with_password("kvd:sesame", "on", "");
}
END_TEST

START_TEST(a_cluster_asks_for_a_password) {
        for (uint32_t i = 0; i < n_servers; i++)
                ck_assert_str_eq(REDIS(&servers[i], "CONFIG", "SET", "requirepass", "sesame"), "OK");
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

/* Chains of one block each, so that each is where its own name says. */
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

/* A slot that has moved is asked for where it is now, at once and from then on. */
START_TEST(a_slot_moves) {
        char id[64], slot[8];

        write_chain(&machines[0]);
        snprintf(id, sizeof id, "%.40s", REDIS(&servers[1], "CLUSTER", "MYID"));
        for (uint32_t i = 0; i < 100; i++) {
                snprintf(slot, sizeof slot, "%u", i);
                for (uint32_t k = 0; k < REDIS_CLUSTER; k++)
                        ck_assert_str_eq(
                                REDIS(&servers[k], "CLUSTER", "SETSLOT", slot, "NODE", id), "OK");
        }
        evict_all(&machines[0]);
        make_chain(&machines[1], tokens);
        ck_assert(tier_is(&machines[0], "on"));
        WAIT_UNTIL(tier(&machines[1]).written_bytes >= BLOCKS * (uint64_t)BLOCK_BYTES);
        ck_assert(fetch(&machines[0]));
        ck_assert_uint_eq(resident(&machines[0], tokens), BLOCKS);
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
        ck_assert_uint_eq(redis_change(&servers[0], "", look), BLOCKS);
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

/* What they have given is at a worker when they are found to be away: its blocks stayed held for ever. */
START_TEST(servers_go_while_a_worker_has_what_came) {
        pid_t worker = child_of(machines[1].in.pid, "kvd-worker");
        struct pollfd p = {.events = POLLIN};

        write_chain(&machines[0]);
        ck_assert_int_gt(worker, 0);
        ck_assert_int_eq(kill(worker, SIGSTOP), 0);
        ck_assert_int_ge(kvd_fetch(machines[1].space, 0, 0, tokens, BLOCKS * BLOCK_TOKENS, &p.fd), 0);
        WAIT_UNTIL(redis_calls(&servers[0], "get") >= BLOCKS);
        usleep(100000); /* and was heard, perhaps */
        ck_assert_int_eq(kill(servers[0].pid, SIGSTOP), 0);
        WAIT_UNTIL(tier_is(&machines[1], "away"));
        ck_assert_int_eq(poll(&p, 1, PATIENCE_MS), 1);
        close(p.fd);
        ck_assert_int_eq(kill(worker, SIGCONT), 0);
        WAIT_UNTIL(tier(&machines[1]).queue == 0);
        ck_assert_int_eq(kill(servers[0].pid, SIGCONT), 0);
        WAIT_UNTIL(tier_is(&machines[1], "on"));
        fetch(&machines[1]);
        ck_assert_uint_eq(resident(&machines[1], tokens), BLOCKS);
}
END_TEST

/* What memory of the host has comes from there, and nobody asks the servers. */
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

SUITE("remote", SKIP_IF(!redis_is_there()), FIXTURE(start_all, stop_all),
      TESTS(the_second_machine_starts_warm, evicted_blocks_come_back,
            what_is_there_is_not_sent_again, others_are_not_there,
            spaces_are_what_their_fingerprint_says, a_server_that_hangs_costs_one_fetch,
            a_server_that_forgot_is_told_again),
      LOOPS(9, lies_are_misses),
      WHEN(instance_on_gpu(), TESTS(servers_go_while_a_worker_has_what_came),
           CASE("host tier"), FIXTURE(start_with_host_tier, stop_all),
           TESTS(the_nearer_tier_answers, the_second_machine_starts_warm)),
      WHEN(!instance_on_gpu(), /* there it is the way of the blocks that is another one */
           CASE("cluster"), FIXTURE(start_on_cluster, stop_all),
           TESTS(a_cluster_is_one, one_of_a_cluster_dies, a_slot_moves),
           CASE("password"), FIXTURE(start_a_server, stop_all), TESTS(a_password_is_told, a_user_is_told),
           CASE("password of a cluster"), FIXTURE(start_a_cluster, stop_all),
           TESTS(a_cluster_asks_for_a_password),
           CASE("key"), FIXTURE(start_with_keys, stop_all), TESTS(the_same_key_shares),
           CASE("strange"), LOOPS(ARRAY_SIZE(strange), strange_servers_are_away),
           TESTS(settings_that_make_no_sense_are_refused),
           CASE("other keys"), FIXTURE(start_with_other_keys, stop_all),
           TESTS(another_key_finds_nothing)))
