/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Random alloc, lookup, pin, seal, evict and kill -9 by many processes. There must be 0 wrong
 * bytes, and nothing may be left over.
 *
 *      soak [--seconds N] [--processes N] [--seed N] [--pool BYTES] [--arena] [--epoll] [--kill-daemon] [--huge]
 *           [--threads] [--idle N]
 *
 * --idle N: further clients, of one process, that are only attached. --threads runs the workers as
 * threads of this process (for ThreadSanitizer). No worker is killed then.
 */

#include <errno.h>
#include <getopt.h>
#include <pthread.h>
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
#include "tests/daemon/soak/worker.h"

#define MAX_WORKERS 32

struct options {
        uint32_t seconds, processes, idle;
        uint64_t seed;
        const char *pool;
        bool arena, epoll, kill_daemon, threads, huge;
};

struct soak {
        struct options o;
        struct instance daemon;
        struct tally *tally; /* shared with the workers */
        struct random random;
        pid_t pids[MAX_WORKERS], idle;
        pthread_t threads[MAX_WORKERS];
        uint64_t started; /* workers, for their seeds */
        bool failed;
};

/* ---- workers --------------------------------------------------------------------------------- */

static struct worker_options worker_options(struct soak *s) {
        return (struct worker_options){
                .socket = s->daemon.socket,
                .tally = s->tally,
                .seed = s->o.seed * 1000003 + s->started++,
                .may_die = !s->o.threads,
                .daemon_may_die = s->o.kill_daemon,
                .threads = s->o.threads,
        };
}

static void *thread_main(void *arg) {
        struct worker_options *o = arg;
        int r = worker_run(o);

        free(o);
        return (void *)(intptr_t)r;
}

static void start_worker(struct soak *s, uint32_t i) {
        struct worker_options o = worker_options(s), *copy;

        if (s->o.threads) {
                copy = malloc(sizeof *copy);
                *copy = o;
                pthread_create(&s->threads[i], NULL, thread_main, copy);
                return;
        }
        s->pids[i] = fork();
        if (s->pids[i] == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                _exit(worker_run(&o));
        }
}

static void start_idle(struct soak *s) {
        struct worker_options o = worker_options(s);

        if (!s->o.idle)
                return;
        s->idle = fork();
        if (s->idle == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                _exit(worker_idle(&o, s->o.idle));
        }
}

static void note_end(struct soak *s, int status) {
        if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
                s->failed = true;
        if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) {
                fprintf(stderr, "a worker was killed by signal %d\n", WTERMSIG(status));
                s->failed = true;
        }
}

/* Kills a worker now and then, and replaces each that has ended. */
static void shake(struct soak *s) {
        uint32_t i = random_below(&s->random, s->o.processes);
        int status;

        if (random_below(&s->random, 3) == 0) {
                kill(s->pids[i], random_below(&s->random, 4) ? SIGKILL : SIGSTOP);
                kill(s->pids[i], SIGCONT);
        }
        for (i = 0; i < s->o.processes; i++)
                if (waitpid(s->pids[i], &status, WNOHANG) == s->pids[i]) {
                        note_end(s, status);
                        start_worker(s, i);
                }
}

static void end_workers(struct soak *s) {
        int status;
        void *result;

        s->tally->stop = true;
        for (uint32_t i = 0; i < s->o.processes; i++) {
                if (s->o.threads) {
                        pthread_join(s->threads[i], &result);
                        s->failed |= result != NULL;
                        continue;
                }
                if (i % 2) /* half of them die in the middle of an operation */
                        kill(s->pids[i], SIGKILL);
                waitpid(s->pids[i], &status, 0);
                note_end(s, status);
        }
        if (s->idle) {
                waitpid(s->idle, &status, 0);
                note_end(s, status);
        }
}

/* ---- the daemon ------------------------------------------------------------------------------ */

static const char *const *daemon_settings(const struct soak *s) {
        static const char *settings[12];
        static char pool[64], users[64];
        uint32_t n = 0;

        snprintf(pool, sizeof pool, "daemon.pool=%s", s->o.pool);
        settings[n++] = pool;
        settings[n++] = "daemon.segment=256K";
        settings[n++] = s->o.huge ? "daemon.pages=huge" : "daemon.pages=small";
        if (s->o.arena) {
                snprintf(users, sizeof users, "domain soak.users=%u", getuid());
                settings[n++] = users;
                settings[n++] = "domain soak.isolation=arena";
        }
        if (s->o.epoll)
                settings[n++] = "daemon.loop=epoll";
        if (s->o.idle) {
                settings[n++] = "daemon.max_clients=400";
                settings[n++] = "daemon.user_clients=399";
        }
        settings[n] = NULL;
        return settings;
}

static void replace_daemon(struct soak *s) {
        instance_kill(&s->daemon);
        instance_again(&s->daemon, daemon_settings(s));
}

/* ---- the end --------------------------------------------------------------------------------- */

static void delete_space(struct conn *conn, const char *name) {
        struct kvd_msg_space_delete request = {.space = kvd_slice_of(name)};
        int r = conn_call(conn, KVD_MSG_space_delete, &request, NULL);

        if (r < 0 && r != -ENOENT)
                die("space_delete %s: %s", name, kvd_error());
}

