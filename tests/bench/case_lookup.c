/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tokens in, pinned chain out: 2,048 tokens, 128 blocks. The peers get the keys of the same chain,
 * so they need not hash; kvd hashes, compares every token, and pins.
 *
 *      chain-cold    another chain each time, out of all: most of its cache lines are not cached
 *      chain-hot     the same chain again
 *      chain-tail    as cold, but the prompt ends inside a run: 127 blocks
 *      chain-new     as cold, but only the shared half is stored: 64 blocks found, the next one missing
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/peers.h"
#include "tests/bench/report.h"
#include "tests/bench/work.h"

#define TAIL_TOKENS (CHAIN_TOKENS - BLOCK_TOKENS)

/* A lookup request to a peer. */
struct keys_question {
        const struct chains *chains;
        struct lmdb_peer *lmdb;
        struct redis_peer *redis;
        struct socket_peer *socket;
        enum redis_form form;
        uint64_t sum;
        struct block_key keys[CHAIN_BLOCKS];
};

struct world {
        const struct bench *bench;
        struct chains chains;
        struct kvd_side kvd;
        struct lmdb_peer *lmdb;
        struct redis_peer *redis;
        struct socket_peer *socket;
};

/* ---- kvd ------------------------------------------------------------------------------------- */

static int ask_and_unpin(void *ctx) {
        struct question *q = ctx;
        int r;

        r = question_ask(q);
        question_finish(q);
        return r;
}

static struct contender with_unpin(struct question *q) {
        return (struct contender){"kvd-and-unpin", question_prepare, ask_and_unpin, NULL, q};
}

/* ---- peers ----------------------------------------------------------------------------------- */

static int keys_prepare(void *ctx, uint32_t chain) {
        struct keys_question *q = ctx;

        chain_keys(q->chains, chain, q->keys);
        return q->redis ? redis_peer_prepare(q->redis, q->form, q->keys, CHAIN_BLOCKS, NULL, 0) : 0;
}

static int ask_lmdb(void *ctx) {
        struct keys_question *q = ctx;

        return lmdb_peer_get(q->lmdb, q->keys, CHAIN_BLOCKS, &q->sum) != CHAIN_BLOCKS;
}

static int ask_redis(void *ctx) {
        struct keys_question *q = ctx;

        return redis_peer_ask(q->redis) != CHAIN_BLOCKS;
}

static int ask_socket(void *ctx) {
        struct keys_question *q = ctx;

        return socket_peer_get(q->socket, q->keys, CHAIN_BLOCKS) != CHAIN_BLOCKS;
}

static void add_redis(struct contest *contest, struct world *w, struct keys_question questions[3]) {
        static const char *const names[] = {[REDIS_PIPELINE] = "redis-pipeline",
                                            [REDIS_EXISTS] = "redis-exists",
                                            [REDIS_MGET] = "redis-mget"};

        for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
                questions[i] = (struct keys_question){.chains = &w->chains, .redis = w->redis};
                questions[i].form = (enum redis_form)i;
                contest_add(contest, (struct contender){names[i], keys_prepare, ask_redis, NULL,
                                                        &questions[i]});
        }
}

static void add_peers(struct contest *contest, struct world *w) {
        static struct keys_question lmdb, socket, redis[3];

        lmdb = (struct keys_question){.chains = &w->chains, .lmdb = w->lmdb};
        socket = (struct keys_question){.chains = &w->chains, .socket = w->socket};
        if (w->lmdb)
                contest_add(contest,
                            (struct contender){"lmdb", keys_prepare, ask_lmdb, NULL, &lmdb});
        else
                report_absent(contest->name, "lmdb", "not installed when this was built");
        if (w->socket)
                contest_add(contest,
                            (struct contender){"socket", keys_prepare, ask_socket, NULL, &socket});
        if (w->redis)
                add_redis(contest, w, redis);
        else
                report_absent(contest->name, "redis", "not installed");
}

/* ---- contests -------------------------------------------------------------------------------- */

