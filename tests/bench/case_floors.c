/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The best that this machine can do, measured in the same run, so that other figures can be divided
 * by it.
 */

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/chains.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/peers.h"
#include "tests/bench/report.h"

#define STEPS 1000u
#define ARENA_BYTES (UINT64_C(256) << 20)
#define RUN_TOKENS (16 * BLOCK_TOKENS)

struct floors {
        struct echo_peer *echo;
        _Atomic uint32_t line;
        uint8_t *arena, *source;
        uint64_t *ring;         /* the arena as one random cycle of 8-byte links */
        uint64_t at, offset, sum; /* sum keeps compilers from leaving work out */
        size_t bytes;
        uint32_t step_tokens;   /* hashed at once */
        uint32_t tokens[CHAIN_TOKENS];
        XXH128_hash_t hash;
};

/* ---- the clock, the fence, the load ---------------------------------------------------------- */

static int read_clock(void *ctx) {
        struct floors *f = ctx;

        for (uint32_t i = 0; i < STEPS; i++)
                f->sum ^= now_ns();
        return 0;
}

static int store_and_fence(void *ctx) {
        struct floors *f = ctx;

        for (uint32_t i = 0; i < STEPS; i++) {
                atomic_store_explicit(&f->line, i, memory_order_relaxed);
                atomic_thread_fence(memory_order_seq_cst);
        }
        return 0;
}

/* Sattolo's shuffle: one cycle through one word of every cache line. */
static int make_ring(struct floors *f) {
        uint64_t n = ARENA_BYTES / 64, random = 1;
        uint32_t *order;

        order = calloc(n, sizeof *order);
        if (!order)
                return -ENOMEM;
        for (uint64_t i = 0; i < n; i++)
                order[i] = (uint32_t)i;
        for (uint64_t i = n - 1; i > 0; i--) {
                uint64_t j = next_random(&random) % i;
                uint32_t swapped = order[i];

                order[i] = order[j];
                order[j] = swapped;
        }
        f->ring = (uint64_t *)f->arena;
        for (uint64_t i = 0; i < n; i++)
                f->ring[(uint64_t)order[i] * 8] = (uint64_t)order[(i + 1) % n] * 8;
        f->at = 0;
        free(order);
        return 0;
}

static int follow_ring(void *ctx) {
        struct floors *f = ctx;

        for (uint32_t i = 0; i < STEPS; i++)
                f->at = f->ring[f->at];
        return 0;
}

/* ---- copies into memory that is in no cache -------------------------------------------------- */

static int choose_place(void *ctx, uint32_t item) {
        struct floors *f = ctx;

        f->offset = mix64(item) % (ARENA_BYTES / f->bytes) * f->bytes;
        return 0;
}

static int copy_plain(void *ctx) {
        struct floors *f = ctx;

        memcpy(f->arena + f->offset, f->source, f->bytes);
        return 0;
}

static int copy_kvd(void *ctx) {
        struct floors *f = ctx;

        kvd_copy(f->arena + f->offset, f->source, f->bytes);
        return 0;
}

static int read_place(void *ctx) {
        struct floors *f = ctx;

        f->sum ^= sum_bytes(f->arena + f->offset, f->bytes);
        return 0;
}

/* ---- hashing and the socket ------------------------------------------------------------------ */

static int hash_chain(void *ctx) {
        struct floors *f = ctx;
        struct {
                XXH128_hash_t parent;
                uint32_t tokens[RUN_TOKENS];
        } link = {.parent = f->hash};
        size_t bytes = f->step_tokens * sizeof *f->tokens;

        for (uint32_t i = 0; i < CHAIN_TOKENS; i += f->step_tokens) {
                memcpy(link.tokens, f->tokens + i, bytes);
                link.parent = XXH3_128bits(&link, sizeof link.parent + bytes);
        }
        f->hash = link.parent;
        return 0;
}

static int ping(void *ctx) {
        struct floors *f = ctx;

        return echo_peer_ask(f->echo, 64, 64) != 0;
}

/* ---- contests -------------------------------------------------------------------------------- */

static int run_one(const struct bench *bench, struct floors *f, const char *name, uint32_t divide,
                   int (*run)(void *)) {
        struct contest contest = bench_contest(bench, name, 0, 1u << 20);

        contest.divide = divide;
        contest.samples = MIN(bench->samples, 100u);
        contest_add(&contest, (struct contender){"machine", NULL, run, NULL, f});
        return bench_run(bench, &contest);
}

static int run_copies(const struct bench *bench, struct floors *f, const char *name, size_t bytes) {
        struct contest contest = bench_contest(bench, name, 0, 1u << 20);

        f->bytes = bytes;
        contest.samples = MIN(bench->samples, 60u);
        contest_add(&contest, (struct contender){"kvd_copy", choose_place, copy_kvd, NULL, f});
        contest_add(&contest, (struct contender){"memcpy", choose_place, copy_plain, NULL, f});
        contest_add(&contest, (struct contender){"read", choose_place, read_place, NULL, f});
        return bench_run(bench, &contest);
}

static int run_hash(const struct bench *bench, struct floors *f, const char *name,
                    uint32_t step_tokens) {
        f->step_tokens = step_tokens;
        return run_one(bench, f, name, 1, hash_chain);
}

static int run_all(const struct bench *bench, struct floors *f) {
        int r = 0;

        r = r < 0 ? r : run_one(bench, f, "floor-clock", STEPS, read_clock);
        r = r < 0 ? r : run_one(bench, f, "floor-fence", STEPS, store_and_fence);
        r = r < 0 ? r : run_one(bench, f, "floor-load", STEPS, follow_ring);
        r = r < 0 ? r : run_one(bench, f, "floor-pingpong", 1, ping);
        r = r < 0 ? r : run_hash(bench, f, "floor-hash-blk", BLOCK_TOKENS);
        r = r < 0 ? r : run_hash(bench, f, "floor-hash-run", RUN_TOKENS);
        r = r < 0 ? r : run_copies(bench, f, "floor-copy-128k", 128 << 10);
        return r < 0 ? r : run_copies(bench, f, "floor-copy-2m", 2 << 20);
}

/* The echo is forked first, because memory shared with a child is copied when it is written. */
static int start(struct floors *f) {
        int r;

        r = echo_peer_new(&f->echo);
        if (r < 0)
                return r;
        f->arena = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                        0);
        f->source = aligned_alloc(4096, 2 << 20);
        if (f->arena == MAP_FAILED || !f->source)
                return -ENOMEM;
        memset(f->source, 0x5a, 2 << 20);
        return make_ring(f);
}

int cases_floors(const struct bench *bench) {
        static const char *const names[] = {"floor-clock",     "floor-fence",    "floor-load",
                                            "floor-pingpong",  "floor-hash-blk", "floor-hash-run",
                                            "floor-copy-128k", "floor-copy-2m",  NULL};
        static struct floors f;
        int r;

        if (!bench_wants_any(bench, names))
                return 0;
        r = start(&f);
        if (r >= 0)
                r = run_all(bench, &f);
        echo_peer_free(f.echo);
        free(f.source);
        if (f.arena && f.arena != MAP_FAILED)
                munmap(f.arena, ARENA_BYTES);
        return r;
}