/* Descriptors of a daemon that has one client and no space. */
static uint32_t fds_at_rest(const struct soak *s) {
        struct conn *conn = instance_connect(&s->daemon);
        uint32_t n = instance_fds(&s->daemon);

        conn_close(conn);
        return n;
}

static uint64_t pool_used(struct conn *conn) {
        struct kvd_msg_daemon_info_reply info;

        if (conn_call(conn, KVD_MSG_daemon_info, NULL, &info) < 0)
                die("daemon_info: %s", kvd_error());
        return info.pool_used;
}

/* The workers have ended: only the cache may be left, and deleting the spaces must free it. */
static void expect_nothing_left(struct soak *s, uint32_t fds_before) {
        struct conn *conn = instance_connect(&s->daemon);

        expect_quiet(conn);
        expect_clean(conn);
        delete_space(conn, "causal");
        delete_space(conn, "whole");
        delete_space(conn, "keyed");
        WAIT_UNTIL(pool_used(conn) == 0);
        /* pidfds of processes that are just ending */
        WAIT_UNTIL(instance_fds(&s->daemon) == fds_before);
        conn_close(conn);
}

static void report(const struct soak *s) {
        const struct tally *t = s->tally;

        printf("{\"operations\": %llu, \"blocks_checked\": %llu, \"bytes_checked\": %llu, "
               "\"wrong_bytes\": %llu, "
               "\"tokens_found\": %llu, "
               "\"blocks_sealed\": %llu, \"leases\": %llu, \"refusals\": %llu, \"suicides\": %llu, "
               "\"workers\": %llu, "
               "\"daemon_lost\": %llu, \"seed\": %llu}\n",
               (unsigned long long)t->operations,
               (unsigned long long)(t->bytes_checked / kvd_block_bytes(&soak_geometry)),
               (unsigned long long)t->bytes_checked, (unsigned long long)t->bytes_wrong,
               (unsigned long long)t->tokens_found, (unsigned long long)t->blocks_sealed,
               (unsigned long long)t->leases, (unsigned long long)t->refusals,
               (unsigned long long)t->deaths, (unsigned long long)s->started,
               (unsigned long long)t->daemon_lost, (unsigned long long)s->o.seed);
}

static uint64_t now_ms(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static void soak(struct soak *s) {
        uint64_t end = now_ms() + s->o.seconds * 1000, restart = now_ms() + 1000;
        struct conn *conn;

        for (uint32_t i = 0; i < s->o.processes; i++)
                start_worker(s, i);
        start_idle(s);
        while (now_ms() < end && !s->failed && !s->tally->bytes_wrong) {
                usleep(20000);
                if (!s->o.threads)
                        shake(s);
                if (s->o.kill_daemon && now_ms() > restart) {
                        replace_daemon(s);
                        restart = now_ms() + 500 + random_below(&s->random, 1000);
                }
                if (random_below(&s->random, 20) == 0) {
                        conn = instance_connect(&s->daemon);
                        expect_clean(conn);
                        conn_close(conn);
                }
        }
        end_workers(s);
}

/* ---- main ------------------------------------------------------------------------------------ */

static void parse(struct options *o, int argc, char **argv) {
        static const struct option known[] = {{"seconds", required_argument, NULL, 's'},
                                              {"processes", required_argument, NULL, 'p'},
                                              {"seed", required_argument, NULL, 'r'},
                                              {"pool", required_argument, NULL, 'm'},
                                              {"arena", no_argument, NULL, 'a'},
                                              {"epoll", no_argument, NULL, 'e'},
                                              {"kill-daemon", no_argument, NULL, 'k'},
                                              {"threads", no_argument, NULL, 't'},
                                              {"huge", no_argument, NULL, 'h'},
                                              {"idle", required_argument, NULL, 'i'},
                                              {0}};
        int c;

        while ((c = getopt_long(argc, argv, "", known, NULL)) != -1)
                switch (c) {
                case 's': o->seconds = (uint32_t)atoi(optarg); break;
                case 'p': o->processes = (uint32_t)MIN(atoi(optarg), MAX_WORKERS); break;
                case 'r': o->seed = strtoull(optarg, NULL, 10); break;
                case 'm': o->pool = optarg; break;
                case 'a': o->arena = true; break;
                case 'e': o->epoll = true; break;
                case 'k': o->kill_daemon = true; break;
                case 't': o->threads = true; break;
                case 'h': o->huge = true; break;
                case 'i': o->idle = (uint32_t)atoi(optarg); break;
                default: exit(2);
                }
}

int main(int argc, char **argv) {
        static struct soak s = {.o = {.seconds = 10, .processes = 8, .pool = "4M"}};
        uint32_t fds;

        s.o.seed = (uint64_t)time(NULL);
        parse(&s.o, argc, argv);
        s.random.state = s.o.seed;
        s.tally = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        instance_start(&s.daemon, daemon_settings(&s));
        fds = fds_at_rest(&s);
        soak(&s);
        report(&s);
        if (s.tally->bytes_wrong || s.failed)
                die("FAILED: %llu wrong bytes (seed %llu)",
                    (unsigned long long)s.tally->bytes_wrong, (unsigned long long)s.o.seed);
        expect_nothing_left(&s, fds);
        instance_stop(&s.daemon);
        instance_sweep(&s.daemon);
        return 0;
}
