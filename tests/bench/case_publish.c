/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks come and go without data (128 bytes that are never written), so that only the control path
 * is timed. Figures are per block, and the pool is full, as in service: taking a block evicts
 * another, and all memory of the index has been used before.
 *
 *      alloc         256 blocks, taken one at a time: the cost of the library's stock and its refills
 *      seal-N        N blocks that are taken already, as one chain; peer: a SEQPACKET ping-pong of the same size
 *      post-N        N blocks, posted one at a time in a row, as a step of an engine fills them
 *      post-1-found  a block is posted, and looked up until it is found; peer: a ping-pong of a message without fields
 *      publish-N     take and seal N blocks; peers: N keys of 16 bytes put in one transaction, or set in one pipeline
 *      owner-cpu     processor time of the daemon per block taken and sealed, in batches of 16: 500 ns are 5 % of a
 *                    processor at 100 clients with 1,000 blocks a second each
 */

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/peers.h"
#include "tests/bench/report.h"
#include "tests/bench/work.h"

/*
 * Bytes of a seal request and its answer without tokens and references: frame, verb, space, parent,
 * counts.
 */
#define REQUEST_BYTES 64u
#define REFERENCE_BYTES 9u /* a 64-bit number in msgpack */
#define TOKEN_BYTES 4u
#define WAKE_BYTES 16u /* about the size of a message without fields */

#define POOL_BLOCKS 65536u
#define FILL_BATCH 16u
#define OWNER_BATCHES 2000u
#define LMDB_BYTES (UINT64_C(1) << 30) /* size of the map; little of it is touched */

struct world {
        struct kvd_side kvd;
        struct peers peers;
        struct process echo;
        struct batch batch;
};

/* ---- peers ----------------------------------------------------------------------------------- */

static int choose_keys(void *ctx, uint32_t item) {
        struct peer *peer = ctx;
        struct world *w = peer->world;

        peer->verb = PEER_PUT;
        peer->value = PEER_VALUE;
        peer->bytes = sizeof PEER_VALUE;
        peer->n = w->batch.n;
        for (uint32_t i = 0; i < peer->n; i++)
                peer->keys[i] = block_key(w->batch.next++);
        return peer->prepare ? peer->prepare(peer) : 0;
}

static int echo_seal(void *ctx) {
        struct world *w = ctx;
        uint32_t answer = REQUEST_BYTES + w->batch.n * REFERENCE_BYTES;

        return echo_ask(&w->echo, answer + w->batch.n * BLOCK_TOKENS * TOKEN_BYTES, answer);
}

static int echo_wake(void *ctx) {
        struct world *w = ctx;

        return echo_ask(&w->echo, WAKE_BYTES, WAKE_BYTES);
}

/* ---- figures --------------------------------------------------------------------------------- */

#define SEAL {batch_blocks, batch_seal, batch_unpin}, echo_seal
#define POST {batch_blocks, batch_post, batch_let_go}, NULL

static const struct figure {
        const char *name;
        uint32_t n;
        struct {
                int (*prepare)(void *batch, uint32_t item);
                int (*run)(void *batch), (*finish)(void *batch);
        } kvd;
        int (*echo)(void *world); /* peer */
        bool stores;              /* the peers are LMDB and Redis */
} figures[] = {
        {"alloc", BATCH_MOST, {batch_tokens, batch_take_singly, batch_seal_and_unpin}, NULL, false},
        {"seal-1", 1, SEAL, false},
        {"seal-16", 16, SEAL, false},
        {"seal-64", 64, SEAL, false},
        {"post-1", 1, POST, false},
        {"post-16", 16, POST, false},
        {"post-1-found", 1, {batch_blocks, batch_post_and_find, batch_let_go}, echo_wake, false},
        {"publish-1", 1, {batch_tokens, batch_put, batch_unpin}, NULL, true},
        {"publish-16", 16, {batch_tokens, batch_put, batch_unpin}, NULL, true},
};

static int run_figure(const struct bench *bench, struct world *w, const struct figure *f) {
        struct contest contest = bench_contest(bench, f->name, 1);

        if (!bench_wants(bench, f->name))
                return 0;
        w->batch.n = contest.divide = f->n;
        contest.samples = MAX(bench->samples / 5, 30u);
        contest_add(&contest, (struct contender){"kvd", f->kvd.prepare, f->kvd.run, f->kvd.finish,
                                                 &w->batch});
        if (f->echo)
                contest_add(&contest, (struct contender){"echo", NULL, f->echo, NULL, w});
        if (f->stores)
                peers_add(&contest, &w->peers, choose_keys);
        return bench_run(bench, &contest);
}

static int measure_owner(const struct bench *bench, struct world *w) {
        uint64_t before = process_cpu_ns(&w->kvd.daemon);
        int r;

        if (!bench_wants(bench, "owner-cpu"))
                return 0;
        w->batch.n = FILL_BATCH;
        r = batch_publish(&w->batch, OWNER_BATCHES);
        if (r == 0)
                report_value("owner-cpu",
                             (double)(process_cpu_ns(&w->kvd.daemon) - before) /
                                     (OWNER_BATCHES * FILL_BATCH),
                             "ns");
        return r;
}

static int start(struct world *w, const struct bench *bench, const char *dir) {
        int r = kvd_side_start(&w->kvd, bench->kvd, dir, &tiny_geometry, POOL_BLOCKS, NULL);

        if (r < 0)
                return r;
        w->batch.n = FILL_BATCH;
        r = batch_publish(&w->batch, POOL_BLOCKS / FILL_BATCH * 9 / 8);
        if (r >= 0)
                r = peers_start(&w->peers, dir, LMDB_BYTES, w);
        process_settle(&w->kvd.daemon);
        return r < 0 ? r : echo_start(&w->echo);
}

int cases_publish(const struct bench *bench) {
        static struct world w = {.kvd = {.daemon = NO_PROCESS},
                                 .echo = NO_PROCESS,
                                 .batch = {.kvd = &w.kvd}};
        bool wanted = bench_wants(bench, "owner-cpu");
        char dir[256];
        int r;

        for (size_t i = 0; i < ARRAY_SIZE(figures); i++)
                wanted |= bench_wants(bench, figures[i].name);
        if (!wanted)
                return 0;
        snprintf(dir, sizeof dir, "%s/publish", bench->dir);
        r = mkdir(dir, 0700) < 0 ? -errno : start(&w, bench, dir);
        if (r >= 0)
                r = measure_owner(bench, &w);
        for (size_t i = 0; i < ARRAY_SIZE(figures) && r >= 0; i++)
                r = run_figure(bench, &w, &figures[i]);
        peers_end(&w.peers);
        process_end(&w.echo);
        kvd_side_end(&w.kvd);
        return r;
}
