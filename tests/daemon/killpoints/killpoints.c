/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kill -9 of the daemon at any instruction. Each of the operations below runs once to count its
 * points in the daemon (tests/client/killpoints/hook.h). Then the daemon, which has a keeper, dies
 * at some of these points, or at each. After every death the next daemon must serve, its invariants
 * must hold, a client that pins a block must still read it, and every sealed block that is found
 * must have its bytes. All but a few of the sealed blocks must be found.
 *
 *      daemon-killpoints [--seconds N] [--limit N | --all] [--seed N] [--operation NAME]
 *
 * If an operation has more than --limit points, the seed selects some of them. --seconds repeats
 * all operations, with other points, until the time is up.
 */

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "client/kvd.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"
#include "tests/daemon/killpoints/armed.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"

#define BT 16u
#define CHAIN 8u      /* blocks */
#define BASE 40u      /* chains that exist throughout the test; the first one is held */
#define SMALL 64u     /* blocks, of the space that is always full */
#define HELD_KILLS 8u /* number of daemons through which a chain is held */
#define LEAST_PERCENT 99.0
#define STEADY_US 300000u /* the keeper gives up on a daemon that dies earlier again and again */

static const struct kvd_geometry geometry = {.layers = 2,
                                             .kv_heads = 2,
                                             .head_dim = 8,
                                             .block_tokens = BT,
                                             .dtype = KVD_F16,
                                             .vocab = 1 << 24};

static struct test {
        uint32_t seconds, limit;
        uint64_t seed, until;
        const char *only;
        struct instance daemon;
        char points[96];
        kvd *kvd;
        kvd_space *base, *small;
        struct kvd_pin held;
        uint32_t held_ids[CHAIN];
        uint32_t next;          /* next chain to publish */
        uint64_t kills, missed; /* missed: the operation was over before that point */
        uint64_t expected, found, wrong;
} t = {.limit = 6, .seed = 1};

/* ---- chains ---------------------------------------------------------------------------------- */

static void tokens_of(uint32_t chain, uint32_t tokens[CHAIN * BT]) {
        for (uint32_t i = 0; i < CHAIN * BT; i++)
                tokens[i] = chain * 1000 % (1 << 23) + i;
}

static uint64_t wrong_of(const struct kvd_pin *pin, const uint32_t *ids, const uint32_t *tokens) {
        uint64_t wrong = 0;

        for (uint32_t i = 0; i < pin->n_blocks; i++)
                wrong += oracle_wrong(kvd_pin_block(pin, ids[i]), pin->block_bytes,
                                      oracle_seed(1, tokens, (i + 1) * BT));
        return wrong;
}

/* Returns the number of blocks sealed; fewer if the daemon died. */
static uint32_t publish(kvd_space *space, uint32_t chain) {
        uint32_t tokens[CHAIN * BT], n = 0;
        struct kvd_block blocks[CHAIN];
        struct kvd_pin pin = {0};
        int r = 0;

        tokens_of(chain, tokens);
        while (n < CHAIN && (r = kvd_alloc(space, CHAIN - n, blocks + n)) > 0)
                n += (uint32_t)r;
        for (uint32_t i = 0; i < n; i++)
                oracle_fill(blocks[i].data, kvd_block_bytes(&geometry),
                            oracle_seed(1, tokens, (i + 1) * BT));
        r = n ? kvd_seal(space, &pin, n, blocks, tokens, n * BT) : 0;
        if (r <= 0)
                kvd_free(space, n, blocks);
        kvd_unpin(space, &pin);
        return r > 0 ? (uint32_t)r : 0;
}

static uint32_t find(uint32_t chain) {
        uint32_t tokens[CHAIN * BT], ids[CHAIN], n;
        struct kvd_pin pin = {0};

        tokens_of(chain, tokens);
        if (kvd_lookup(t.base, 0, tokens, CHAIN * BT, ids, CHAIN, &pin) < 0)
                die("lookup: %s", kvd_error());
        n = pin.n_blocks;
        t.wrong += wrong_of(&pin, ids, tokens);
        kvd_unpin(t.base, &pin);
        return n;
}

