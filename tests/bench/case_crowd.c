/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Many clients at once, each a process that works as an engine does: a hundred steps a second. In
 * each step it fills and posts a block for each of ten requests, and looks up a hundred prompts of
 * 32 blocks: 1,000 blocks and 10,000 lookups a second. The pool is full, so that each block evicts
 * another one.
 *
 *      crowd-N        the daemon's processor time, in percent of one processor, if each of N clients reaches 1,000
 *                     blocks a second
 *      crowd-N-fair   how many times as many blocks the client with the most has posted as the client with the fewest
 *      crowd-N-p50    time of a lookup: the median, and the 99th percentile, each of the worst client; for information,
 *      crowd-N-p99    since clients share processors
 *      crowd-full     time per block of four clients together that take, post and unpin 16 blocks at a time as fast as
 *                     they can: 1,000 ns are a million blocks a second; crowd-full-work is the daemon's processor
 *                     time for that
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
#include "tests/bench/report.h"
#include "tests/bench/work.h"

#define MOST_CLIENTS 100u
#define POOL_BLOCKS 65536u
#define PROMPT_BLOCKS 32u
#define REQUESTS 10u       /* of a client, at a time */
#define REQUEST_BLOCKS 16u /* blocks that a request decodes before it ends */
#define LOOKUPS 100u       /* of a step */
#define FULL_CLIENTS 4u
#define STEP_NS UINT64_C(10000000)
#define BUCKETS 512u /* of lookup times, 16 ns each; the last one also has all longer times */

struct client {
        _Atomic uint64_t posted, lookups, wrong;
        _Atomic uint64_t times[BUCKETS];
};

struct shared {
        _Atomic int go;
        _Atomic uint32_t ready;
        struct client clients[MOST_CLIENTS];
};

struct request {
        struct kvd_pin pin;
        struct kvd_block blocks[REQUEST_BLOCKS];
        uint32_t n;
};

struct world {
        struct kvd_side kvd;
        struct process clients[MOST_CLIENTS];
        uint32_t n, number; /* of clients, of this client */
        bool full;
        struct shared *shared;
        uint32_t prompt[PROMPT_BLOCKS * BLOCK_TOKENS];
        struct request requests[REQUESTS];
};

static void sleep_until(uint64_t ns) {
        struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};

        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
                ;
}

/* ---- a client -------------------------------------------------------------------------------- */

