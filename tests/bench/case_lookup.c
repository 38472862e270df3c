/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tokens in, pinned chain out: 2,048 tokens, 128 blocks. The peers get the keys of the same chain,
 * so they need not hash; kvd hashes, compares every token, and pins.
 *
 *      chain-cold    another chain each time, out of all: most of its cache lines are not cached
 *      chain-hot     the same chain again
 *      index         bytes of address space per block: descriptor, tokens, tables, runs
 *      attach        a new client connects, opens the space, and gets its first answer, a whole chain
 */

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include "ipc/base/layout.h"
#include "tests/bench/bench.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/peers.h"
#include "tests/bench/report.h"

struct world {
        struct chains chains;
        struct kvd_side kvd;
        struct peers peers;
        struct peer *runs; /* NULL if not installed */
        kvd *handle;       /* of a client that attaches, */
        kvd_space *space;
        struct kvd_pin pin; /* and of any: the answer, until it is released */
        uint32_t tokens[CHAIN_TOKENS], ids[CHAIN_BLOCKS];
};

/* ---- lookups --------------------------------------------------------------------------------- */

static int choose(void *ctx, uint32_t chain) {
        struct world *w = ctx;

        chain_tokens(&w->chains, chain, w->tokens);
        return 0;
}

static int look_up(struct world *w, kvd_space *space) {
        return kvd_lookup(space, 0, w->tokens, CHAIN_TOKENS, w->ids, CHAIN_BLOCKS, &w->pin) !=
               CHAIN_TOKENS;
}

static int ask(void *ctx) {
        struct world *w = ctx;

        return look_up(w, w->kvd.space);
}

static int unpin(void *ctx) {
        struct world *w = ctx;

        kvd_unpin(w->kvd.space, &w->pin);
        return 0;
}

static int choose_keys(void *ctx, uint32_t chain) {
        struct peer *peer = ctx;
        struct world *w = peer->world;

        peer->verb = PEER_FIND;
        peer->n = CHAIN_BLOCKS;
        chain_keys(&w->chains, chain, peer->keys);
        return peer->prepare ? peer->prepare(peer) : 0;
}

static int choose_runs(void *ctx, uint32_t chain) {
        struct block_key keys[CHAIN_BLOCKS];
        struct peer *peer = ctx;
        struct world *w = peer->world;

        choose(w, chain);
        chain_keys(&w->chains, chain, keys);
        peer->verb = PEER_FIND;
        peer->n = CHAIN_BLOCKS / RUN_BLOCKS;
        peer->tokens = w->tokens;
        for (uint32_t i = 0; i < peer->n; i++)
                peer->keys[i] = keys[(i + 1) * RUN_BLOCKS - 1];
        return 0;
}

static int run_chain(const struct bench *bench, struct world *w, const char *name, bool hot) {
        struct contest contest = bench_contest(bench, name, w->chains.n_chains);

        if (!bench_wants(bench, name))
                return 0;
        contest.hot = hot;
        contest_add(&contest, (struct contender){"kvd", choose, ask, unpin, w});
        peers_add(&contest, &w->peers, choose_keys);
        if (w->runs)
                contest_add(&contest, peer_contender(w->runs, choose_runs));
        return bench_run(bench, &contest);
}

/* ---- attaching ------------------------------------------------------------------------------- */

static int attach(void *ctx) {
        struct world *w = ctx;

        if (kvd_open(w->kvd.socket, &w->handle) < 0 ||
            kvd_space_open(w->handle, "bench", &w->kvd.geometry, NULL, &w->space) < 0)
                return 1;
        return look_up(w, w->space);
}

static int detach(void *ctx) {
        struct world *w = ctx;

        if (w->space) {
                kvd_unpin(w->space, &w->pin);
                w->space = kvd_space_close(w->space);
        }
        if (w->handle)
                w->handle = kvd_close(w->handle);
        process_settle(&w->kvd.daemon);
        return 0;
}

static int run_attach(const struct bench *bench, struct world *w) {
        struct contest contest = bench_contest(bench, "attach", w->chains.n_chains);

        contest.samples = bench->quick ? 1 : 3;
        contest_add(&contest, (struct contender){"kvd", choose, attach, detach, w});
        return bench_run(bench, &contest);
}

static void report_index(const struct bench *bench, const struct world *w) {
        struct kvd_index layout = {.geometry = {.block_tokens = w->kvd.geometry.block_tokens,
                                                .vocab = w->kvd.geometry.vocab},
                                   .capacity = (uint32_t)w->chains.n_blocks,
                                   .run_capacity = (uint32_t)w->chains.n_blocks / KVD_RUN_BLOCKS};

        kvd_index_lay_out(&layout);
        if (bench_wants(bench, "index"))
                report_value("index", (double)layout.size / (double)w->chains.n_blocks, " B/block");
}

/* ---- set-up ---------------------------------------------------------------------------------- */

static const char *const chain_cases[] = {"chain-cold", "chain-hot", NULL};
static const char *const other_cases[] = {"index", "attach", NULL};

static int start_runs(struct world *w, const char *dir) {
        char folder[300];
        int r;

        snprintf(folder, sizeof folder, "%s/runs", dir);
        if (mkdir(folder, 0700) < 0)
                return -errno;
        r = lmdb_peer_new(folder, w->chains.n_blocks * 256 + (UINT64_C(64) << 20), true, &w->runs);
        if (r < 0)
                return r == -ENOSYS ? 0 : r;
        w->runs->world = w;
        return w->runs->fill(w->runs, w->chains.n_blocks);
}

static int start(const struct bench *bench, struct world *w, const char *dir) {
        int r;

        w->chains = chains_plan(bench->entries);
        r = kvd_side_start(&w->kvd, bench->kvd, dir, &tiny_geometry, w->chains.n_blocks * 9 / 8,
                           NULL);
        if (r >= 0)
                r = fill_chains(&w->kvd, &w->chains);
        if (r < 0 || !bench_wants_any(bench, chain_cases))
                return r;
        r = peers_start(&w->peers, dir, w->chains.n_blocks * 256 + (UINT64_C(64) << 20), w);
        if (r >= 0)
                r = socket_peer_new(&w->peers.socket);
        if (r < 0)
                return r;
        w->peers.socket->world = w;
        r = peers_fill(&w->peers, w->chains.n_blocks);
        return r < 0 ? r : start_runs(w, dir);
}

int cases_lookup(const struct bench *bench) {
        static struct world w = {.kvd = {.daemon = NO_PROCESS}};
        char dir[256];
        int r;

        if (!bench_wants_any(bench, chain_cases) && !bench_wants_any(bench, other_cases))
                return 0;
        snprintf(dir, sizeof dir, "%s/lookup", bench->dir);
        r = mkdir(dir, 0700) < 0 ? -errno : start(bench, &w, dir);
        if (r >= 0)
                r = run_chain(bench, &w, "chain-cold", false);
        if (r >= 0)
                r = run_chain(bench, &w, "chain-hot", true);
        if (r >= 0) {
                report_index(bench, &w);
                r = run_attach(bench, &w);
        }
        if (w.runs)
                w.runs->end(w.runs);
        peers_end(&w.peers);
        kvd_side_end(&w.kvd);
        return r;
}
