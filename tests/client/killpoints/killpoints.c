/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kill -9 at any instruction. The test runs each operation of libkvd once to count its points
 * (hook.h), then kills it at each point in turn. After every death the daemon must reclaim
 * everything before it has answered a bounded number of requests (reclaim.h). Its invariants must
 * hold, no block may be lost, and a client that is still reading must not have seen a wrong byte.
 *
 *      killpoints [--seconds N] [--limit N | --all] [--seed N] [--operation NAME] [--churn | --stop] [--arena]
 *                 [--epoll] [--mutant]
 *
 * An operation with more than --limit points is killed at the first and last tenth of that many,
 * and at other points that the seed selects.
 * --seconds: starts with an operation that the seed selects, and repeats all operations, with other
 * points in each round, until the time is up.
 * --churn: evicts everything continuously, and lets the operations pause at random points. They die
 * while they are losing the blocks that they work on.
 * --stop: stops the operation at each point instead. Meanwhile the test evicts all blocks that no
 * client holds, overwrites them, and publishes chains with the same beginning in their place. The
 * operation then continues, and the blocks that it holds in the end must be right.
 * --mutant: this binary is linked with a library that was broken on purpose. The test passes if a
 * wrong byte was read. It tries all points up to MUTANT_ROUNDS times.
 */

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/address.h"
#include "ipc/base/util.h"
#include "tests/client/killpoints/actor.h"
#include "tests/client/killpoints/elsewhere.h"
#include "tests/client/killpoints/hook.h"
#include "tests/client/killpoints/reclaim.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"

#define EVERY UINT32_MAX
#define MUTANT_ROUNDS 3u
#define RESTARTS 25u /* kills per operation with a new daemon: each takes some ten milliseconds */

struct test {
        uint32_t seconds, limit;
        uint64_t seed, until; /* 0: every operation once */
        const char *only;
        bool churn, stop, arena, epoll, mutant;
        struct instance daemon;
        struct stage *stage;
        struct conn *conn;
        pid_t observer;
        struct random random;
        uint64_t kills, *ns; /* reclaim times of one operation */
        uint32_t n_ns;
};

/* ---- processes ------------------------------------------------------------------------------- */

static const char *const *daemon_settings(const struct test *t) {
        static const char *s[10] = {"daemon.pool=4M", "daemon.segment=64K", "daemon.pages=small",
                                    "daemon.log=error"};
        static char users[64];
        uint32_t n = 4;

        if (t->arena) {
                snprintf(users, sizeof users, "domain killed.users=%u", getuid());
                s[n++] = users;
                s[n++] = "domain killed.isolation=arena";
        }
        if (t->epoll)
                s[n++] = "daemon.loop=epoll";
        s[n] = NULL;
        return s;
}

/* Evicts and overwrites everything before the stopped process continues. */
static void go_on(const struct test *t, pid_t stopped) {
        pid_t pid;
        int status;

        observer_rest(t->stage); /* it may have blocks pinned at the moment */
        evict_all(t->conn);
        observer_resume(t->stage);
        pid = fork();
        if (pid == 0)
                rewrite_all(t->daemon.socket);
        if (waitpid(pid, &status, 0) != pid || status != 0)
                die("rewriting ended with status %#x", status);
        kill(stopped, SIGCONT);
}

/*
 * Waits until the process is dead. With --churn, evicts its blocks meanwhile. Returns the time when
 * it was last seen alive.
 */
static uint64_t expect_killed(const struct test *t, const struct operation *op, uint64_t nth,
                              pid_t pid) {
        uint64_t alive = now_ns(), now;
        int status = 0, r;

        while (now = now_ns(),
               (r = waitpid(pid, &status, WNOHANG | WUNTRACED)) == 0 || WIFSTOPPED(status)) {
                alive = now;
                if (r)
                        go_on(t, pid);
                else if (t->churn && nth && t->stage->prepared)
                        evict_all(t->conn);
                else
                        usleep(20);
        }
        if (r != pid || !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
                die("%s, point %llu: ended with status %#x", op->name, (unsigned long long)nth,
                    status);
        return alive;
}

static pid_t partner_start(const struct test *t, const struct operation *op) {
        int ready[2];
        pid_t pid;
        char byte;

        if (!op->partner)
                return 0;
        if (pipe(ready) < 0)
                die("pipe: %s", strerror(errno));
        pid = fork();
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                op->partner(t->daemon.socket, t->stage, ready[1]);
                _exit(0);
        }
        close(ready[1]);
        if (read(ready[0], &byte, 1) != 1)
                die("%s: the partner is not ready", op->name);
        close(ready[0]);
        return pid;
}

