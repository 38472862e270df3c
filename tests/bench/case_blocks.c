/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Real blocks, 128 KiB and 2 MiB.
 *
 *      read-SIZE     look one random block up, read every byte in place, unpin; per block. The process has read it
 *                    before, since the first read costs page faults
 *      put-SIZE      16 blocks: take, fill with kvd_copy, seal; the pool is full, so each evicts another; per block
 *      put-SIZE-1    the same, one block at a time
 *      put-SIZE-post take, fill and post 16 blocks one at a time, then flush; LMDB: a transaction for each; per block
 *
 * LMDB reads in place too, and puts all 16 in one transaction; Redis sends and receives the bytes.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/peers.h"
#include "tests/bench/report.h"
#include "tests/bench/work.h"

#define BATCH 16u

struct size {
        uint32_t kib;
        const char *read, *put, *put_one, *put_posted;
};

struct world {
        const struct size *size;
        struct kvd_side kvd;
        struct lmdb_peer *lmdb;
        struct redis_peer *redis;
        struct batch batch;
        uint32_t n_blocks; /* stored in each of kvd, LMDB and Redis */
        uint64_t sum;
        uint8_t *data; /* contents of the blocks that are put */
        size_t bytes;  /* of a block */
        struct block_key keys[BATCH];
};

/* ---- read ------------------------------------------------------------------------------------ */

static int choose(void *ctx, uint32_t item) {
        struct world *w = ctx;

        block_tokens(item, w->batch.tokens);
        w->keys[0] = block_key(item);
        return 0;
}

static int read_kvd(void *ctx) {
        struct world *w = ctx;
        struct kvd_pin pin = {0};
        uint32_t id;

        if (kvd_lookup(w->kvd.space, 0, w->batch.tokens, BLOCK_TOKENS, &id, 1, &pin) !=
            BLOCK_TOKENS)
                return 1;
        w->sum += sum_bytes(kvd_pin_block(&pin, id), w->bytes);
        kvd_unpin(w->kvd.space, &pin);
        return 0;
}

static int read_lmdb(void *ctx) {
        struct world *w = ctx;

        return lmdb_peer_read(w->lmdb, w->keys[0], w->bytes, &w->sum) != 1;
}

static int read_redis(void *ctx) {
        struct world *w = ctx;

        return redis_peer_read(w->redis, w->keys[0], w->bytes, &w->sum) != 1;
}

/* ---- put ------------------------------------------------------------------------------------- */

/* Existing keys, so that the peers' stores stay as large as the pool. */
static int prepare_keys(void *ctx, uint32_t item) {
        struct world *w = ctx;

        for (uint32_t i = 0; i < w->batch.n; i++)
                w->keys[i] = block_key((item + i) % w->n_blocks);
        return 0;
}

static int put_lmdb(void *ctx) {
        struct world *w = ctx;

        return lmdb_peer_put(w->lmdb, w->keys, w->batch.n, w->data, w->bytes) != (int)w->batch.n;
}

static int prepare_redis(void *ctx, uint32_t item) {
        struct world *w = ctx;

        prepare_keys(ctx, item);
        return redis_peer_prepare(w->redis, REDIS_SET, w->keys, w->batch.n, w->data, w->bytes);
}

static int put_lmdb_singly(void *ctx) {
        struct world *w = ctx;
        int wrong = 0;

        for (uint32_t i = 0; i < w->batch.n && !wrong; i++)
                wrong = lmdb_peer_put(w->lmdb, w->keys + i, 1, w->data, w->bytes) != 1;
        return wrong;
}

static int put_redis(void *ctx) {
        struct world *w = ctx;

        return redis_peer_ask(w->redis) != (int)w->batch.n;
}

/* ---- contests -------------------------------------------------------------------------------- */

static void explain_absent(const struct world *w, const char *name) {
        if (!w->lmdb)
                report_absent(name, "lmdb", "not installed when this was built");
        if (!w->redis)
                report_absent(name, "redis", "not installed");
}

/* kvd reads through another mapping than it writes. All its pages are populated, as LMDB's are. */
static int touch_all(struct world *w) {
        int wrong = 0;

        for (uint32_t i = 0; i < w->n_blocks && !wrong; i++) {
                choose(w, i);
                wrong = read_kvd(w) || (w->lmdb && read_lmdb(w));
        }
        return wrong ? -EIO : 0;
}

static int run_read(const struct bench *bench, struct world *w) {
        struct contest contest = bench_contest(bench, w->size->read, w->n_blocks, w->n_blocks);
        int r;

        if (!bench_wants(bench, contest.name))
                return 0;
        r = touch_all(w);
        if (r < 0)
                return r;
        contest.samples = MIN(contest.samples, 100u);
        contest_add(&contest, (struct contender){"kvd", choose, read_kvd, NULL, w});
        if (w->lmdb)
                contest_add(&contest, (struct contender){"lmdb", choose, read_lmdb, NULL, w});
        if (w->redis)
                contest_add(&contest, (struct contender){"redis-get", choose, read_redis, NULL, w});
        explain_absent(w, contest.name);
        return bench_run(bench, &contest);
}

