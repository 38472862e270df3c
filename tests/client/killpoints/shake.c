/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Makes rare interleavings frequent: clients pause at random points inside libkvd, the space is too
 * small for them, and an evictor never stops. All chains have the same tokens after their first
 * block, so that only the link tells their runs apart. Clients check every byte that they find.
 *
 *      shake [--seconds N] [--clients N] [--seed N]
 *
 * It ends after --seconds, or else after LOOKUPS lookups, which take an idle machine some seconds.
 * In both cases it goes on until a block was evicted, a lookup has hit, and a lookup has had to
 * retry because of an eviction in progress. Otherwise the run would prove nothing.
 */

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/conn/conn.h"
#include "ipc/base/util.h"
#include "tests/client/killpoints/chains.h"
#include "tests/client/killpoints/hook.h"
#include "tests/lib/instance.h"
#include "tests/lib/oracle.h"

#define MAX_CLIENTS 16u
#define VARIANTS 6u
#define SPACE_BLOCKS 96u /* less than half of what all chains need */

struct tally { /* shared by all processes */
        _Atomic uint64_t lookups, hits, retries, sealed, refused, evicted, bytes_checked,
                bytes_wrong;
        _Atomic bool stop;
};

struct shaking {
        uint32_t seconds, clients;
        uint64_t seed;
        struct instance daemon;
        struct tally *tally;
};

static struct kvd_space *open_space(const struct shaking *s) {
        struct kvd_space_options options = {.max_blocks = SPACE_BLOCKS};
        struct kvd_space *space;
        struct kvd *handle;

        if (kvd_open(s->daemon.socket, &handle) < 0 ||
            kvd_space_open(handle, "shaken", &chain_geometry, &options, &space) < 0)
                die("%s", kvd_error());
        return space;
}

static void variant_tokens(uint32_t variant, uint32_t *ret) {
        for (uint32_t i = 0; i < CHAIN_TOKENS; i++)
                ret[i] = i < BT ? 10 + variant : 100 + i;
}

/* ---- clients --------------------------------------------------------------------------------- */

static void check(struct tally *t, const struct kvd_pin *pin, const uint32_t *ids,
                  const uint32_t *tokens) {
        t->bytes_checked += pin->n_blocks * pin->block_bytes;
        t->bytes_wrong += chain_wrong(pin, ids, tokens, false);
}

static void publish(struct tally *t, struct kvd_space *space, struct kvd_pin *pin,
                    const uint32_t *tokens, uint32_t n_tokens) {
        int r = chain_publish(space, pin, tokens, n_tokens, false);

        if (r >= 0)
                t->sealed += (uint64_t)r;
        else if (r == -ENOBUFS || r == -EDQUOT || r == -ESTALE)
                t->refused++;
        else
                die("publish: %s", kvd_error());
}

/* Looks up a chain, and extends it half of the time. */
static void turn(struct tally *t, struct kvd_space *space, struct random *random) {
        uint32_t tokens[CHAIN_TOKENS], ids[CHAIN_BLOCKS];
        uint32_t n = (1 + random_below(random, CHAIN_BLOCKS)) * BT;
        struct kvd_pin pin = {0};

        variant_tokens(random_below(random, VARIANTS), tokens);
        t->lookups++;
        if (kvd_lookup(space, 0, tokens, n, ids, CHAIN_BLOCKS, &pin) > 0) {
                t->hits++;
                check(t, &pin, ids, tokens);
        }
        if (random_below(random, 2))
                publish(t, space, &pin, tokens, n);
        kvd_unpin(space, &pin);
}

#define ROUND 16u /* turns between two updates of the shared tally */

static void count_retries(struct tally *t, struct kvd_space *space, uint64_t *counted) {
        struct kvd_counters counters;

        kvd_counters(space, &counters);
        t->retries += counters.retries - *counted;
        *counted = counters.retries;
}

static void be_client(struct shaking *s, uint32_t number) {
        struct kvd_space *space = open_space(s);
        struct random random = {s->seed * MAX_CLIENTS + number};
        uint64_t counted = 0;

        hook_shake(random.state);
        hook_start();
        while (!s->tally->stop && !s->tally->bytes_wrong) {
                for (uint32_t i = 0; i < ROUND; i++)
                        turn(s->tally, space, &random);
                count_retries(s->tally, space, &counted);
        }
        hook_stop();
}

/* ---- the evictor ----------------------------------------------------------------------------- */

