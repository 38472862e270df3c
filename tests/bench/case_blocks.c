/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Real blocks, 128 KiB and 2 MiB.
 *
 *      read-SIZE     look one random block up, read every byte in place, unpin; per block. The process has read it
 *                    before, since the first read costs page faults
 *      put-SIZE      16 blocks: take, fill with kvd_copy, seal; the pool is full, so each evicts another; per block
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
        const char *read, *put, *put_posted;
};

struct world {
        const struct size *size;
        struct kvd_side kvd;
        struct peers peers;
        struct batch batch;
        uint32_t n_blocks; /* stored in each of kvd, LMDB and Redis */
        uint64_t sum;
        uint8_t *data; /* contents of the blocks that are put */
        size_t bytes;  /* of a block */
};

/* ---- read ------------------------------------------------------------------------------------ */

static int choose(void *ctx, uint32_t item) {
        struct world *w = ctx;

        block_tokens(item, w->batch.tokens);
        return 0;
}

static int read_one(void *ctx) {
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

/* ---- peers ----------------------------------------------------------------------------------- */

/* Existing keys, so that the peers' stores stay as large as the pool. */
static int choose_keys(struct peer *peer, enum peer_verb verb, uint32_t n, uint32_t item) {
        struct world *w = peer->world;

        peer->verb = verb;
        peer->n = n;
        peer->value = w->data;
        peer->bytes = w->bytes;
        for (uint32_t i = 0; i < n; i++)
                peer->keys[i] = block_key((item + i) % w->n_blocks);
        return peer->prepare ? peer->prepare(peer) : 0;
}

static int choose_read(void *ctx, uint32_t item) {
        return choose_keys(ctx, PEER_READ, 1, item);
}

static int choose_put(void *ctx, uint32_t item) {
        return choose_keys(ctx, PEER_PUT, BATCH, item);
}

static int put_singly(void *ctx) {
        struct peer *peer = ctx;
        int wrong = 0;

        peer->n = 1;
        for (uint32_t i = 0; i < BATCH; i++) {
                peer->keys[0] = peer->keys[i];
                wrong |= peer->run(peer) != 1;
        }
        return wrong;
}

/* ---- contests -------------------------------------------------------------------------------- */

/* kvd reads through another mapping than it writes. All its pages are populated, as LMDB's are. */
static int touch_all(struct world *w) {
        struct peer *lmdb = w->peers.lmdb;
        int wrong = 0;

        for (uint32_t i = 0; i < w->n_blocks && !wrong; i++) {
                choose(w, i);
                wrong = read_one(w) || (lmdb && (choose_read(lmdb, i) || lmdb->run(lmdb) != 1));
        }
        return wrong ? -EIO : 0;
}

static int run_read(const struct bench *bench, struct world *w) {
        struct contest contest = bench_contest(bench, w->size->read, w->n_blocks);
        int r;

        if (!bench_wants(bench, contest.name))
                return 0;
        r = touch_all(w);
        if (r < 0)
                return r;
        contest.samples = MIN(contest.samples, 100u);
        contest_add(&contest, (struct contender){"kvd", choose, read_one, NULL, w});
        peers_add(&contest, &w->peers, choose_read);
        return bench_run(bench, &contest);
}

static struct contest contest_of(const struct bench *bench, struct world *w, const char *name) {
        struct contest contest = bench_contest(bench, name, w->n_blocks);

        w->batch.n = contest.divide = BATCH;
        contest.samples = w->bytes > (1u << 20) ? 4 : MIN(contest.samples / 10, 30u);
        return contest;
}

static int run_put(const struct bench *bench, struct world *w) {
        struct contest contest = contest_of(bench, w, w->size->put);

        contest_add(&contest,
                    (struct contender){"kvd", batch_tokens, batch_put, batch_unpin, &w->batch});
        peers_add(&contest, &w->peers, choose_put);
        return bench_run(bench, &contest);
}

static int run_posted(const struct bench *bench, struct world *w) {
        struct contest contest = contest_of(bench, w, w->size->put_posted);
        struct contender lmdb = {0};

        contest_add(&contest, (struct contender){"kvd", batch_tokens, batch_put_posted,
                                                 batch_let_go, &w->batch});
        if (w->peers.lmdb) {
                lmdb = peer_contender(w->peers.lmdb, choose_put);
                lmdb.run = put_singly;
                contest_add(&contest, lmdb);
        }
        return bench_run(bench, &contest);
}

/* ---- set-up ---------------------------------------------------------------------------------- */

static bool store(struct peer *peer, uint32_t item) {
        return !peer || (choose_keys(peer, PEER_PUT, 1, item) >= 0 && peer->run(peer) == 1);
}

/* Stores the same bytes in kvd, LMDB and Redis. */
static int fill(struct world *w) {
        w->batch.n = 1;
        for (uint32_t i = 0; i < w->n_blocks; i++)
                if (batch_publish(&w->batch, 1) || !store(w->peers.lmdb, i) ||
                    !store(w->peers.redis, i))
                        return -EIO;
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
        r = kvd_side_start(&w->kvd, bench->kvd, dir, &geometry, w->n_blocks * 9 / 8, NULL);
        if (r >= 0)
                r = peers_start(&w->peers, dir, pool_bytes * 2, w);
        return r < 0 ? r : fill(w);
}

static int blocks_of(const struct bench *bench, const struct size *size, uint64_t pool_bytes) {
        static struct world w;
        char dir[256];
        int r;

        w = (struct world){.size = size, .kvd = {.daemon = NO_PROCESS}};
        snprintf(dir, sizeof dir, "%s/blocks-%u", bench->dir, size->kib);
        r = start(&w, bench, dir, pool_bytes);
        if (r >= 0)
                r = run_read(bench, &w);
        if (r >= 0)
                r = fill_up(&w);
        if (r >= 0)
                r = run_put(bench, &w);
        if (r >= 0)
                r = run_posted(bench, &w);
        peers_end(&w.peers);
        kvd_side_end(&w.kvd);
        free(w.data);
        return r;
}

int cases_blocks(const struct bench *bench) {
        static const struct size sizes[] = {{128, "read-128k", "put-128k", "put-128k-post"},
                                            {2048, "read-2m", "put-2m", "put-2m-post"}};
        int r = 0;

        for (size_t i = 0; i < ARRAY_SIZE(sizes) && r >= 0; i++) {
                const char *const names[] = {sizes[i].read, sizes[i].put, sizes[i].put_posted,
                                             NULL};

                if (bench_wants_any(bench, names))
                        r = blocks_of(bench, &sizes[i], UINT64_C(1) << (bench->quick ? 28 : 30));
        }
        return r;
}
