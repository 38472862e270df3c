/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Servers for tests, and the few commands that tests send to them. The kernel chooses free ports.
 * If another process takes the port in the meantime, the server is started with another port.
 */

#include "tests/lib/redis.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/process/remote/resp.h"
#include "tests/lib/instance.h"
#include "tests/lib/mark.h"

#define MOST (1u << 20)

static uint8_t reply[2 * MOST];

/* ---- a server -------------------------------------------------------------------------------- */

bool redis_is_there(void) {
        return system("redis-server --version >/dev/null 2>&1") == 0;
}

bool redis_has_tls(void) {
        bool has = redis_is_there() && system("redis-server --tls-session-caching x 2>&1 | "
                                              "grep -q \"'yes' or 'no'\"") == 0;

        if (!has)
                puts("there is no redis-server with TLS");
        return has;
}

static uint16_t free_port(void) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t n = sizeof a;
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

        ck_assert_int_eq(bind(fd, (struct sockaddr *)&a, n), 0);
        ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&a, &n), 0);
        close(fd);
        return ntohs(a.sin_port);
}

/* The arguments of a server. */
struct words {
        const char *all[48];
        uint32_t n;
};

static void add_words(struct words *w, const char *const words[]) {
        for (; *words; words++)
                w->all[w->n++] = *words;
}
#define ADD(w, ...) add_words(w, (const char *const[]){__VA_ARGS__, NULL})

static void add_cluster(struct words *w, const char *bus) {
        ADD(w, "--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-node-timeout", "60000",
            "--cluster-require-full-coverage", "no");
}

static void add_tls(struct words *w, const struct redis_tls *tls, const char *port) {
        static char ca[96], certificate[96], key[96];

        snprintf(ca, sizeof ca, "%s/ca.pem", tls->folder);
        snprintf(certificate, sizeof certificate, "%s/%s.pem", tls->folder, tls->name);
        snprintf(key, sizeof key, "%s/%s.key", tls->folder, tls->name);
        ADD(w, "--port", "0", "--tls-port", port, "--tls-cluster", "yes", "--tls-ca-cert-file", ca,
            "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients",
            tls->asks ? "yes" : "no");
}

static void run(struct redis *r, bool cluster, const struct redis_tls *tls) {
        char port[8], bus[8], log[80], local[80];
        struct words w = {.n = 0};

        snprintf(port, sizeof port, "%u", r->port);
        snprintf(bus, sizeof bus, "%u", r->bus);
        snprintf(log, sizeof log, "%s/log", r->dir);
        snprintf(local, sizeof local, "%s/local", r->dir);
        ADD(&w, "redis-server", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir",
            r->dir, "--logfile", log, "--unixsocket", local);
        if (cluster)
                add_cluster(&w, bus);
        if (tls)
                add_tls(&w, tls, port);
        else
                ADD(&w, "--port", port);
        r->pid = fork();
        if (r->pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                execvp("redis-server", (char *const *)w.all);
                _exit(127);
        }
}

/* Connects to the Unix socket, on which the server listens last. */
static bool connected(struct redis *r) {
        struct sockaddr_un a = {.sun_family = AF_UNIX};

        snprintf(a.sun_path, sizeof a.sun_path, "%s/local", r->dir);
        r->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(r->fd, (struct sockaddr *)&a, sizeof a) == 0)
                return true;
        close(r->fd);
        r->fd = -1;
        return false;
}

/* False: the server has ended, perhaps because another process has its port. */
static bool try_to_start(struct redis *r, bool cluster, const struct redis_tls *tls) {
        run(r, cluster, tls);
        for (int ms = 0; ms < PATIENCE_MS; ms += 10) {
                if (connected(r))
                        return true;
                if (waitpid(r->pid, NULL, WNOHANG) == r->pid)
                        return false;
                usleep(10000);
        }
        ck_abort_msg("redis-server does not listen");
}

static void start(struct redis *r, bool cluster, const struct redis_tls *tls) {
        int tries = 0;

        *r = (struct redis){.fd = -1, .dir = "/tmp/kvd-redis-XXXXXX"};
        ck_assert_ptr_nonnull(mkdtemp(r->dir));
        do {
                ck_assert_int_lt(tries++, 10);
                r->port = free_port();
                r->bus = free_port();
        } while (!try_to_start(r, cluster, tls));
        ck_assert_str_eq(REDIS(r, "PING"), "PONG");
}

void redis_start(struct redis *r, const struct redis_tls *tls) {
        start(r, false, tls);
}

void redis_again(struct redis *r, const struct redis_tls *tls) {
        int tries = 0;

        kill(r->pid, SIGKILL);
        waitpid(r->pid, NULL, 0);
        close(r->fd);
        while (!try_to_start(r, false, tls)) {
                /* closed connections hold the port for a while */
                ck_assert_int_lt(tries++, PATIENCE_MS / 100);
                usleep(100000);
        }
}

void redis_stop(struct redis *r) {
        char command[96];

        if (!r->pid)
                return;
        kill(r->pid, SIGKILL);
        waitpid(r->pid, NULL, 0);
        close(r->fd);
        snprintf(command, sizeof command, "rm -rf %s", r->dir);
        ck_assert_int_eq(system(command), 0);
        *r = (struct redis){.fd = -1};
}

/* ---- commands -------------------------------------------------------------------------------- */

