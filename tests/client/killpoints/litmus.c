/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Recycled blocks must not fool a reader. A writer publishes two chains in turn and evicts each at
 * once, in a space so small that both use the same blocks. So the blocks' ids get other content
 * with a higher generation as fast as the daemon answers. The chains have the same tokens in their
 * second block, so that only the link to the first one tells these apart. Readers, one on each
 * processor, look up both and check every byte. With --runs each chain has two runs, and the second
 * run is the same.
 *
 *      litmus [--seconds N] [--seed N] [--runs] [--shake] [--mutant]
 *
 * The test ends after --seconds, or else once WRITTEN chains were written and FOUND were found,
 * which takes some seconds on an idle machine. --shake lets the readers' library pause at random
 * points (hook.h). --mutant: this binary is linked with a library that was broken on purpose. The
 * test passes if a wrong byte is seen. It may run many times as long as that usually takes, and
 * ignores --seconds.
 */

#include <errno.h>
#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/layout.h"
#include "ipc/base/util.h"
#include "tests/client/killpoints/chains.h"
#include "tests/client/killpoints/hook.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"

struct tally { /* shared by all processes */
        _Atomic uint64_t lookups, hits, wrong, retries, rewritten;
        _Atomic bool stop;
};

#define MAX_READERS 16u

struct reader {
        struct kvd_space *space;
        struct random random;
        uint64_t lookups, hits; /* not yet added to the tally */
};

struct litmus {
        uint32_t seconds, n_readers;
        uint64_t seed;
        bool shake, mutant;
        uint32_t n_blocks, n_tokens; /* of a chain */
        struct instance daemon;
        struct tally *tally;
};

static uint32_t processors(void) {
        cpu_set_t all;

        sched_getaffinity(0, sizeof all, &all);
        return (uint32_t)CPU_COUNT(&all);
}

static void on_processor(int n) {
        cpu_set_t all, one;

        CPU_ZERO(&one);
        sched_getaffinity(0, sizeof all, &all);
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
                if (CPU_ISSET(cpu, &all) && n-- == 0) {
                        CPU_SET(cpu, &one);
                        sched_setaffinity(0, sizeof one, &one);
                        return;
                }
}

static struct kvd_space *open_space(const struct litmus *l) {
        /* half of the blocks may be being filled */
        struct kvd_space_options options = {.max_blocks = MAX(2 * l->n_blocks, 16)};
        struct kvd_space *space;
        struct kvd *handle;

        if (kvd_open(l->daemon.socket, &handle) < 0 ||
            kvd_space_open(handle, "litmus", &chain_geometry, &options, &space) < 0)
                die("%s", kvd_error());
        return space;
}

/* Two chains that differ only in their first block. */
static void chain_of(uint32_t which, uint32_t *ret) {
        for (uint32_t i = 0; i < CHAIN_TOKENS; i++)
                ret[i] = i < BT ? 10 + which : 100 + i;
}

/* ---- the writer ------------------------------------------------------------------------------ */

static void evict_all(struct conn *conn) {
        struct kvd_msg_evict request = {.space = kvd_slice_of("litmus")};

        if (conn_call(conn, KVD_MSG_evict, &request, NULL) < 0)
                die("evict: %s", kvd_error());
}

static void write_rounds(struct litmus *l, int processor) {
        struct conn *conn = instance_connect(&l->daemon);
        struct kvd_space *space = open_space(l);
        uint32_t tokens[2][CHAIN_TOKENS];

        chain_of(0, tokens[0]);
        chain_of(1, tokens[1]);
        for (uint32_t i = 0; !l->tally->stop; i = !i) {
                struct kvd_pin pin = {0};
                int r = chain_publish(space, &pin, tokens[i], l->n_tokens, false);

                if (r < 0 && r != -ENOBUFS)
                        die("publish: %s", kvd_error());
                kvd_unpin(space, &pin);
                evict_all(conn);
                l->tally->rewritten += r > 0;
        }
}

/* ---- the reader ------------------------------------------------------------------------------ */

/* Uses the blocks for a while, as an engine does: up to some ten microseconds. */
static void dwell(struct random *random) {
        for (uint32_t n = random_below(random, 20000); n; n--)
                __asm__ volatile("");
}

static void look(struct litmus *l, struct reader *r, const uint32_t *tokens) {
        struct kvd_pin pin = {0};
        uint32_t ids[CHAIN_BLOCKS];

        r->lookups++;
        if (kvd_lookup(r->space, 0, tokens, l->n_tokens, ids, CHAIN_BLOCKS, &pin) <= 0)
                return;
        r->hits++;
        if (random_below(&r->random, 4) == 0)
                dwell(&r->random);
        l->tally->wrong += chain_wrong(&pin, ids, tokens, false);
        kvd_unpin(r->space, &pin);
}

#define ROUND 64u /* lookups between two updates of the shared tally */