static void partner_end(const struct operation *op, pid_t pid) {
        int status;

        if (pid && (waitpid(pid, &status, 0) != pid || status != 0))
                die("%s: the partner ended with status %#x", op->name, status);
}

static void wait_settled(const struct test *t) {
        WAIT_UNTIL(t->stage->settled == t->stage->daemon);
}

/*
 * With io_uring, the kernel closes the socket of a killed daemon only some time after the daemon is
 * gone: 10 ms, or up to a second on a loaded machine. A new daemon waits no longer than that. This
 * test does not check that wait, so it first waits for the close itself, for up to a minute.
 */
static void wait_closed(const char *path) {
        struct kvd_address address;
        int r = kvd_address_make(path, &address), fd;

        for (int i = 0; r == 0 && i < PATIENCE_MS / 10; i++) {
                fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
                r = connect(fd, kvd_address_of(&address), address.size);
                close(fd);
                if (r == 0)
                        usleep(10000);
        }
}

static void renew_daemon(struct test *t) {
        conn_close(t->conn);
        instance_kill(&t->daemon);
        wait_closed(t->daemon.socket);
        instance_again(&t->daemon, daemon_settings(t));
        t->stage->daemon++;
        t->conn = instance_connect(&t->daemon);
        wait_settled(t);
}

/* ---- one kill -------------------------------------------------------------------------------- */

static pid_t start(const struct test *t, const struct operation *op, uint64_t nth, int turn) {
        return actor_start(op, t->daemon.socket, t->stage, nth, t->stop ? SIGSTOP : SIGKILL, turn,
                           t->churn && nth ? t->seed + t->kills + 1 : 0);
}

/* The actor waits before the operation until there is a new daemon. */
static pid_t start_across_restart(struct test *t, const struct operation *op, uint64_t nth) {
        char byte = 'g';
        int turn[2];
        pid_t pid;

        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, turn) < 0)
                die("socketpair: %s", strerror(errno));
        pid = start(t, op, nth, turn[1]);
        close(turn[1]);
        if (read(turn[0], &byte, 1) != 1)
                die("%s: not prepared", op->name);
        renew_daemon(t);
        if (write(turn[0], &byte, 1) != 1)
                die("%s: gone", op->name);
        close(turn[0]);
        return pid;
}

/* Returns how long the daemon took to reclaim everything. */
static uint64_t die_once(struct test *t, const struct operation *op, uint64_t nth) {
        uint64_t since, ns;
        pid_t partner, pid;

        t->stage->prepared = false;
        partner = partner_start(t, op);
        pid = op->restart ? start_across_restart(t, op, nth) : start(t, op, nth, -1);
        since = expect_killed(t, op, nth, pid);
        if (partner) {
                partner_end(op, partner);
                since = now_ns();
        }
        ns = wait_reclaimed(t->conn, t->stage, since);
        expect_clean(t->conn);
        if (t->stage->bytes_wrong && !t->mutant)
                die("%s, point %llu: %llu wrong bytes were read", op->name, (unsigned long long)nth,
                    (unsigned long long)t->stage->bytes_wrong);
        t->kills++;
        return ns;
}

/* ---- one operation --------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
        uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

        return x < y ? -1 : x > y;
}

static void report(struct test *t, const struct operation *op, uint64_t points) {
        qsort(t->ns, t->n_ns, sizeof *t->ns, by_value);
        printf("%-26s %6llu points %6u kills   reclaimed in %6.2f ms at most, %5.2f ms in the "
               "middle\n",
               op->name, (unsigned long long)points, t->n_ns, (double)t->ns[t->n_ns - 1] / 1e6,
               (double)t->ns[t->n_ns / 2] / 1e6);
        fflush(stdout);
}

static bool chosen(struct test *t, uint64_t nth, uint64_t points, uint32_t limit) {
        uint64_t edge = MAX(limit / 10, 1);

        return points <= limit || nth <= edge || nth + edge > points ||
               random_below(&t->random, (uint32_t)points) < limit - 2 * edge;
}

/* Whether the time is up, or a mutant has been caught. */
static bool time_is_up(const struct test *t) {
        return (t->until && now_ns() >= t->until) || (t->mutant && t->stage->bytes_wrong);
}