static int run_put(const struct bench *bench, struct world *w, const char *name, uint32_t n) {
        struct contest contest = bench_contest(bench, name, w->n_blocks, w->n_blocks);

        if (!bench_wants(bench, name))
                return 0;
        w->batch.n = contest.divide = n;
        contest.samples = MIN(contest.samples / 10, 30u);
        if (w->bytes > (1u << 20) && n > 1)
                contest.samples = 4;
        contest_add(&contest, (struct contender){"kvd", batch_tokens, batch_put, batch_unpin,
                                                 &w->batch});
        if (w->lmdb)
                contest_add(&contest, (struct contender){"lmdb", prepare_keys, put_lmdb, NULL, w});
        if (w->redis)
                contest_add(&contest,
                            (struct contender){"redis-set", prepare_redis, put_redis, NULL, w});
        explain_absent(w, name);
        return bench_run(bench, &contest);
}

static int run_posted(const struct bench *bench, struct world *w) {
        const char *name = w->size->put_posted;
        struct contest contest = bench_contest(bench, name, w->n_blocks, w->n_blocks);

        if (!bench_wants(bench, name))
                return 0;
        w->batch.n = contest.divide = BATCH;
        contest.samples = w->bytes > (1u << 20) ? 4 : MIN(contest.samples / 10, 30u);
        contest_add(&contest, (struct contender){"kvd", batch_tokens, batch_put_posted, batch_let_go,
                                                 &w->batch});
        if (w->lmdb)
                contest_add(&contest,
                            (struct contender){"lmdb", prepare_keys, put_lmdb_singly, NULL, w});
        else
                report_absent(name, "lmdb", "not installed when this was built");
        return bench_run(bench, &contest);
}

/* ---- set-up ---------------------------------------------------------------------------------- */

/* Stores the same bytes in kvd, LMDB and Redis. */
static int fill(struct world *w) {
        w->batch.n = 1;
        for (uint32_t i = 0; i < w->n_blocks; i++) {
                int wrong;

                wrong = batch_publish(&w->batch, 1);
                prepare_keys(w, i);
                wrong |= w->lmdb && put_lmdb(w);
                wrong |= w->redis && (prepare_redis(w, i) || put_redis(w));
                if (wrong)
                        return -EIO;
        }
        process_settle(&w->kvd.daemon);
        return 0;
}

/* Fills the rest of the pool, so that a put evicts and touches no page for the first time. */
static int fill_up(struct world *w) {
        int r;

        w->batch.n = 1;
        r = batch_publish(&w->batch, w->n_blocks / 4);
        process_settle(&w->kvd.daemon);
        return r;
}

static int start(struct world *w, const struct bench *bench, const char *dir, uint64_t pool_bytes) {
        struct kvd_geometry geometry = large_geometry(w->size->kib);
        int r;

        if (mkdir(dir, 0700) < 0)
                return -errno;
        w->bytes = kvd_block_bytes(&geometry);
        w->n_blocks = (uint32_t)(pool_bytes / w->bytes);
        w->data = aligned_alloc(4096, w->bytes);
        if (!w->data)
                return -ENOMEM;
        memset(w->data, 0x5a, w->bytes);
        w->batch = (struct batch){.kvd = &w->kvd, .data = w->data, .bytes = w->bytes};
        r = kvd_side_start(&w->kvd, bench->kvd, dir, &geometry, w->n_blocks + w->n_blocks / 8);
        if (r < 0)
                return r;
        r = lmdb_peer_new(dir, pool_bytes * 2, &w->lmdb);
        if (r < 0 && r != -ENOSYS)
                return r;
        r = redis_peer_new(dir, &w->redis);
        return r < 0 && r != -ENOSYS ? r : fill(w);
}

static int run_all(const struct bench *bench, struct world *w) {
        int r;

        r = run_read(bench, w);
        if (r >= 0)
                r = fill_up(w);
        if (r >= 0)
                r = run_put(bench, w, w->size->put, BATCH);
        if (r >= 0)
                r = run_put(bench, w, w->size->put_one, 1);
        return r < 0 ? r : run_posted(bench, w);
}

static int blocks_of(const struct bench *bench, const struct size *size, uint64_t pool_bytes) {
        static struct world w;
        char dir[256];
        int r;

        w = (struct world){.size = size, .kvd = {.daemon = NO_PROCESS}};
        snprintf(dir, sizeof dir, "%s/blocks-%u", bench->dir, size->kib);
        say("%u KiB: filling %llu MiB each\n", size->kib, (unsigned long long)(pool_bytes >> 20));
        r = start(&w, bench, dir, pool_bytes);
        if (r >= 0)
                r = run_all(bench, &w);
        lmdb_peer_free(w.lmdb);
        redis_peer_free(w.redis);
        kvd_side_end(&w.kvd);
        free(w.data);
        return r;
}

int cases_blocks(const struct bench *bench) {
        static const struct size sizes[] = {
                {128, "read-128k", "put-128k", "put-128k-1", "put-128k-post"},
                {2048, "read-2m", "put-2m", "put-2m-1", "put-2m-post"}};
        int r = 0;

        for (size_t i = 0; i < ARRAY_SIZE(sizes) && r >= 0; i++) {
                const char *const names[] = {sizes[i].read, sizes[i].put, sizes[i].put_one,
                                             sizes[i].put_posted, NULL};

                if (bench_wants_any(bench, names))
                        r = blocks_of(bench, &sizes[i], UINT64_C(1) << (bench->quick ? 28 : 30));
        }
        return r;
}
