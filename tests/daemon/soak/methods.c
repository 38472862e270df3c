/* SPDX-License-Identifier: Apache-2.0 */

/*
 * All methods at once. Processes that need four times the pool share, cool, revive and label blocks
 * at random, while the processes and the worker that runs the kernels are killed at random. There
 * must be 0 wrong bytes in exact entries and 0 approximations without their mark. Every request
 * must be answered, every invariant must hold throughout, and nothing may be left over.
 *
 *      methods [--seconds N] [--processes N] [--seed N] [--pool BYTES] [--kill-daemon]
 */

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/util.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"
#include "tests/daemon/soak/methods_worker.h"

#define MAX_WORKERS 32

struct options {
        uint32_t seconds, processes;
        uint64_t seed;
        const char *pool;
        bool kill_daemon;
};

struct soak {
        struct options o;
        struct instance daemon;
        struct methods_tally *tally;
        struct random random;
        pid_t pids[MAX_WORKERS];
        uint64_t started, kernels_killed;
        uint64_t jobs;  /* done at the previous attempt to kill the kernels */
        uint32_t lives; /* average number of chances per kill */
        bool failed;
};

static uint64_t now_ms(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ---- the daemon ------------------------------------------------------------------------------ */

static const char *const *daemon_settings(const struct soak *s) {
        static char pool[64];
        static const char *const settings[] = {pool, "daemon.segment=128K", "daemon.pages=small",
                                               NULL};

        snprintf(pool, sizeof pool, "daemon.pool=%s", s->o.pool);
        return settings;
}

static void create(struct conn *conn, const char *name, const struct kvd_geometry *g, uint32_t kind,
                   uint64_t max_blocks) {
        struct kvd_msg_space request = {.name = kvd_slice_of(name),
                                        .create = 2,
                                        .layers = g->layers,
                                        .kv_heads = g->kv_heads,
                                        .head_dim = g->head_dim,
                                        .block_tokens = g->block_tokens,
                                        .layer_groups = g->layer_groups,
                                        .dtype = g->dtype,
                                        .state_width = g->state_width,
                                        .vocab = g->vocab,
                                        .kind = kind,
                                        .max_blocks = max_blocks};

        if (conn_call(conn, KVD_MSG_space, &request, NULL) < 0)
                die("space %s: %s", name, kvd_error());
}

static void set(struct conn *conn, const char *space, const char *key, const char *value) {
        struct kvd_msg_space_set request = {.space = kvd_slice_of(space),
                                            .key = kvd_slice_of(key),
                                            .value = kvd_slice_of(value)};

        if (conn_call(conn, KVD_MSG_space_set, &request, NULL) < 0)
                die("%s = %s: %s", key, value, kvd_error());
}

static void prepare(struct soak *s) {
        struct conn *conn = instance_connect(&s->daemon);

        create(conn, "methods", &methods_geometry, KVD_CAUSAL, 0);
        create(conn, "whole", &methods_whole_geometry, KVD_BIDIRECTIONAL, 32);
        set(conn, "methods", "memshare", "on");
        set(conn, "methods", "memshare.align", "none");
        set(conn, "methods", "memshare.min_step_tokens", "8");
        set(conn, "methods", "keydiff", "on");
        set(conn, "methods", "kvreviver", "on");
        set(conn, "methods", "kvreviver.max_load", "50");
        set(conn, "methods", "hshare", "on");
        set(conn, "methods", "policy", "priority");
        set(conn, "whole", "bicache", "on");
        conn_close(conn);
}

/* ---- workers --------------------------------------------------------------------------------- */

static void start_worker(struct soak *s, uint32_t i) {
        struct methods_options o = {.socket = s->daemon.socket,
                                    .tally = s->tally,
                                    .seed = s->o.seed * 1000003 + s->started++,
                                    .daemon_may_die = s->o.kill_daemon};

        s->pids[i] = fork();
        if (s->pids[i] == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                _exit(methods_worker_run(&o));
        }
}

static void note_end(struct soak *s, int status) {
        if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
                fprintf(stderr, "a worker was killed by signal %d\n", WTERMSIG(status));
        if ((WIFEXITED(status) && WEXITSTATUS(status) != 0) ||
            (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL))
                s->failed = true;
}

static void shake_clients(struct soak *s) {
        uint32_t i = random_below(&s->random, s->o.processes);
        int status;

        if (random_below(&s->random, 6) == 0)
                kill(s->pids[i], SIGKILL);
        for (i = 0; i < s->o.processes; i++)
                if (waitpid(s->pids[i], &status, WNOHANG) == s->pids[i]) {
                        note_end(s, status);
                        start_worker(s, i);
                }
}

#define MOST_LIVES 64u

/* If the kernels have done no job since the previous attempt, their average life doubles. */
static void kill_kernels(struct soak *s, struct conn *conn) {
        struct kvd_msg_daemon_info_reply info;

        if (random_below(&s->random, s->lives))
                return;
        if (conn_call(conn, KVD_MSG_daemon_info, NULL, &info) < 0)
                die("daemon_info: %s", kvd_error());
        s->lives = info.jobs != s->jobs ? 1 : MIN(2 * s->lives, MOST_LIVES);
        s->jobs = info.jobs;
        if (info.worker && kill((pid_t)info.worker, SIGKILL) == 0)
                s->kernels_killed++;
}

static void look_in(struct soak *s) {
        struct conn *conn = instance_connect(&s->daemon);

        if (random_below(&s->random, 2) == 0)
                kill_kernels(s, conn);
        expect_clean(conn);
        conn_close(conn);
}

static void end_workers(struct soak *s) {
        int status;

        s->tally->stop = true;
        for (uint32_t i = 0; i < s->o.processes; i++) {
                if (i % 2)
                        kill(s->pids[i], SIGKILL);
                waitpid(s->pids[i], &status, 0);
                note_end(s, status);
        }
}

/* ---- the end --------------------------------------------------------------------------------- */

static bool is_nothing_left(struct conn *conn, struct kvd_msg_space_info_reply *info) {
        space_facts(conn, 0, info);
        return !info->sequences && !info->private && !info->shared && !info->spilled &&
               !info->vague;
}

/* The clients are gone: no sequence, no private block, no copy, no sketch may be left. */
static void expect_nothing_left(struct soak *s) {
        struct conn *conn = instance_connect(&s->daemon);
        struct kvd_msg_space_info_reply info;

        expect_quiet(conn);
        for (int ms = 0; !is_nothing_left(conn, &info); ms++) {
                if (ms == PATIENCE_MS)
                        die("left over: %llu sequences, %llu private, %llu shared, %llu spilled, "
                            "%llu vague",
                            (unsigned long long)info.sequences, (unsigned long long)info.private,
                            (unsigned long long)info.shared, (unsigned long long)info.spilled,
                            (unsigned long long)info.vague);
                usleep(1000);
        }
        expect_clean(conn);
        conn_close(conn);
}

static void report(const struct soak *s) {
        const struct methods_tally *t = s->tally;
        const struct {
                const char *name;
                uint64_t value;
        } rows[] = {
                {"operations", t->operations},
                {"bytes_checked", t->bytes_checked},
                {"wrong_bytes", t->bytes_wrong},
                {"unmarked", t->unmarked},
                {"appended", t->appended},
                {"changes", t->changes},
                {"shared_seen", t->shared_seen},
                {"approx_seen", t->approx_seen},
                {"absent_seen", t->absent_seen},
                {"packed_seen", t->packed_seen},
                {"cooled", t->cooled},
                {"revived", t->revived},
                {"labels", t->labels},
                {"sharings", t->sharings},
                {"samples", t->samples},
                {"refusals", t->refusals},
                {"suicides", t->deaths},
                {"workers", s->started},
                {"kernel_workers_killed", s->kernels_killed},
                {"lost", t->lost},
                {"seed", s->o.seed},
        };

        for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
                printf("%s\"%s\": %llu", i ? ", " : "{", rows[i].name,
                       (unsigned long long)rows[i].value);
        puts("}");
}

/* A run in which a method did nothing proves nothing about that method. */
static bool is_used(const struct soak *s) {
        const struct methods_tally *t = s->tally;

        return t->shared_seen && t->approx_seen && t->packed_seen && t->absent_seen && t->revived &&
               t->labels && t->sharings && t->samples;
}

#define MOST_SECONDS 240u /* limit for every method to do something, on a slow machine */

static bool is_over(const struct soak *s, uint64_t began) {
        uint64_t ms = now_ms() - began;

        if (ms < s->o.seconds * 1000)
                return false;
        return s->o.kill_daemon || is_used(s) || ms > MAX(MOST_SECONDS, s->o.seconds) * 1000;
}

static void soak(struct soak *s) {
        uint64_t began = now_ms(), restart = began + 2000;

        for (uint32_t i = 0; i < s->o.processes; i++)
                start_worker(s, i);
        while (!is_over(s, began) && !s->failed && !s->tally->bytes_wrong) {
                usleep(50000);
                shake_clients(s);
                if (random_below(&s->random, 8) == 0)
                        look_in(s);
                if (s->o.kill_daemon && now_ms() > restart) {
                        instance_kill(&s->daemon);
                        instance_again(&s->daemon, daemon_settings(s));
                        prepare(s);
                        restart = now_ms() + 1000 + random_below(&s->random, 2000);
                }
        }
        end_workers(s);
}

static void parse(struct options *o, int argc, char **argv) {
        static const struct option known[] = {{"seconds", required_argument, NULL, 's'},
                                              {"processes", required_argument, NULL, 'p'},
                                              {"seed", required_argument, NULL, 'r'},
                                              {"pool", required_argument, NULL, 'm'},
                                              {"kill-daemon", no_argument, NULL, 'k'},
                                              {0}};
        int c;

        while ((c = getopt_long(argc, argv, "", known, NULL)) != -1)
                switch (c) {
                case 's': o->seconds = (uint32_t)atoi(optarg); break;
                case 'p': o->processes = (uint32_t)MIN(atoi(optarg), MAX_WORKERS); break;
                case 'r': o->seed = strtoull(optarg, NULL, 10); break;
                case 'm': o->pool = optarg; break;
                case 'k': o->kill_daemon = true; break;
                default: exit(2);
                }
}

int main(int argc, char **argv) {
        static struct soak s = {.o = {.seconds = 15, .processes = 6, .pool = "4M"}, .lives = 1};

        s.o.seed = (uint64_t)time(NULL);
        parse(&s.o, argc, argv);
        s.random.state = s.o.seed;
        s.tally = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        instance_start(&s.daemon, daemon_settings(&s));
        prepare(&s);
        soak(&s);
        report(&s);
        if (s.tally->bytes_wrong || s.tally->unmarked || s.failed)
                die("FAILED: %llu wrong bytes (seed %llu)",
                    (unsigned long long)s.tally->bytes_wrong, (unsigned long long)s.o.seed);
        if (!s.o.kill_daemon && !is_used(&s))
                die("FAILED: some method was never at work (seed %llu)",
                    (unsigned long long)s.o.seed);
        expect_nothing_left(&s);
        instance_stop(&s.daemon);
        instance_sweep(&s.daemon);
        return 0;
}
