/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The main figures under other circumstances, each compared with a plain daemon in the same rounds:
 *
 *      arena    a daemon whose domain has isolation = arena
 *      huge     one with pages = huge
 *      busy     a plain one, while another client puts blocks into its space as fast as it can
 *
 * All daemons and that client share another processor than ours. All pools are full, so that taking
 * a block evicts one. Chains that are looked up are pinned, so that they stay.
 *
 *      beside-CASE         as CASE
 *      beside-owner-cpu    ... per block of all clients
 */

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/report.h"
#include "tests/bench/work.h"

#define BATCH 16u /* blocks at a time, of the other client and of those that fill the pool */
#define PATIENCE_MS 60000u

static const struct mode {
        const char *name, *pages, *isolation;
} modes[] = {{"kvd", "daemon.pages=small", "domain bench.isolation=shared"},
             {"arena", "daemon.pages=small", "domain bench.isolation=arena"},
             {"huge", "daemon.pages=huge", "domain bench.isolation=shared"},
             {"busy", "daemon.pages=small", "domain bench.isolation=shared"}};

struct side {
        struct kvd_side kvd; /* without a space if this machine cannot run this mode */
        struct batch batch;
        struct question question;
        struct kvd_pin *held; /* one per chain */
};

struct world {
        const struct bench *bench;
        struct chains chains;
        struct kvd_geometry geometry;
        uint64_t n_blocks; /* of a pool */
        uint8_t *data;     /* of a block */
        struct side sides[ARRAY_SIZE(modes)];
        struct process writer;
};

/* Shared by this process and the writer. */
static struct shared {
        _Atomic int go;
        _Atomic uint64_t sealed; /* batches */
} *shared;

/* ---- the writer ------------------------------------------------------------------------------ */

static void pause_ms(long ms) {
        nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

static void write_on(void *ctx) {
        const struct side *s = ctx;
        struct kvd_side mine = {.geometry = s->kvd.geometry};
        struct batch batch = {.kvd = &mine, .n = BATCH, .next = UINT64_C(1) << 40,
                              .data = s->batch.data, .bytes = s->batch.bytes};
        int r = 0;

        if (kvd_open(s->kvd.socket, &mine.handle) < 0 ||
            kvd_space_open(mine.handle, "bench", &mine.geometry, NULL, &mine.space) < 0)
                return;
        while (r == 0 || r == -ENOBUFS) {
                if (!atomic_load(&shared->go)) {
                        pause_ms(1);
                        continue;
                }
                r = batch_publish(&batch, 1);
                atomic_fetch_add(&shared->sealed, r == 0);
        }
}

/* Starts or stops the writer, and waits until it has noticed. */
static int turn(const struct contender *who) {
        uint64_t sealed = atomic_load(&shared->sealed);
        int go = strcmp(who->name, "busy") == 0;

        if (atomic_exchange(&shared->go, go) == go)
                return 0;
        pause_ms(20);
        for (uint32_t i = 0; go && atomic_load(&shared->sealed) == sealed; i++) {
                if (i == PATIENCE_MS)
                        return -ETIMEDOUT;
                pause_ms(1);
        }
        return 0;
}

/* ---- figures --------------------------------------------------------------------------------- */

struct figure {
        const char *name;
        uint32_t n; /* blocks per operation; 0: a lookup */
        bool hot;
        struct contender does; /* empty: measure the daemon's time */
};

#define ASKS {NULL, question_prepare, question_ask, question_finish, NULL}
#define ALLOCATES {NULL, batch_tokens, batch_take_singly, batch_seal_and_unpin, NULL}
#define SEALS {NULL, batch_blocks, batch_seal, batch_unpin, NULL}
#define POSTS {NULL, batch_blocks, batch_post, batch_let_go, NULL}
#define PUTS {NULL, batch_tokens, batch_put, batch_unpin, NULL}

static struct contest contest_of(struct world *w, const char *name) {
        struct contest contest = bench_contest(w->bench, name, 0, MAX(w->chains.n_chains, 1u));

        contest.turn = turn;
        for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
                struct side *s = &w->sides[i];

                if (s->kvd.space)
                        contest_add(&contest,
                                    (struct contender){.name = modes[i].name, .ctx = &s->batch});
                else
                        report_absent(name, modes[i].name,
                                      "too few reserved huge pages: see its log");
        }
        return contest;
}

