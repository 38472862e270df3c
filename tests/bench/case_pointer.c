/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A pointer to one block: look up 16 tokens, pin, get the address, unpin; 64 different blocks per
 * sample, each in a lookup of its own. A socket peer pays a round trip for each, LMDB a read
 * transaction.
 *
 *      pointer       64 random blocks, others each time
 *      pointer-hot   the same 64 again: what the instructions cost, without the memory
 */

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/peers.h"
#include "tests/bench/report.h"

#define QUESTIONS 64u

struct world {
        uint64_t n_blocks;
        struct kvd_side kvd;
        struct lmdb_peer *lmdb;
        struct socket_peer *socket;
        uint64_t sum; /* keeps compilers from leaving work out */
        uint32_t tokens[QUESTIONS][BLOCK_TOKENS];
        struct block_key keys[QUESTIONS];
};

static uint64_t block_at(const struct world *w, uint32_t item, uint32_t i) {
        return mix64((uint64_t)item * QUESTIONS + i) % w->n_blocks;
}

static int prepare(void *ctx, uint32_t item) {
        struct world *w = ctx;

        for (uint32_t i = 0; i < QUESTIONS; i++) {
                block_tokens(block_at(w, item, i), w->tokens[i]);
                w->keys[i] = block_key(block_at(w, item, i));
        }
        return 0;
}

static int ask_kvd(void *ctx) {
        struct world *w = ctx;
        int r = 0;

        for (uint32_t i = 0; i < QUESTIONS; i++) {
                struct kvd_pin pin = {0};
                uint32_t id;

                r |= kvd_lookup(w->kvd.space, 0, w->tokens[i], BLOCK_TOKENS, &id, 1, &pin) !=
                     BLOCK_TOKENS;
                w->sum += (uintptr_t)kvd_pin_block(&pin, id);
                kvd_unpin(w->kvd.space, &pin);
        }
        return r;
}

static int ask_lmdb(void *ctx) {
        struct world *w = ctx;
        int r = 0;

        for (uint32_t i = 0; i < QUESTIONS; i++)
                r |= lmdb_peer_get(w->lmdb, &w->keys[i], 1, &w->sum) != 1;
        return r;
}

static int ask_socket(void *ctx) {
        struct world *w = ctx;
        int r = 0;

        for (uint32_t i = 0; i < QUESTIONS; i++)
                r |= socket_peer_get(w->socket, &w->keys[i], 1) != 1;
        return r;
}

static int start(struct world *w, const struct bench *bench, const char *dir) {
        int r;

        if (mkdir(dir, 0700) < 0)
                return -errno;
        r = kvd_side_start(&w->kvd, bench->kvd, dir, &tiny_geometry, w->n_blocks + w->n_blocks / 8);
        if (r >= 0)
                r = fill_single(&w->kvd, w->n_blocks);
        if (r < 0)
                return r;
        r = lmdb_peer_new(dir, w->n_blocks * 256 + (UINT64_C(64) << 20), &w->lmdb);
        if (r >= 0)
                r = lmdb_peer_fill(w->lmdb, w->n_blocks);
        if (r < 0 && r != -ENOSYS)
                return r;
        return socket_peer_new(w->n_blocks, &w->socket);
}

static int run(struct world *w, const struct bench *bench, const char *name, bool hot) {
        struct contest contest = bench_contest(bench, name, w->n_blocks, 1u << 20);

        if (!bench_wants(bench, name))
                return 0;
        contest.hot = hot;
        contest.divide = QUESTIONS;
        contest_add(&contest, (struct contender){"kvd", prepare, ask_kvd, NULL, w});
        if (w->lmdb)
                contest_add(&contest, (struct contender){"lmdb", prepare, ask_lmdb, NULL, w});
        else
                report_absent(contest.name, "lmdb", "not installed when this was built");
        contest_add(&contest, (struct contender){"socket", prepare, ask_socket, NULL, w});
        return bench_run(bench, &contest);
}

static int pointers_among(const struct bench *bench, uint64_t n_blocks) {
        static struct world w;
        char dir[256];
        int r;

        w = (struct world){.n_blocks = n_blocks, .kvd = {.daemon = NO_PROCESS}};
        snprintf(dir, sizeof dir, "%s/pointer-%llu", bench->dir, (unsigned long long)n_blocks);
        r = start(&w, bench, dir);
        if (r >= 0)
                r = run(&w, bench, "pointer", false);
        if (r >= 0)
                r = run(&w, bench, "pointer-hot", true);
        lmdb_peer_free(w.lmdb);
        socket_peer_free(w.socket);
        kvd_side_end(&w.kvd);
        return r;
}

/* Each block is a chain, sealed by a request of its own, so a quick run has no large index. */
int cases_pointer(const struct bench *bench) {
        static const char *const names[] = {"pointer", "pointer-hot", NULL};
        uint32_t n = bench->quick ? MIN(bench->n_sizes, 1u) : bench->n_sizes;
        int r = 0;

        if (!bench_wants_any(bench, names))
                return 0;
        for (uint32_t i = 0; i < n && r >= 0; i++)
                r = pointers_among(bench, bench->sizes[i]);
        return r;
}