/* ---- operations ------------------------------------------------------------------------------ */

static void op_seal(void) {
        publish(t.base, t.next++);
}

static void op_evict(void) {
        publish(t.small, t.next++);
}

static void op_free(void) {
        struct kvd_block blocks[CHAIN];
        int n = kvd_alloc(t.small, CHAIN, blocks);

        if (n > 0)
                kvd_free(t.small, (uint32_t)n, blocks);
}

static void in_another(void (*run)(kvd *)) {
        pid_t pid = fork();
        kvd *k;

        if (pid == 0) {
                if (kvd_open(t.daemon.socket, &k) == 0)
                        run(k);
                _exit(0);
        }
        wait_status(pid);
}

static void open_and_close(kvd *k) {
        kvd_space *space;

        if (kvd_space_open(k, "base", &geometry, NULL, &space) == 0)
                kvd_space_close(space);
        kvd_close(k);
}

static void op_attach(void) {
        in_another(open_and_close);
}

static void fill_and_die(kvd *k) {
        struct kvd_block blocks[CHAIN];
        kvd_space *space;

        if (kvd_space_open(k, "base", &geometry, NULL, &space) == 0)
                kvd_alloc(space, CHAIN, blocks);
}

static void op_client_dies(void) {
        in_another(fill_and_die);
}

static void delete_other(void) {
        struct kvd_msg_space_delete request = {.space = kvd_slice_of("other")};
        struct kvd_msg_space_delete_reply reply;
        struct conn *conn;

        if (conn_open(t.daemon.socket, "test", &conn) < 0)
                return;
        conn_call(conn, KVD_MSG_space_delete, &request, &reply);
        conn_close(conn);
}

static void make_space(kvd *k) {
        static const struct kvd_space_options options = {.max_blocks = SMALL};
        kvd_space *space;

        if (kvd_space_open(k, "other", &geometry, &options, &space) == 0)
                kvd_space_close(space);
        kvd_close(k);
        delete_other();
}

static void op_space(void) {
        in_another(make_space);
}

static const struct operation {
        const char *name;
        void (*run)(void);
} operations[] = {{"seal", op_seal},
                  {"evict", op_evict},
                  {"free", op_free},
                  {"attach", op_attach},
                  {"client dies", op_client_dies},
                  {"space", op_space}};

/* ---- the daemon ------------------------------------------------------------------------------ */

/* The keeper's child; 0 if none at the moment. */
static pid_t kvd_pid(void) {
        return child_of(t.daemon.pid, NULL);
}

static void arm(pid_t pid, uint32_t nth) {
        sigqueue(pid, ARMED_SIGNAL, (union sigval){.sival_int = (int)nth});
}

static bool was_told(uint64_t *ret) {
        int fd = open(t.points, O_RDONLY | O_CLOEXEC);
        bool whole = fd >= 0 && read(fd, ret, sizeof *ret) == sizeof *ret;

        if (fd >= 0)
                close(fd);
        return whole;
}

/* Reads one value from /proc/PID/FILE with a scanf() format. False if the process is gone. */
static bool found_in(pid_t pid, const char *file, const char *format, void *ret) {
        char path[64];
        bool found;
        FILE *f;

        snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
        f = fopen(path, "re");
        found = f && fscanf(f, format, ret) == 1;
        if (f)
                fclose(f);
        return found;
}

/*
 * Waits until the daemon sleeps and uses no processor time. Work that it does after its answer
 * still belongs to the operation. Returns false if the daemon died.
 */
