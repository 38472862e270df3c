/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The same hot lookup while another process, on another processor together with the daemon, takes,
 * seals and lets go of blocks of the same space as fast as it can; the pool is full, so that it
 * also evicts all the time.
 *
 *      chain-busy    beside "idle": the same, the writer standing still
 */

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/report.h"

#define BATCH 16u
#define MAX_CHAINS 2048u
#define PATIENCE_MS 10000u

/* Between us and the writer. */
struct shared {
        _Atomic int go;
        _Atomic uint64_t sealed, refused; /* batches */
};

struct world {
        struct chains chains;
        struct kvd_side kvd;
        struct process writer;
        struct shared *shared;
        struct kvd_pin pin, held[MAX_CHAINS]; /* held: nothing that is asked for may be evicted */
        uint32_t tokens[CHAIN_TOKENS], ids[CHAIN_BLOCKS];
};

/* ---- the writer ------------------------------------------------------------------------------ */

static int publish(kvd_space *space, uint64_t batch) {
        struct kvd_block blocks[BATCH];
        uint32_t tokens[BATCH * BLOCK_TOKENS];
        struct kvd_pin pin = {0};

        for (uint32_t i = 0; i < BATCH; i++)
                block_tokens((UINT64_C(1) << 40) + batch * BATCH + i, tokens + i * BLOCK_TOKENS);
        int r = take_blocks(space, BATCH, blocks);

        if (r < 0)
                return r;
        if (kvd_seal(space, &pin, BATCH, blocks, tokens, BATCH * BLOCK_TOKENS) != BATCH)
                return -EIO;
        kvd_unpin(space, &pin);
        return 0;
}

static void write_on(void *ctx) {
        struct world *w = ctx;
        kvd_space *space;
        kvd *handle;
        int r = 0;

        if (kvd_open(w->kvd.socket, &handle) < 0 ||
            kvd_space_open(handle, "bench", &w->kvd.geometry, NULL, &space) < 0)
                return;
        for (uint64_t batch = 0; r == 0 || r == -ENOBUFS;) {
                if (!atomic_load(&w->shared->go)) {
                        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
                        continue;
                }
                r = publish(space, batch);
                if (r == 0)
                        atomic_store(&w->shared->sealed, ++batch);
                else
                        atomic_fetch_add(&w->shared->refused, 1);
        }
}

/* ---- us -------------------------------------------------------------------------------------- */

static void pause_ms(long ms) {
        nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

/* Starts or stops the writer, and waits until it has noticed. */
static int choose(struct world *w, uint32_t chain, int go) {
        uint64_t sealed = atomic_load(&w->shared->sealed);

        chain_tokens(&w->chains, chain, w->tokens);
        if (atomic_exchange(&w->shared->go, go) == go)
                return 0;
        pause_ms(2);
        for (uint32_t i = 0; go && i < PATIENCE_MS && atomic_load(&w->shared->sealed) == sealed;
             i++)
                pause_ms(1);
        return go && atomic_load(&w->shared->sealed) == sealed;
}

static int choose_busy(void *ctx, uint32_t chain) {
        return choose(ctx, chain, 1);
}

static int choose_idle(void *ctx, uint32_t chain) {
        return choose(ctx, chain, 0);
}

static int ask(void *ctx) {
        struct world *w = ctx;

        return kvd_lookup(w->kvd.space, 0, w->tokens, CHAIN_TOKENS, w->ids, CHAIN_BLOCKS,
                          &w->pin) != CHAIN_TOKENS;
}

static int unpin(void *ctx) {
        struct world *w = ctx;

        kvd_unpin(w->kvd.space, &w->pin);
        return 0;
}

static int hold_all(struct world *w) {
        for (uint32_t i = 0; i < w->chains.n_chains; i++) {
                int64_t found;

                chain_tokens(&w->chains, i, w->tokens);
                found = kvd_lookup(w->kvd.space, 0, w->tokens, CHAIN_TOKENS, w->ids, CHAIN_BLOCKS,
                                   &w->held[i]);
                if (found != CHAIN_TOKENS)
                        return -ENOMSG;
        }
        return 0;
}

/* ---- set-up ---------------------------------------------------------------------------------- */

/* Daemon and writer on the other processor. */
static int start_there(struct world *w, const struct bench *bench, const char *dir) {
        int r;

        r = kvd_side_start(&w->kvd, bench->kvd, dir, &tiny_geometry,
                           w->chains.n_blocks + w->chains.n_blocks / 4);
        if (r >= 0)
                r = fill_chains(&w->kvd, &w->chains);
        return r < 0 ? r : process_run(write_on, w, &w->writer);
}

static int start(struct world *w, const struct bench *bench, const char *dir) {
        int r;

        if (mkdir(dir, 0700) < 0)
                return -errno;
        w->shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (w->shared == MAP_FAILED)
                return -errno;
        process_stay_on(bench->other_cpu);
        r = start_there(w, bench, dir);
        process_stay_on(bench->cpu);
        return r < 0 ? r : hold_all(w);
}

static int run(struct world *w, const struct bench *bench) {
        struct contest contest = bench_contest(bench, "chain-busy", w->chains.n_blocks,
                                               w->chains.n_chains);
        int r;

        contest.hot = true;
        contest.samples *= 10; /* time for the writer to get somewhere */
        contest_add(&contest, (struct contender){"kvd", choose_busy, ask, unpin, w});
        contest_add(&contest, (struct contender){"idle", choose_idle, ask, unpin, w});
        r = bench_run(bench, &contest);
        say("the writer sealed %llu batches meanwhile, and was refused %llu times\n",
            (unsigned long long)atomic_load(&w->shared->sealed),
            (unsigned long long)atomic_load(&w->shared->refused));
        return r;
}

int cases_busy(const struct bench *bench) {
        static struct world w;
        char dir[256];
        int r;

        if (!bench_wants(bench, "chain-busy"))
                return 0;
        if (bench->other_cpu < 0) {
                report_absent("chain-busy", "idle", "needs two processors");
                return 0;
        }
        w = (struct world){
                .chains = chains_plan(65536), .kvd = {.daemon = NO_PROCESS}, .writer = NO_PROCESS};
        snprintf(dir, sizeof dir, "%s/busy", bench->dir);
        r = start(&w, bench, dir);
        if (r >= 0)
                r = run(&w, bench);
        for (uint32_t i = 0; i < w.chains.n_chains; i++)
                kvd_unpin(w.kvd.space, &w.held[i]);
        process_end(&w.writer);
        kvd_side_end(&w.kvd);
        return r;
}