static void add(_Atomic uint64_t *counter, uint64_t n) {
        atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

/* Decodes n more blocks of a request. One that has all its blocks ends, and another one begins. */
static void post(struct client *me, kvd_space *space, struct request *q, uint32_t n,
                 uint64_t *number) {
        uint32_t tokens[REQUEST_BLOCKS * BLOCK_TOKENS], got;
        struct kvd_block *blocks;
        int posted;

        if (q->n + n > REQUEST_BLOCKS) {
                kvd_free(space, q->n, q->blocks);
                kvd_unpin(space, &q->pin);
                q->n = 0;
        }
        blocks = q->blocks + q->n;
        got = (uint32_t)MAX(kvd_alloc(space, n, blocks), 0);
        for (uint32_t i = 0; i < got; i++)
                block_tokens((*number)++, tokens + i * BLOCK_TOKENS);
        q->n += got;
        posted = got ? kvd_post(space, &q->pin, got, blocks, tokens, got * BLOCK_TOKENS) : 0;
        add(&me->posted, (uint64_t)MAX(posted, 0));
}

static void look_up(struct client *me, kvd_space *space, const struct world *w) {
        uint32_t ids[PROMPT_BLOCKS];
        struct kvd_pin pin = {0};
        uint64_t began = now_ns();
        int64_t found = kvd_lookup(space, 0, w->prompt, PROMPT_BLOCKS * BLOCK_TOKENS, ids,
                                   PROMPT_BLOCKS, &pin);

        kvd_unpin(space, &pin);
        add(&me->times[MIN((now_ns() - began) / 16, BUCKETS - 1)], 1);
        add(&me->lookups, 1);
        add(&me->wrong, found != PROMPT_BLOCKS * BLOCK_TOKENS);
}

/* Clients' steps begin at different times, as those of engines do. */
static void work(void *ctx) {
        struct world *w = ctx;
        struct client *me = &w->shared->clients[w->number];
        uint64_t number = (uint64_t)getpid() << 40, next; /* of blocks that no client has stored */
        kvd_space *space;
        kvd *handle;

        if (kvd_open(w->kvd.socket, &handle) < 0 ||
            kvd_space_open(handle, "bench", &w->kvd.geometry, NULL, &space) < 0)
                return;
        atomic_fetch_add(&w->shared->ready, 1);
        while (!atomic_load(&w->shared->go))
                sleep_until(now_ns() + STEP_NS);
        for (uint32_t i = 0; w->full; i++)
                post(me, space, &w->requests[i % REQUESTS], REQUEST_BLOCKS, &number);
        for (next = now_ns() + mix64(w->number) % STEP_NS;; next += STEP_NS) {
                sleep_until(next);
                for (uint32_t i = 0; i < REQUESTS; i++)
                        post(me, space, &w->requests[i], 1, &number);
                for (uint32_t i = 0; i < LOOKUPS; i++)
                        look_up(me, space, w);
        }
}

/* ---- figures --------------------------------------------------------------------------------- */

/* A percentile of a client's lookup times, in ns. */
static double percentile(const struct client *c, uint32_t percent) {
        uint64_t want = atomic_load(&c->lookups) * percent / 100, seen = 0;

        if (!atomic_load(&c->lookups))
                return 0; /* the client did not run */
        for (uint32_t i = 0; i < BUCKETS; i++) {
                seen += atomic_load(&c->times[i]);
                if (seen > want)
                        return (i + 1) * 16.0;
        }
        return BUCKETS * 16.0;
}

static void tell(const struct world *w, const char *what, double value, const char *unit) {
        char name[32];

        snprintf(name, sizeof name, "crowd-%u%s", w->n, what);
        report_value(name, value, unit);
}

static int report(const struct world *w, uint64_t cpu_ns, uint64_t wall_ns) {
        double all = 0, least = 1e18, most = 0, p50 = 0, p99 = 0;
        uint64_t wrong = 0;

        for (uint32_t i = 0; i < w->n; i++) {
                const struct client *c = &w->shared->clients[i];
                double posted = (double)atomic_load(&c->posted);

                all += posted;
                least = MIN(least, posted);
                most = MAX(most, posted);
                p50 = MAX(p50, percentile(c, 50));
                p99 = MAX(p99, percentile(c, 99));
                wrong += atomic_load(&c->wrong);
        }
        all = MAX(all, 1.0);
        if (w->full) {
                report_value("crowd-full", (double)wall_ns / all, "ns");
                report_value("crowd-full-work", (double)cpu_ns / all, "ns");
                return 0;
        }
        tell(w, "", (double)cpu_ns / all * w->n * REQUESTS / STEP_NS * 100, " %");
        tell(w, "-fair", most / MAX(least, 1.0), "x");
        tell(w, "-p50", p50, "ns");
        tell(w, "-p99", p99, "ns");
        say("%u clients posted %.0f blocks a second\n", w->n, all * 1e9 / (double)wall_ns);
        return wrong ? -ENOMSG : 0;
}

static int measure(const struct bench *bench, struct world *w) {
        uint64_t began, cpu;

        for (uint32_t i = 0; i < 6000 && atomic_load(&w->shared->ready) < w->n; i++)
                sleep_until(now_ns() + STEP_NS);
        if (atomic_load(&w->shared->ready) < w->n)
                return -ETIMEDOUT;
        atomic_store(&w->shared->go, 1);
        sleep_until(now_ns() + 20 * STEP_NS);
        memset(w->shared->clients, 0, sizeof w->shared->clients);
        began = now_ns();
        cpu = process_cpu_ns(&w->kvd.daemon);
        sleep_until(began + (bench->quick ? 50 : 300) * STEP_NS);
        return report(w, process_cpu_ns(&w->kvd.daemon) - cpu, now_ns() - began);
}

static int run(const struct bench *bench, struct world *w, const char *name, uint32_t n) {
        int r = 0;

        if (!bench_wants(bench, name))
                return 0;
        memset(w->shared, 0, sizeof *w->shared);
        w->n = n;
        w->full = strcmp(name, "crowd-full") == 0;
        for (w->number = 0; w->number < n && r == 0; w->number++) {
                w->clients[w->number] = NO_PROCESS;
                r = process_run(work, w, &w->clients[w->number]);
        }
        if (r == 0)
                r = measure(bench, w);
        for (uint32_t i = 0; i < w->number; i++)
                process_end(&w->clients[i]);
        return r;
}

/* ---- set-up ---------------------------------------------------------------------------------- */

/* Fills the pool, then seals the prompt, which stays pinned. */
static int fill(struct world *w) {
        static struct batch batch, prompt;

        batch = (struct batch){.kvd = &w->kvd, .n = REQUEST_BLOCKS};
        prompt = (struct batch){.kvd = &w->kvd, .n = PROMPT_BLOCKS, .next = UINT64_C(1) << 39};
        batch_tokens(&prompt, 0);
        memcpy(w->prompt, prompt.tokens, sizeof w->prompt);
        return batch_publish(&batch, POOL_BLOCKS / REQUEST_BLOCKS) ?: batch_put(&prompt);
}

int cases_crowd(const struct bench *bench) {
        static const char *const names[] = {"crowd-1", "crowd-20", "crowd-full", "crowd-100", NULL};
        static const uint32_t clients[] = {1, 20, FULL_CLIENTS, 100};
        static struct world w = {.kvd = {.daemon = NO_PROCESS}};
        char dir[256];
        int r;

        if (!bench_wants_any(bench, names))
                return 0;
        snprintf(dir, sizeof dir, "%s/crowd", bench->dir);
        w.shared = mmap(NULL, sizeof *w.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0);
        if (w.shared == MAP_FAILED || mkdir(dir, 0700) < 0)
                return -errno;
        process_go_anywhere();
        r = kvd_side_start(&w.kvd, bench->kvd, dir, &tiny_geometry, POOL_BLOCKS, NULL);
        if (r >= 0)
                r = fill(&w);
        for (uint32_t i = 0; i < ARRAY_SIZE(clients) - bench->quick && r >= 0; i++)
                r = run(bench, &w, names[i], clients[i]);
        kvd_side_end(&w.kvd);
        process_stay();
        munmap(w.shared, sizeof *w.shared);
        return r;
}