static bool rests(pid_t pid) {
        uint64_t before, now = 0;
        char state, later = 0;

        do {
                before = now;
                state = later;
                usleep(4000);
                if (!found_in(pid, "schedstat", "%lu", &now) ||
                    !found_in(pid, "stat", "%*d %*s %c", &later) || kvd_pid() != pid)
                        return false;
        } while (state != 'S' || later != 'S' || now != before);
        return true;
}

/* Returns true if the daemon died at that point. Otherwise sets *n to the number of points. */
static bool dies_at(const struct operation *op, uint32_t nth, uint64_t *n) {
        pid_t pid = kvd_pid();

        unlink(t.points);
        arm(pid, nth);
        op->run();
        if (!rests(pid))
                return true;
        arm(pid, 0);
        WAIT_UNTIL(kvd_pid() != pid || was_told(n));
        return kvd_pid() != pid;
}

/* ---- after it died --------------------------------------------------------------------------- */

static bool serves(void) {
        struct conn *conn;
        bool is_there = kvd_pid() && conn_open(t.daemon.socket, "test", &conn) == 0;

        if (is_there)
                conn_close(conn);
        return is_there && kvd_catch_up(t.base) == 0 && kvd_catch_up(t.small) == 0;
}

static void look_at_base(void) {
        for (uint32_t i = 0; i < BASE; i++) {
                uint32_t n = find(i);

                t.expected += CHAIN;
                t.found += n;
                if (n < CHAIN)
                        WAIT_UNTIL(publish(t.base, i) == CHAIN);
        }
}

static void expect_sound(void) {
        struct conn *conn = instance_connect(&t.daemon);

        expect_clean(conn);
        conn_close(conn);
}

/*
 * Blocks that were being filled when a daemon died stay reserved while a process holds blocks of
 * that daemon. So the held chain is released now and then.
 */
static void hold_anew(void) {
        uint32_t tokens[CHAIN * BT];

        tokens_of(0, tokens);
        kvd_unpin(t.base, &t.held);
        if (kvd_lookup(t.base, 0, tokens, CHAIN * BT, t.held_ids, CHAIN, &t.held) != CHAIN * BT)
                die("a published chain is not found");
}

static void verify(void) {
        uint32_t tokens[CHAIN * BT];

        tokens_of(0, tokens);
        t.wrong += wrong_of(&t.held, t.held_ids, tokens);
        WAIT_UNTIL(serves());
        look_at_base();
        if (t.wrong)
                die("%lu wrong bytes after %lu kills", t.wrong, t.kills);
        WAIT_UNTIL(publish(t.small, t.next++) == CHAIN);
        expect_sound();
        if (t.kills % HELD_KILLS == 0)
                hold_anew();
        usleep(STEADY_US);
}

/* ---- rounds ---------------------------------------------------------------------------------- */

static uint64_t random_at(uint64_t n) {
        t.seed = t.seed * UINT64_C(6364136223846793005) + 1442695040888963407;
        return (t.seed >> 33) % n;
}

static bool time_is_up(void) {
        return t.until && sys_now_ns() > t.until;
}

static void kill_at_points(const struct operation *op) {
        uint64_t points = 0, n, kills = t.kills;
        uint32_t rounds;

        if (dies_at(op, INT32_MAX, &points))
                die("%s: the daemon died by itself", op->name);
        rounds = (uint32_t)MIN(points, t.limit);
        for (uint32_t i = 0; i < rounds && !time_is_up(); i++) {
                uint64_t at = rounds == points ? i + 1 : 1 + random_at(points);

                if (dies_at(op, (uint32_t)at, &n)) {
                        t.kills++;
                        verify();
                } else {
                        t.missed++;
                }
        }
        printf("%-12s %6lu points %4lu kills   found again %lu of %lu\n", op->name, points,
               t.kills - kills, t.found, t.expected);
        fflush(stdout);
}

