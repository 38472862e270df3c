/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks come and go without data (128 bytes that are never written), so that only the control path
 * is timed. Figures are per block, and the pool is full, as in service: taking a block evicts
 * another, and all memory of the index has been used before.
 *
 *      alloc         256 blocks, taken one at a time: the cost of the library's stock and its refills
 *      seal-N        N blocks that are taken already, as one chain; peer: a SEQPACKET ping-pong of the same size
 *      post-N        N blocks, posted one at a time in a row, as a step of an engine fills them; peer: just a message
 *                    that wakes a process on the same kind of socket
 *      post-1-found  a block is posted, and looked up until it is found; peer: a ping-pong of such a message
 *      publish-N     take and seal N blocks; peers: N keys of 16 bytes put in one transaction, or set in one pipeline
 *      owner-cpu     processor time of the daemon per block taken and sealed, in batches of 16: 500 ns are 5 % of a
 *                    processor at 100 clients with 1,000 blocks a second each
 *      owner-cpu-bare  the same of a server that only reads messages of that size and answers them
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

#define POOL_BLOCKS 65536u
#define FILL_BATCH 16u
#define LMDB_BYTES (UINT64_C(1) << 30) /* size of the map; little of it is touched */

struct world {
        struct kvd_side kvd;
        struct lmdb_peer *lmdb;
        struct redis_peer *redis;
        struct echo_peer *echo;
        struct batch batch;
        struct block_key keys[BATCH_MOST];
};

/* ---- peers ----------------------------------------------------------------------------------- */

static int prepare_keys(void *ctx, uint32_t item) {
        struct world *w = ctx;

        for (uint32_t i = 0; i < w->batch.n; i++)
                w->keys[i] = block_key(w->batch.next++);
        return 0;
}

static int put_lmdb(void *ctx) {
        struct world *w = ctx;

        return lmdb_peer_put(w->lmdb, w->keys, w->batch.n, "a block's place", PEER_VALUE_BYTES) !=
               (int)w->batch.n;
}

static int prepare_redis(void *ctx, uint32_t item) {
        struct world *w = ctx;

        prepare_keys(ctx, item);
        return redis_peer_prepare(w->redis, REDIS_SET, w->keys, w->batch.n, "a block's place",
                                  PEER_VALUE_BYTES);
}

static int put_redis(void *ctx) {
        struct world *w = ctx;

        return redis_peer_ask(w->redis) != (int)w->batch.n;
}

static int put_echo(void *ctx) {
        struct world *w = ctx;

        return echo_peer_ask(w->echo,
                             REQUEST_BYTES + w->batch.n * (REFERENCE_BYTES + BLOCK_TOKENS * TOKEN_BYTES),
                             REQUEST_BYTES + w->batch.n * REFERENCE_BYTES);
}

#define WAKE_BYTES 16u /* about the size of a message without fields */

static int wake_echo(void *ctx) {
        struct world *w = ctx;

        return echo_peer_tell(w->echo, WAKE_BYTES, WAKE_BYTES);
}

static int hear_echo(void *ctx) {
        struct world *w = ctx;

        return echo_peer_hear(w->echo, WAKE_BYTES);
}

static int ask_echo(void *ctx) {
        struct world *w = ctx;

        return echo_peer_ask(w->echo, WAKE_BYTES, WAKE_BYTES);
}

/* ---- contests -------------------------------------------------------------------------------- */

static struct contest contest_of(const struct bench *bench, struct world *w, const char *name,
                                 uint32_t n) {
        struct contest contest = bench_contest(bench, name, 0, 1);

        w->batch.n = n;
        contest.divide = n;
        contest.samples = MAX(bench->samples / 5, 30u);
        return contest;
}

static int run_alloc(const struct bench *bench, struct world *w) {
        struct contest contest = contest_of(bench, w, "alloc", BATCH_MOST);

        contest_add(&contest, (struct contender){"kvd", batch_tokens, batch_take_singly,
                                                 batch_seal_and_unpin, &w->batch});
        return bench_run(bench, &contest);
}

static int run_seal(const struct bench *bench, struct world *w, const char *name, uint32_t n) {
        struct contest contest = contest_of(bench, w, name, n);

        contest_add(&contest, (struct contender){"kvd", batch_blocks, batch_seal, batch_unpin,
                                                 &w->batch});
        contest_add(&contest, (struct contender){"echo", NULL, put_echo, NULL, w});
        return bench_run(bench, &contest);
}

static int run_post(const struct bench *bench, struct world *w, const char *name, uint32_t n) {
        struct contest contest = contest_of(bench, w, name, n);

        contest_add(&contest, (struct contender){"kvd", batch_blocks, batch_post, batch_let_go,
                                                 &w->batch});
        contest_add(&contest, (struct contender){"wake", NULL, wake_echo, hear_echo, w});
        return bench_run(bench, &contest);
}