static void read_rounds(struct litmus *l, int processor) {
        struct reader r = {.space = open_space(l), .random = {l->seed + (uint64_t)processor}};
        uint32_t tokens[2][CHAIN_TOKENS];
        struct kvd_counters counters;

        chain_of(0, tokens[0]);
        chain_of(1, tokens[1]);
        if (l->shake)
                hook_shake(r.random.state);
        hook_start();
        while (!l->tally->stop) {
                if (!r.hits) /* the segment of the first blocks is newer than this client */
                        kvd_catch_up(r.space);
                r.lookups = r.hits = 0;
                for (uint32_t i = 0; i < ROUND; i++)
                        look(l, &r, tokens[i % 2]);
                l->tally->lookups += r.lookups;
                l->tally->hits += r.hits;
        }
        hook_stop();
        kvd_counters(r.space, &counters);
        l->tally->retries += counters.retries;
}

/* ---- the test -------------------------------------------------------------------------------- */

static pid_t start(struct litmus *l, void (*run)(struct litmus *, int), int processor) {
        pid_t pid = fork();

        if (pid)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        on_processor(processor);
        run(l, processor);
        exit(0);
}

static void expect_end(pid_t pid) {
        int status;

        if (waitpid(pid, &status, 0) != pid || status != 0)
                die("a process of the test ended with status %#x", status);
}

/*
 * The least number of chains to write and to find. A mutant gets 50 times as many as it needs to
 * show a wrong byte.
 */
#define WRITTEN 50000u
#define FOUND 5000u
#define MUTANT_WRITTEN 2500000u
#define MUTANT_FOUND 150000u

/* On a busy machine this takes a while. The test's timeout ends a run that never gets there. */
static bool have_met(const struct litmus *l) {
        const struct tally *t = l->tally;

        if (l->mutant)
                return t->rewritten >= MUTANT_WRITTEN && t->hits >= MUTANT_FOUND;
        if (l->seconds)
                return t->rewritten && t->hits;
        return t->rewritten >= WRITTEN && t->hits >= FOUND;
}

static bool is_over(const struct litmus *l, time_t end) {
        return l->tally->wrong || (have_met(l) && (l->mutant || time(NULL) >= end));
}

/* A child ends early only if it failed. The test then stops the others. */
static bool one_has_ended(void) {
        siginfo_t info = {0};

        return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid;
}

static void run(struct litmus *l) {
        time_t end = time(NULL) + l->seconds;
        pid_t readers[MAX_READERS], writer = start(l, write_rounds, 1);

        for (uint32_t i = 0; i < l->n_readers; i++)
                readers[i] = start(l, read_rounds, (int)i);
        while (!is_over(l, end) && !one_has_ended())
                usleep(1000);
        l->tally->stop = true;
        for (uint32_t i = 0; i < l->n_readers; i++)
                expect_end(readers[i]);
        expect_end(writer);
}

static int verdict(const struct litmus *l) {
        const struct tally *t = l->tally;

        printf("{\"lookups\": %llu, \"hits\": %llu, \"rewritten\": %llu, \"retries\": %llu, "
               "\"wrong_bytes\": %llu, "
               "\"seed\": %llu}\n",
               (unsigned long long)t->lookups, (unsigned long long)t->hits,
               (unsigned long long)t->rewritten, (unsigned long long)t->retries,
               (unsigned long long)t->wrong, (unsigned long long)l->seed);
        if (!l->mutant && t->wrong)
                die("FAILED: wrong bytes");
        if (l->mutant && !t->wrong)
                die("FAILED: the mutant was not caught");
        return 0;
}

static void parse(struct litmus *l, int argc, char **argv) {
        static const struct option known[] = {{"seconds", required_argument, NULL, 's'},
                                              {"seed", required_argument, NULL, 'r'},
                                              {"runs", no_argument, NULL, 'u'},
                                              {"shake", no_argument, NULL, 'k'},
                                              {"mutant", no_argument, NULL, 'm'},
                                              {0}};
        int c;

        while ((c = getopt_long(argc, argv, "", known, NULL)) != -1)
                switch (c) {
                case 's': l->seconds = (uint32_t)atoi(optarg); break;
                case 'r': l->seed = strtoull(optarg, NULL, 10); break;
                case 'u': l->n_blocks = 2 * KVD_RUN_BLOCKS; break;
                case 'k': l->shake = true; break;
                case 'm': l->mutant = true; break;
                default: exit(2);
                }
}

int main(int argc, char **argv) {
        struct litmus l = {.seed = (uint64_t)time(NULL),
                           .n_blocks = 2,
                           .n_readers = MIN(processors(), MAX_READERS)};

        parse(&l, argc, argv);
        l.n_tokens = l.n_blocks * BT;
        hook_install();
        l.tally = mmap(NULL, sizeof *l.tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                       -1, 0);
        instance_start(&l.daemon, SETTINGS("daemon.pool=4M", "daemon.segment=256K",
                                           "daemon.pages=small", "daemon.log=error"));
        run(&l);
        instance_stop(&l.daemon);
        instance_sweep(&l.daemon);
        return verdict(&l);
}