static void go_round(void) {
        for (size_t i = 0; i < ARRAY_SIZE(operations) && !time_is_up(); i++)
                if (!t.only || strcmp(t.only, operations[i].name) == 0)
                        kill_at_points(&operations[i]);
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static void open_spaces(void) {
        static const struct kvd_space_options small = {.max_blocks = SMALL};

        if (kvd_open(t.daemon.socket, &t.kvd) < 0 ||
            kvd_space_open(t.kvd, "base", &geometry, NULL, &t.base) < 0 ||
            kvd_space_open(t.kvd, "small", &geometry, &small, &t.small) < 0)
                die("%s", kvd_error());
        for (t.next = 0; t.next < BASE; t.next++)
                WAIT_UNTIL(publish(t.base, t.next) == CHAIN);
        for (uint32_t i = 0; i < SMALL / CHAIN; i++)
                WAIT_UNTIL(publish(t.small, t.next++) == CHAIN);
        hold_anew();
}

/* The kvd that can be armed is in the folder of this program. */
static void choose_kvd(void) {
        char path[PATH_MAX];
        ssize_t n = readlink("/proc/self/exe", path, sizeof path - 16);

        if (n < 0)
                die("/proc/self/exe: %s", strerror(errno));
        path[n] = 0;
        strcpy(strrchr(path, '/') + 1, "kvd-points");
        setenv("KVD", path, 1);
}

static void start(void) {
        choose_kvd();
        instance_make_dir(&t.daemon);
        setenv("TMPDIR", t.daemon.dir, 1);
        snprintf(t.points, sizeof t.points, "%s/points", t.daemon.dir);
        setenv("KVD_POINTS", t.points, 1);
        instance_run(&t.daemon,
                     (const char *const[]){"--keep", "--private", t.daemon.dir, "--pool", "8M",
                                           "--set", "daemon.segment=256K", "--set",
                                           "daemon.log=warning", "--set", "daemon.pages=small",
                                           "--backend", "host", NULL},
                     true);
        open_spaces();
}

static void end(void) {
        kvd_unpin(t.base, &t.held);
        kvd_space_close(t.base);
        kvd_space_close(t.small);
        kvd_close(t.kvd);
        instance_expect_clean(&t.daemon);
        unlink(t.points);
        instance_stop(&t.daemon);
        instance_sweep(&t.daemon);
}

static void parse(int argc, char **argv) {
        static const struct option options[] = {{"seconds", required_argument, NULL, 's'},
                                                {"limit", required_argument, NULL, 'l'},
                                                {"all", no_argument, NULL, 'a'},
                                                {"seed", required_argument, NULL, 'r'},
                                                {"operation", required_argument, NULL, 'o'},
                                                {0}};

        for (int c; (c = getopt_long(argc, argv, "", options, NULL)) >= 0;) {
                if (c == 's')
                        t.seconds = (uint32_t)strtoul(optarg, NULL, 10);
                else if (c == 'l')
                        t.limit = (uint32_t)strtoul(optarg, NULL, 10);
                else if (c == 'a')
                        t.limit = UINT32_MAX;
                else if (c == 'r')
                        t.seed = strtoull(optarg, NULL, 10);
                else if (c == 'o')
                        t.only = optarg;
                else
                        exit(2);
        }
}

int main(int argc, char **argv) {
        double percent;

        parse(argc, argv);
        start();
        if (t.seconds)
                t.until = sys_now_ns() + t.seconds * UINT64_C(1000000000);
        do
                go_round();
        while (t.until && !time_is_up());
        percent = t.expected ? 100.0 * (double)t.found / (double)t.expected : 0;
        end();
        printf("{\"kills\": %lu, \"missed\": %lu, \"expected\": %lu, \"found\": %lu, "
               "\"wrong_bytes\": %lu}\n",
               t.kills, t.missed, t.expected, t.found, t.wrong);
        if (!t.kills)
                die("the daemon was not killed once");
        if (percent < LEAST_PERCENT)
                die("only %.2f %% of the sealed blocks are found", percent);
        return 0;
}