static void be_evictor(struct shaking *s, uint32_t number) {
        struct random random = {s->seed * MAX_CLIENTS + number};
        struct conn *conn = instance_connect(&s->daemon);
        struct kvd_msg_evict_reply reply;

        open_space(s); /* creates the space */
        while (!s->tally->stop) {
                struct kvd_msg_evict request = {.space = kvd_slice_of("shaken"),
                                                .blocks = 1 + random_below(&random, CHAIN_BLOCKS)};

                if (conn_call(conn, KVD_MSG_evict, &request, &reply) < 0)
                        die("evict: %s", kvd_error());
                s->tally->evicted += reply.evicted;
                usleep(random_below(&random, 300));
        }
}

/* ---- the test -------------------------------------------------------------------------------- */

static pid_t start(struct shaking *s, void (*be)(struct shaking *, uint32_t), uint32_t number) {
        pid_t pid = fork();

        if (pid)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        be(s, number);
        exit(0);
}

#define LOOKUPS 10000u

/* There is no timeout here: the test's timeout ends a run that never gets there. */
static bool is_over(const struct shaking *s, time_t end) {
        const struct tally *t = s->tally;

        return t->bytes_wrong || (t->retries && t->hits && t->evicted && time(NULL) >= end &&
                                  (s->seconds || t->lookups >= LOOKUPS));
}

/* A child ends early only if it failed. The test then stops the others. */
static bool one_has_ended(void) {
        siginfo_t info = {0};

        return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid;
}

static void run(struct shaking *s) {
        time_t end = time(NULL) + s->seconds;
        int status;

        start(s, be_evictor, 0);
        for (uint32_t i = 1; i <= s->clients; i++)
                start(s, be_client, i);
        while (!is_over(s, end) && !one_has_ended())
                usleep(1000);
        s->tally->stop = true;
        for (uint32_t i = 0; i <= s->clients; i++)
                if (waitpid(-1, &status, 0) < 0 || status != 0)
                        die("a process of the test ended with status %#x", status);
}

static void expect_nothing_left(const struct shaking *s) {
        struct conn *conn = instance_connect(&s->daemon);

        expect_quiet(conn);
        expect_clean(conn);
        conn_close(conn);
}

static int verdict(const struct shaking *s) {
        const struct tally *t = s->tally;

        printf("{\"lookups\": %llu, \"hits\": %llu, \"retries\": %llu, \"sealed\": %llu, "
               "\"refused\": %llu, "
               "\"evicted\": %llu, \"bytes_checked\": %llu, \"wrong_bytes\": %llu, \"seed\": "
               "%llu}\n",
               (unsigned long long)t->lookups, (unsigned long long)t->hits,
               (unsigned long long)t->retries, (unsigned long long)t->sealed,
               (unsigned long long)t->refused, (unsigned long long)t->evicted,
               (unsigned long long)t->bytes_checked, (unsigned long long)t->bytes_wrong,
               (unsigned long long)s->seed);
        if (t->bytes_wrong)
                die("FAILED: wrong bytes");
        if (!t->retries || !t->hits || !t->evicted)
                die("FAILED: no lookup met an eviction in progress, so the test proves nothing");
        return 0;
}

static void parse(struct shaking *s, int argc, char **argv) {
        static const struct option known[] = {{"seconds", required_argument, NULL, 's'},
                                              {"clients", required_argument, NULL, 'c'},
                                              {"seed", required_argument, NULL, 'r'},
                                              {0}};
        int c;

        while ((c = getopt_long(argc, argv, "", known, NULL)) != -1)
                switch (c) {
                case 's': s->seconds = (uint32_t)atoi(optarg); break;
                case 'c': s->clients = (uint32_t)MIN(atoi(optarg), (int)MAX_CLIENTS - 1); break;
                case 'r': s->seed = strtoull(optarg, NULL, 10); break;
                default: exit(2);
                }
}

int main(int argc, char **argv) {
        struct shaking s = {.clients = 4, .seed = (uint64_t)time(NULL)};

        parse(&s, argc, argv);
        hook_install();
        s.tally = mmap(NULL, sizeof *s.tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                       -1, 0);
        instance_start(&s.daemon, SETTINGS("daemon.pool=4M", "daemon.segment=64K",
                                           "daemon.pages=small", "daemon.log=error"));
        run(&s);
        expect_nothing_left(&s);
        instance_stop(&s.daemon);
        instance_sweep(&s.daemon);
        return verdict(&s);
}