/* Dies at each point, and once after the last, with all that the operation acquired. */
static void die_everywhere(struct test *t, const struct operation *op) {
        uint32_t limit = op->restart && t->limit != EVERY ? MIN(t->limit, RESTARTS) : t->limit;
        uint64_t points;

        t->n_ns = 0;
        t->ns = calloc(1, sizeof *t->ns);
        t->ns[t->n_ns++] = die_once(t, op, 0);
        points = t->stage->points;
        t->ns = reallocarray(t->ns, points + 2, sizeof *t->ns);
        if (!points || !t->ns)
                die("%s has no point", op->name);
        for (uint64_t nth = 1; nth <= points + 1 && !time_is_up(t); nth++)
                if (chosen(t, nth, points + 1, limit))
                        t->ns[t->n_ns++] = die_once(t, op, nth);
        report(t, op, points);
        free(t->ns);
}

static void round_of_all(struct test *t) {
        uint32_t n = 0, first;

        while (operations[n].name)
                n++;
        first = t->until ? random_below(&t->random, n) : 0;
        for (uint32_t i = 0; i < n && !time_is_up(t); i++) {
                const struct operation *op = &operations[(first + i) % n];

                if (!t->only || strcmp(t->only, op->name) == 0)
                        die_everywhere(t, op);
        }
}

static bool another_round(const struct test *t, uint32_t rounds) {
        return !time_is_up(t) && (t->until || (t->mutant && rounds < MUTANT_ROUNDS));
}

/* ---- main ------------------------------------------------------------------------------------ */

static void begin(struct test *t) {
        t->stage = mmap(NULL, sizeof *t->stage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0);
        t->stage->daemon = 1;
        instance_start(&t->daemon, daemon_settings(t));
        t->observer = observer_start(t->daemon.socket, t->stage);
        wait_settled(t);
        t->conn = instance_connect(&t->daemon);
}

static void end(struct test *t, uint32_t fds) {
        const struct stage *s = t->stage;
        int status;

        WAIT_UNTIL(fds_beside_segments(&t->daemon) == fds);
        t->stage->stop = true;
        if (waitpid(t->observer, &status, 0) != t->observer || status != 0)
                die("the observer ended with status %#x", status);
        printf("{\"kills\": %llu, \"fewer_points\": %llu, \"looks\": %llu, \"bytes_checked\": "
               "%llu, "
               "\"wrong_bytes\": %llu, \"seed\": %llu}\n",
               (unsigned long long)t->kills, (unsigned long long)s->survived,
               (unsigned long long)s->looks, (unsigned long long)s->bytes_checked,
               (unsigned long long)s->bytes_wrong, (unsigned long long)t->seed);
        if (t->mutant && !s->bytes_wrong)
                die("the mutant was not caught");
        if (!t->kills)
                die("no process was killed: is there an operation of that name?");
        conn_close(t->conn);
        instance_stop(&t->daemon);
        instance_sweep(&t->daemon);
}

static void parse(struct test *t, int argc, char **argv) {
        static const struct option known[] = {{"seconds", required_argument, NULL, 's'},
                                              {"limit", required_argument, NULL, 'l'},
                                              {"all", no_argument, NULL, 'a'},
                                              {"seed", required_argument, NULL, 'r'},
                                              {"operation", required_argument, NULL, 'o'},
                                              {"churn", no_argument, NULL, 'c'},
                                              {"stop", no_argument, NULL, 'S'},
                                              {"mutant", no_argument, NULL, 'm'},
                                              {"arena", no_argument, NULL, 'A'},
                                              {"epoll", no_argument, NULL, 'e'},
                                              {0}};
        int c;

        while ((c = getopt_long(argc, argv, "", known, NULL)) != -1)
                switch (c) {
                case 's': t->seconds = (uint32_t)atoi(optarg); break;
                case 'l': t->limit = (uint32_t)atoi(optarg); break;
                case 'a': t->limit = EVERY; break;
                case 'r': t->seed = strtoull(optarg, NULL, 10); break;
                case 'o': t->only = optarg; break;
                case 'c': t->churn = true; break;
                case 'S': t->stop = true; break;
                case 'm': t->mutant = true; break;
                case 'A': t->arena = true; break;
                case 'e': t->epoll = true; break;
                default: exit(2);
                }
}

int main(int argc, char **argv) {
        static struct test t = {.limit = 2000};
        uint32_t fds, rounds = 0;

        t.seed = (uint64_t)time(NULL);
        parse(&t, argc, argv);
        t.random.state = t.seed;
        hook_install();
        begin(&t);
        fds = fds_beside_segments(&t.daemon);
        t.until = t.seconds ? now_ns() + t.seconds * UINT64_C(1000000000) : 0;
        do
                round_of_all(&t);
        while (another_round(&t, ++rounds));
        end(&t, fds);
        return 0;
}