static uint32_t samples_of(const struct world *w, uint32_t n) {
        if (!n)
                return w->bench->samples * 10; /* gives the writer time */
        if (!w->data)
                return MAX(w->bench->samples / 5, 30u);
        return n * kvd_block_bytes(&w->geometry) > (4u << 20) ? 4 :
                                                                MIN(w->bench->samples / 10, 30u);
}

static int run_contest(struct world *w, const struct figure *figure) {
        struct contest contest = contest_of(w, figure->name);

        contest.entries = figure->n ? 0 : w->chains.n_blocks;
        contest.hot = figure->hot;
        contest.divide = figure->n;
        contest.samples = samples_of(w, figure->n);
        for (size_t i = 0; i < contest.n; i++) {
                struct contender *c = &contest.contenders[i], own = *c;
                struct side *s = container_of(c->ctx, struct side, batch);

                s->batch.n = figure->n;
                *c = figure->does;
                c->name = own.name;
                c->ctx = figure->n ? own.ctx : &s->question;
        }
        return bench_run(w->bench, &contest);
}

/* ---- the daemon's time ----------------------------------------------------------------------- */

static int measure_owner(const struct contender *who, uint32_t times, double *ret) {
        struct batch *batch = who->ctx;
        uint64_t cpu, sealed;
        int r = turn(who);

        batch->n = BATCH;
        sealed = atomic_load(&shared->sealed);
        cpu = process_cpu_ns(&batch->kvd->daemon);
        if (r >= 0)
                r = batch_publish(batch, times);
        cpu = process_cpu_ns(&batch->kvd->daemon) - cpu;
        sealed = atomic_load(&shared->sealed) - sealed + times;
        *ret = (double)cpu / (double)(sealed * BATCH);
        return r;
}

static int run_owner(struct world *w, const struct figure *figure) {
        static struct outcome outcome;
        struct contest contest = contest_of(w, figure->name);
        int r = 0;

        say("%s\n", figure->name);
        for (uint32_t round = 0; round < contest.rounds; round++)
                for (size_t i = 0; i < contest.n && r >= 0; i++)
                        r = measure_owner(&contest.contenders[i], contest.samples * 4,
                                          &outcome.p50[i][round]);
        if (r >= 0)
                report_contest(&contest, &outcome);
        return r;
}

/* ---- set-up ---------------------------------------------------------------------------------- */

static int hold_all(struct side *s, uint32_t n_chains) {
        s->held = calloc(n_chains, sizeof *s->held);
        if (!s->held && n_chains)
                return -ENOMEM;
        for (uint32_t i = 0; i < n_chains; i++) {
                question_prepare(&s->question, i);
                if (question_ask(&s->question))
                        return -ENOMSG;
                s->held[i] = s->question.pin;
                s->question.pin = (struct kvd_pin){0};
        }
        return 0;
}

static int start_side(struct world *w, size_t i, const char *dir) {
        struct side *s = &w->sides[i];
        char users[64];
        const char *more[] = {"--set", modes[i].pages,     "--set", users,
                              "--set", modes[i].isolation, "--set", "daemon.overhead=4G", NULL};
        int r;

        snprintf(users, sizeof users, "domain bench.users=%u", getuid());
        s->batch = (struct batch){.kvd = &s->kvd, .n = BATCH, .next = UINT64_C(1) << 39,
                                  .data = w->data, .bytes = kvd_block_bytes(&w->geometry)};
        s->question = (struct question){.chains = &w->chains, .kvd = &s->kvd,
                                        .n_tokens = CHAIN_TOKENS, .expected = CHAIN_TOKENS};
        r = kvd_side_start_with(&s->kvd, w->bench->kvd, dir, &w->geometry, w->n_blocks, more);
        if (r == -EIO && strcmp(modes[i].name, "huge") == 0)
                return 0; /* too few huge pages are reserved, which the rows report */
        if (r >= 0)
                r = fill_chains(&s->kvd, &w->chains);
        if (r >= 0)
                r = hold_all(s, w->chains.n_chains);
        return r < 0 ? r : batch_publish(&s->batch, (uint32_t)(w->n_blocks / BATCH));
}