static int run_chain(struct world *w, const char *name, bool hot, struct question shape,
                     bool with_peers) {
        static struct question q, unpinned;
        struct contest contest = bench_contest(w->bench, name, w->chains.n_blocks,
                                               w->chains.n_chains);

        if (!bench_wants(w->bench, name))
                return 0;
        q = unpinned = shape;
        q.chains = unpinned.chains = &w->chains;
        q.kvd = unpinned.kvd = &w->kvd;
        contest.hot = hot;
        contest_add(&contest, (struct contender){"kvd", question_prepare, question_ask,
                                                 question_finish, &q});
        contest_add(&contest, with_unpin(&unpinned));
        if (with_peers)
                add_peers(&contest, w);
        return bench_run(w->bench, &contest);
}

static int run_chains(struct world *w) {
        struct question whole = {.n_tokens = CHAIN_TOKENS, .expected = CHAIN_TOKENS};
        struct question tail = {.n_tokens = TAIL_TOKENS, .expected = TAIL_TOKENS};
        struct question new = {.n_tokens = CHAIN_TOKENS, .expected = TRUNK_BLOCKS * BLOCK_TOKENS,
                               .unknown_suffix = true};
        int r;

        r = run_chain(w, "chain-cold", false, whole, true);
        if (r >= 0)
                r = run_chain(w, "chain-hot", true, whole, true);
        if (r >= 0)
                r = run_chain(w, "chain-tail", false, tail, false);
        return r < 0 ? r : run_chain(w, "chain-new", false, new, false);
}

/* ---- set-up ---------------------------------------------------------------------------------- */

/* Peers that are not installed stay NULL; the run ends if an installed one fails. */
static int start_peers(struct world *w, const char *dir) {
        uint64_t n = w->chains.n_blocks;
        int r;

        say("filling peers with %llu keys\n", (unsigned long long)n);
        r = lmdb_peer_new(dir, n * 256 + (UINT64_C(64) << 20), &w->lmdb);
        if (r >= 0)
                r = lmdb_peer_fill(w->lmdb, n);
        if (r < 0 && r != -ENOSYS)
                return r;
        r = redis_peer_new(dir, &w->redis);
        if (r >= 0)
                r = redis_peer_fill(w->redis, n);
        if (r < 0 && r != -ENOSYS)
                return r;
        return socket_peer_new(n, &w->socket);
}

static int start_world(struct world *w, uint64_t entries, const char *dir) {
        uint64_t begin;
        int r;

        w->chains = chains_plan(entries);
        r = kvd_side_start(&w->kvd, w->bench->kvd, dir, &tiny_geometry,
                           w->chains.n_blocks + w->chains.n_blocks / 8);
        if (r < 0)
                return r;
        begin = now_ns();
        r = fill_chains(&w->kvd, &w->chains);
        if (r < 0)
                return r;
        say("kvd filled with %u chains, %llu blocks, in %.1f s\n", w->chains.n_chains,
            (unsigned long long)w->chains.n_blocks, (double)(now_ns() - begin) / 1e9);
        return start_peers(w, dir);
}

static void end_world(struct world *w) {
        lmdb_peer_free(w->lmdb);
        redis_peer_free(w->redis);
        socket_peer_free(w->socket);
        kvd_side_end(&w->kvd);
}

static int lookups_among(const struct bench *bench, uint64_t entries) {
        struct world w = {.bench = bench, .kvd = {.daemon = NO_PROCESS}};
        char dir[256];
        int r;

        snprintf(dir, sizeof dir, "%s/lookup-%llu", bench->dir, (unsigned long long)entries);
        if (mkdir(dir, 0700) < 0)
                return -errno;
        r = start_world(&w, entries, dir);
        if (r >= 0)
                r = run_chains(&w);
        end_world(&w);
        return r;
}

int cases_lookup(const struct bench *bench) {
        static const char *const names[] = {"chain-cold", "chain-hot", "chain-tail", "chain-new",
                                            NULL};
        int r = 0;

        if (!bench_wants_any(bench, names))
                return 0;
        for (uint32_t i = 0; i < bench->n_sizes && r >= 0; i++)
                r = lookups_among(bench, bench->sizes[i]);
        return r;
}