static void send_all(struct redis *r, const void *data, size_t n) {
        while (n) {
                ssize_t some = send(r->fd, data, n, MSG_NOSIGNAL);

                ck_assert_int_gt(some, 0);
                data = (const uint8_t *)data + some;
                n -= (size_t)some;
        }
}

static void send_word(struct redis *r, const void *word, size_t n) {
        uint8_t head[RESP_HEAD];

        send_all(r, head, resp_put_head(head, '$', n));
        send_all(r, word, n);
        send_all(r, "\r\n", 2);
}

static struct resp receive(struct redis *r) {
        struct resp ret;
        size_t n = 0, used;
        int got;

        while ((got = resp_take_whole(reply, n, MOST, &ret, &used)) == 0) {
                ssize_t some = recv(r->fd, reply + n, sizeof reply - 1 - n, 0);

                ck_assert_int_gt(some, 0);
                n += (size_t)some;
        }
        ck_assert_int_eq(got, 1);
        reply[n] = 0;
        return ret;
}

static struct resp command(struct redis *r, uint32_t n, const char *const words[]) {
        uint8_t head[RESP_HEAD];

        send_all(r, head, resp_put_head(head, '*', n));
        for (uint32_t i = 0; i < n; i++)
                send_word(r, words[i], strlen(words[i]));
        return receive(r);
}

const char *redis_do(struct redis *r, uint32_t n, const char *const words[]) {
        struct resp got = command(r, n, words);

        if (got.type == RESP_NIL)
                return "";
        if (got.text)
                reply[got.text - reply + (ssize_t)got.size] = 0;
        return (const char *)got.text;
}

static void change_one(struct redis *r, const char *key,
                       size_t (*change)(uint8_t *value, size_t n)) {
        struct resp got = command(r, 2, (const char *const[]){"GET", key});
        static uint8_t value[MOST];
        uint8_t head[RESP_HEAD];
        size_t n = got.size;

        ck_assert_int_eq(got.type, RESP_BULK);
        memcpy(value, got.text, n);
        n = change(value, n);
        send_all(r, head, resp_put_head(head, '*', 3));
        send_word(r, "SET", 3);
        send_word(r, key, strlen(key));
        send_word(r, value, n);
        ck_assert_int_eq(receive(r).type, RESP_TEXT);
}

uint32_t redis_change(struct redis *r, const char *prefix,
                      size_t (*change)(uint8_t *value, size_t n)) {
        static char keys[4096][128];
        char pattern[80];
        struct resp list, key;
        size_t used, at;
        uint32_t n;

        snprintf(pattern, sizeof pattern, "%s*", prefix);
        list = command(r, 2, (const char *const[]){"KEYS", pattern});
        ck_assert_int_eq(list.type, RESP_ARRAY);
        n = (uint32_t)list.number;
        ck_assert_uint_le(n, 4096);
        at = (size_t)(list.text - reply) + list.size + 2;
        for (uint32_t i = 0; i < n; i++, at += used) {
                ck_assert_int_eq(resp_take(reply + at, sizeof reply - at, MOST, &key, &used), 1);
                snprintf(keys[i], sizeof keys[i], "%.*s", (int)key.size, (const char *)key.text);
        }
        for (uint32_t i = 0; i < n; i++)
                change_one(r, keys[i], change);
        return n;
}

uint64_t redis_calls(struct redis *r, const char *name) {
        const char *all = REDIS(r, "INFO", "commandstats");
        char line[64];
        const char *at;

        snprintf(line, sizeof line, "cmdstat_%s:calls=", name);
        at = strstr(all, line);
        return at ? strtoull(at + strlen(line), NULL, 10) : 0;
}

/* ---- a Cluster ------------------------------------------------------------------------------- */

static void meet(struct redis *r, const struct redis *other) {
        char port[8], bus[8];

        snprintf(port, sizeof port, "%u", other->port);
        snprintf(bus, sizeof bus, "%u", other->bus);
        ck_assert_str_eq(REDIS(r, "CLUSTER", "MEET", "127.0.0.1", port, bus), "OK");
}

/* Does the server know the owners of all slots? */
static bool is_ready(struct redis *r) {
        const char *info = REDIS(r, "CLUSTER", "INFO");

        return strstr(info, "cluster_state:ok") && strstr(info, "cluster_slots_ok:16384") &&
               strstr(info, "cluster_size:3");
}

void redis_start_cluster(struct redis r[static REDIS_CLUSTER], const struct redis_tls *tls) {
        for (uint32_t i = 0; i < REDIS_CLUSTER; i++) {
                char first[8], last[8];

                start(&r[i], true, tls);
                snprintf(first, sizeof first, "%u", 16384 * i / REDIS_CLUSTER);
                snprintf(last, sizeof last, "%u", 16384 * (i + 1) / REDIS_CLUSTER - 1);
                ck_assert_str_eq(REDIS(&r[i], "CLUSTER", "ADDSLOTSRANGE", first, last), "OK");
        }
        for (uint32_t i = 1; i < REDIS_CLUSTER; i++)
                meet(&r[0], &r[i]);
        for (uint32_t i = 0; i < REDIS_CLUSTER; i++)
                for (int ms = 0; !is_ready(&r[i]); ms += 20) {
                        ck_assert_int_lt(ms, PATIENCE_MS);
                        usleep(20000);
                }
}