static int start(struct world *w, const char *dir) {
        int r = 0;

        process_stay_on(w->bench->other_cpu);
        for (size_t i = 0; i < ARRAY_SIZE(modes) && r >= 0; i++)
                r = start_side(w, i, dir);
        if (r >= 0)
                r = process_run(write_on, &w->sides[ARRAY_SIZE(modes) - 1], &w->writer);
        process_stay_on(w->bench->cpu);
        return r;
}

static void end(struct world *w) {
        process_end(&w->writer);
        for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
                struct side *s = &w->sides[i];

                for (uint32_t c = 0; s->held && c < w->chains.n_chains; c++)
                        kvd_unpin(s->kvd.space, &s->held[c]);
                free(s->held);
                kvd_side_end(&s->kvd);
        }
        free(w->data);
}

/* ---- groups ---------------------------------------------------------------------------------- */

static int run_all(struct world *w, const struct figure *figures, size_t n, const char *dir) {
        bool wanted = false;
        int r;

        for (size_t i = 0; i < n; i++)
                wanted |= bench_wants(w->bench, figures[i].name);
        r = wanted ? start(w, dir) : 0;
        for (size_t i = 0; i < n && r >= 0; i++)
                if (bench_wants(w->bench, figures[i].name))
                        r = figures[i].does.run ? run_contest(w, &figures[i]) :
                                                  run_owner(w, &figures[i]);
        atomic_store(&shared->go, 0);
        end(w);
        return r;
}

static struct world *new_world(const struct bench *bench) {
        static struct world w;

        w = (struct world){.bench = bench, .writer = NO_PROCESS};
        for (size_t i = 0; i < ARRAY_SIZE(modes); i++)
                w.sides[i].kvd.daemon = NO_PROCESS;
        return &w;
}

static int beside_small(const struct bench *bench, const char *dir) {
        static const struct figure figures[] = {
                {"beside-chain-cold", 0, false, ASKS}, {"beside-chain-hot", 0, true, ASKS},
                {"beside-alloc", BATCH_MOST, false, ALLOCATES}, {"beside-seal-1", 1, false, SEALS},
                {"beside-seal-16", 16, false, SEALS},  {"beside-post-1", 1, false, POSTS},
                {"beside-post-16", 16, false, POSTS},  {"beside-owner-cpu", BATCH, false, {0}}};
        struct world *w = new_world(bench);

        w->chains = chains_plan(bench->n_sizes ? bench->sizes[bench->n_sizes - 1] : 0);
        w->geometry = tiny_geometry;
        w->n_blocks = w->chains.n_blocks + w->chains.n_blocks / 4;
        return run_all(w, figures, ARRAY_SIZE(figures), dir);
}

static int beside_large(const struct bench *bench, const char *dir, uint32_t kib,
                        const struct figure *figures, size_t n) {
        struct world *w = new_world(bench);
        size_t bytes;

        w->geometry = large_geometry(kib);
        bytes = kvd_block_bytes(&w->geometry);
        w->n_blocks = (UINT64_C(1) << (bench->quick ? 27 : 29)) / bytes;
        w->data = aligned_alloc(4096, bytes);
        if (!w->data)
                return -ENOMEM;
        memset(w->data, 0x5a, bytes);
        return run_all(w, figures, n, dir);
}

static int run_groups(const struct bench *bench, const char *dir) {
        static const struct figure put_128k[] = {{"beside-put-128k", 16, false, PUTS},
                                                 {"beside-put-128k-1", 1, false, PUTS}};
        static const struct figure put_2m[] = {{"beside-put-2m", 16, false, PUTS}};
        int r = beside_small(bench, dir);

        if (r >= 0)
                r = beside_large(bench, dir, 128, put_128k, ARRAY_SIZE(put_128k));
        return r < 0 ? r : beside_large(bench, dir, 2048, put_2m, ARRAY_SIZE(put_2m));
}

int cases_beside(const struct bench *bench) {
        char dir[256];
        int r;

        if (bench->other_cpu < 0) {
                if (bench_wants(bench, "beside"))
                        report_absent("beside", "busy", "needs two processors");
                return 0;
        }
        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                      0);
        snprintf(dir, sizeof dir, "%s/beside", bench->dir);
        if (shared == MAP_FAILED || mkdir(dir, 0700) < 0)
                return -errno;
        r = run_groups(bench, dir);
        munmap(shared, sizeof *shared);
        return r;
}