static int run_found(const struct bench *bench, struct world *w) {
        struct contest contest = contest_of(bench, w, "post-1-found", 1);

        contest_add(&contest, (struct contender){"kvd", batch_blocks, batch_post_and_find,
                                                 batch_let_go, &w->batch});
        contest_add(&contest, (struct contender){"wake", NULL, ask_echo, NULL, w});
        return bench_run(bench, &contest);
}

static int run_publish(const struct bench *bench, struct world *w, const char *name, uint32_t n) {
        struct contest contest = contest_of(bench, w, name, n);

        if (!bench_wants(bench, name))
                return 0;
        contest_add(&contest, (struct contender){"kvd", batch_tokens, batch_put, batch_unpin,
                                                 &w->batch});
        if (w->lmdb)
                contest_add(&contest, (struct contender){"lmdb", prepare_keys, put_lmdb, NULL, w});
        else
                report_absent(name, "lmdb", "not installed when this was built");
        if (w->redis)
                contest_add(&contest,
                            (struct contender){"redis-set", prepare_redis, put_redis, NULL, w});
        else
                report_absent(name, "redis", "not installed");
        return bench_run(bench, &contest);
}

#define OWNER_BATCHES 2000u

static int measure_bare(struct world *w) {
        uint64_t before = 0;
        int r = 0;

        for (uint32_t i = 0; i < 2 * OWNER_BATCHES && r >= 0; i++) {
                if (i == OWNER_BATCHES)
                        before = echo_peer_cpu_ns(w->echo);
                r = put_echo(w);
        }
        if (r >= 0)
                report_value("owner-cpu-bare", "echo", 0,
                             (double)(echo_peer_cpu_ns(w->echo) - before) /
                                     (OWNER_BATCHES * w->batch.n),
                             "ns");
        return r;
}

static int measure_owner(const struct bench *bench, struct world *w) {
        uint64_t before = process_cpu_ns(&w->kvd.daemon);
        int r;

        if (!bench_wants(bench, "owner-cpu"))
                return 0;
        w->batch.n = FILL_BATCH;
        r = batch_publish(&w->batch, OWNER_BATCHES);
        if (r < 0)
                return r;
        report_value("owner-cpu", "kvd", 0,
                     (double)(process_cpu_ns(&w->kvd.daemon) - before) /
                             (OWNER_BATCHES * w->batch.n),
                     "ns");
        return measure_bare(w);
}

static int run_all(const struct bench *bench, struct world *w) {
        int r;

        r = measure_owner(bench, w);
        if (r >= 0)
                r = run_alloc(bench, w);
        if (r >= 0)
                r = run_seal(bench, w, "seal-1", 1);
        if (r >= 0)
                r = run_seal(bench, w, "seal-16", 16);
        if (r >= 0)
                r = run_seal(bench, w, "seal-64", 64);
        if (r >= 0)
                r = run_post(bench, w, "post-1", 1);
        if (r >= 0)
                r = run_post(bench, w, "post-16", 16);
        if (r >= 0)
                r = run_found(bench, w);
        if (r >= 0)
                r = run_publish(bench, w, "publish-1", 1);
        if (r >= 0)
                r = run_publish(bench, w, "publish-16", 16);
        return r < 0 ? r : run_publish(bench, w, "publish-64", 64);
}

static int start(struct world *w, const struct bench *bench, const char *dir) {
        int r = kvd_side_start(&w->kvd, bench->kvd, dir, &tiny_geometry, POOL_BLOCKS);

        if (r < 0)
                return r;
        w->batch.n = FILL_BATCH;
        r = batch_publish(&w->batch, POOL_BLOCKS / FILL_BATCH * 9 / 8);
        if (r < 0)
                return r;
        r = lmdb_peer_new(dir, LMDB_BYTES, &w->lmdb);
        if (r < 0 && r != -ENOSYS)
                return r;
        r = redis_peer_new(dir, &w->redis);
        if (r < 0 && r != -ENOSYS)
                return r;
        process_settle(&w->kvd.daemon);
        return echo_peer_new(&w->echo);
}

int cases_publish(const struct bench *bench) {
        static const char *const names[] = {"owner-cpu", "alloc",     "seal-1",     "seal-16",
                                            "seal-64",   "post-1",    "post-16",    "post-1-found",
                                            "publish-1", "publish-16", "publish-64", NULL};
        static struct world w = {.kvd = {.daemon = NO_PROCESS}, .batch = {.kvd = &w.kvd}};
        char dir[256];
        int r;

        if (!bench_wants_any(bench, names))
                return 0;
        snprintf(dir, sizeof dir, "%s/publish", bench->dir);
        r = mkdir(dir, 0700) < 0 ? -errno : start(&w, bench, dir);
        if (r >= 0)
                r = run_all(bench, &w);
        lmdb_peer_free(w.lmdb);
        redis_peer_free(w.redis);
        echo_peer_free(w.echo);
        kvd_side_end(&w.kvd);
        return r;
}
