/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Many clients at once, each a process that works as an engine does: a hundred steps a second. In
 * each step it fills and posts a block for each of ten requests, and looks up a hundred prompts of
 * 32 blocks: 1,000 blocks and 10,000 lookups a second. The pool is full, so that each block evicts
 * another one.
 *
 *      crowd-N-work   the daemon's processor time per block, with N clients
 *      crowd-N        ... in percent of one processor, if all clients reach 1,000 blocks a second
 *      crowd-N-bare   a server that does nothing but wait for and read one message of each step of N such clients,
 *                     in percent of one processor
 *      crowd-N-fair   blocks of the client with the fewest, as a share of the client with the most
 *      crowd-N-p50    time of a lookup: the median, and the 99th percentile, each of the worst client;
 *      crowd-N-p99    for information, since clients share processors
 *      crowd-N-seen   from a post until that block is found: the median of one client's, whenever one of its requests begins
 *      crowd-N-heard  ... from a message until the bare server has read it
 *      crowd-1-*      a single client
 *      crowd-full     time per block of four clients together that take, post and unpin 16 blocks at a time as fast as
 *                     they can: 1,000 ns are a million blocks a second; crowd-full-work is the daemon's processor
 *                     time for that
 */

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/kvd_side.h"
#include "tests/bench/report.h"

#define MOST_CLIENTS 100u
#define POOL_BLOCKS 65536u
#define PROMPT_BLOCKS 32u
#define REQUESTS 10u       /* of a client, at a time */
#define REQUEST_BLOCKS 16u /* blocks that a request decodes before it ends */
#define LOOKUPS 100u       /* of a step */
#define FULL_CLIENTS 4u
#define STEP_NS UINT64_C(10000000)
#define BUCKETS 512u       /* of lookup times, 16 ns each; the last one also has all longer times */
#define SEEN_US 4096u      /* buckets of times until posts are found, 1 us each */

struct client {
        _Atomic uint64_t posted, refused, lookups, wrong;
        _Atomic uint64_t times[BUCKETS];
};

struct shared {
        _Atomic int go;
        _Atomic uint32_t ready;
        struct client clients[MOST_CLIENTS];
        _Atomic uint64_t seen[SEEN_US]; /* of the first client */
        _Atomic uint64_t heard; /* messages of the first client that the bare server has read */
};

struct request {
        struct kvd_pin pin;
        struct kvd_block blocks[REQUEST_BLOCKS];
        uint32_t n;
};

struct world {
        struct kvd_side kvd;
        struct process clients[MOST_CLIENTS], bare;
        int ends[MOST_CLIENTS][2]; /* of the bare server and its clients */
        bool is_bare, is_full;
        struct shared *shared;
        uint32_t number; /* of this client */
        uint64_t sent;   /* messages, to the bare server */
        uint32_t prompt[PROMPT_BLOCKS * BLOCK_TOKENS];
        struct request requests[REQUESTS];
};

/* ---- a client -------------------------------------------------------------------------------- */

static void add(_Atomic uint64_t *counter, uint64_t n) {
        atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static void end_request(kvd_space *space, struct request *q) {
        kvd_free(space, q->n, q->blocks);
        kvd_unpin(space, &q->pin);
        q->n = 0;
}

static void post_one(struct world *w, kvd_space *space, struct request *q, uint64_t number) {
        struct client *me = &w->shared->clients[w->number];
        uint32_t tokens[BLOCK_TOKENS];

        if (q->n == REQUEST_BLOCKS)
                end_request(space, q);
        block_tokens(number, tokens);
        if (kvd_alloc(space, 1, &q->blocks[q->n]) != 1) {
                add(&me->refused, 1);
                return;
        }
        add(kvd_post(space, &q->pin, 1, &q->blocks[q->n++], tokens, BLOCK_TOKENS) == 1 ?
                    &me->posted :
                    &me->refused,
            1);
}

static void look_up(struct world *w, kvd_space *space) {
        struct client *me = &w->shared->clients[w->number];
        uint32_t ids[PROMPT_BLOCKS];
        struct kvd_pin pin = {0};
        uint64_t began = now_ns();
        int64_t found = kvd_lookup(space, 0, w->prompt, PROMPT_BLOCKS * BLOCK_TOKENS, ids,
                                   PROMPT_BLOCKS, &pin);

        kvd_unpin(space, &pin);
        add(&me->times[MIN((now_ns() - began) / 16, BUCKETS - 1)], 1);
        add(&me->lookups, 1);
        if (found != PROMPT_BLOCKS * BLOCK_TOKENS)
                add(&me->wrong, 1);
}

static bool is_there(struct world *w, kvd_space *space, const uint32_t *tokens) {
        struct kvd_pin pin = {0};
        int64_t found;
        uint32_t id;

        if (w->is_bare)
                return atomic_load(&w->shared->heard) >= w->sent;
        found = kvd_lookup(space, 0, tokens, BLOCK_TOKENS, &id, 1, &pin);
        kvd_unpin(space, &pin);
        return found != 0;
}

/*
 * Polls for the block, or the message, and yields the processor to the server in between. A block
 * may be refused and never appear.
 */
static void see(struct world *w, kvd_space *space, uint64_t number) {
        uint32_t tokens[BLOCK_TOKENS];
        uint64_t began = now_ns(), end = began + SEEN_US * 1000;

        block_tokens(number, tokens);
        while (!is_there(w, space, tokens) && now_ns() < end)
                sched_yield();
        add(&w->shared->seen[MIN((now_ns() - began) / 1000, SEEN_US - 1)], 1);
}

static void send_one(struct world *w) {
        char message[16] = {0};

        w->sent += send(w->ends[w->number][1], message, sizeof message, MSG_DONTWAIT) > 0;
}

static void step(struct world *w, kvd_space *space, uint64_t *number) {
        if (w->is_bare)
                send_one(w);
        for (uint32_t i = 0; i < REQUESTS && !w->is_bare; i++)
                post_one(w, space, &w->requests[i], (*number)++);
        if (w->number == 0 && (w->is_bare || w->requests[0].n == 1))
                see(w, space, *number - REQUESTS);
        for (uint32_t i = 0; i < LOOKUPS; i++)
                look_up(w, space);
}

/* Decodes a whole request at once. Its blocks are unpinned when its turn comes again. */
static void post_all(struct world *w, kvd_space *space, struct request *q, uint64_t *number) {
        struct client *me = &w->shared->clients[w->number];
        uint32_t tokens[REQUEST_BLOCKS * BLOCK_TOKENS];
        int64_t posted;

        end_request(space, q);
        q->n = (uint32_t)MAX(kvd_alloc(space, REQUEST_BLOCKS, q->blocks), 0);
        for (uint32_t i = 0; i < q->n; i++)
                block_tokens((*number)++, tokens + i * BLOCK_TOKENS);
        posted = q->n ? kvd_post(space, &q->pin, q->n, q->blocks, tokens, q->n * BLOCK_TOKENS) : 0;
        add(&me->posted, (uint64_t)MAX(posted, 0));
        add(&me->refused, q->n - (uint64_t)MAX(posted, 0));
}

static void sleep_until(uint64_t ns) {
        struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};

        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
                ;
}

/* Clients' steps begin at different times, as those of engines do. */
static void go_on(void *ctx) {
        struct world *w = ctx;
        uint64_t number = (uint64_t)getpid() << 40, next; /* of blocks that no client has stored */
        kvd_space *space;
        kvd *handle;

        if (kvd_open(w->kvd.socket, &handle) < 0 ||
            kvd_space_open(handle, "bench", &w->kvd.geometry, NULL, &space) < 0)
                return;
        atomic_fetch_add(&w->shared->ready, 1);
        while (!atomic_load(&w->shared->go))
                sleep_until(now_ns() + STEP_NS);
        for (uint32_t i = 0; w->is_full; i++)
                post_all(w, space, &w->requests[i % REQUESTS], &number);
        next = now_ns() + mix64(w->number) % STEP_NS;
        for (;; next += STEP_NS) {
                sleep_until(next);
                step(w, space, &number);
        }
}

/* ---- a server that does nothing -------------------------------------------------------------- */

static void read_all(void *ctx) {
        struct world *w = ctx;
        struct epoll_event events[64];
        int epoll = epoll_create1(0), n = 0;
        char message[64];

        for (uint32_t i = 0; i < w->number; i++) {
                struct epoll_event event = {.events = EPOLLIN, .data.fd = w->ends[i][0]};

                if (epoll_ctl(epoll, EPOLL_CTL_ADD, w->ends[i][0], &event) < 0)
                        return;
        }
        for (; n >= 0; n = epoll_wait(epoll, events, ARRAY_SIZE(events), -1))
                for (int i = 0; i < n; i++) {
                        if (recv(events[i].data.fd, message, sizeof message, MSG_DONTWAIT) < 0)
                                return;
                        add(&w->shared->heard, events[i].data.fd == w->ends[0][0]);
                }
}

/* ---- us -------------------------------------------------------------------------------------- */

static uint64_t total_posted(const struct shared *s, uint32_t n) {
        uint64_t sum = 0;

        for (uint32_t i = 0; i < n; i++)
                sum += atomic_load(&s->clients[i].posted);
        return sum;
}

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

static double median_seen(const struct shared *s) {
        uint64_t all = 0, below = 0;
        uint32_t us = 0;

        for (uint32_t i = 0; i < SEEN_US; i++)
                all += atomic_load(&s->seen[i]);
        while (us < SEEN_US - 1 && (below += atomic_load(&s->seen[us])) <= all / 2)
                us++;
        return us + 1;
}

static void tell(uint32_t n, const char *what, double value, const char *unit) {
        char name[32];

        snprintf(name, sizeof name, "crowd-%u%s%s", n, *what ? "-" : "", what);
        report_value(name, "kvd", 0, value, unit);
}

static int report(const struct shared *s, uint32_t n, uint64_t cpu_ns, uint64_t wall_ns) {
        double work = (double)cpu_ns / (double)MAX(total_posted(s, n), 1u);
        double least = 1e18, most = 0, p50 = 0, p99 = 0;
        uint64_t refused = 0, wrong = 0;

        for (uint32_t i = 0; i < n; i++) {
                const struct client *c = &s->clients[i];
                double posted = (double)atomic_load(&c->posted);

                least = MIN(least, posted);
                most = MAX(most, posted);
                p50 = MAX(p50, percentile(c, 50));
                p99 = MAX(p99, percentile(c, 99));
                refused += atomic_load(&c->refused);
                wrong += atomic_load(&c->wrong);
        }
        tell(n, "work", work, "ns");
        tell(n, "", work * n * REQUESTS / STEP_NS * 100, "%");
        tell(n, "fair", most > 0 ? least / most : 0, "of 1");
        tell(n, "p50", p50, "ns");
        tell(n, "p99", p99, "ns");
        tell(n, "seen", median_seen(s) * 1000, "ns");
        say("%u clients posted %.0f blocks a second, and were refused %llu times\n", n,
            (double)total_posted(s, n) * 1e9 / (double)wall_ns, (unsigned long long)refused);
        return wrong ? -ENOMSG : 0;
}

static void report_full(const struct shared *s, uint32_t n, uint64_t cpu_ns, uint64_t wall_ns) {
        double blocks = (double)MAX(total_posted(s, n), 1u);
        uint64_t refused = 0;

        for (uint32_t i = 0; i < n; i++)
                refused += atomic_load(&s->clients[i].refused);
        report_value("crowd-full", "kvd", 0, (double)wall_ns / blocks, "ns");
        report_value("crowd-full-work", "kvd", 0, (double)cpu_ns / blocks, "ns");
        say("%u clients at full speed were refused %llu times\n", n, (unsigned long long)refused);
}

static void report_bare(const struct shared *s, uint32_t n, uint64_t cpu_ns, uint64_t wall_ns) {
        tell(n, "bare", (double)cpu_ns * 100 / (double)wall_ns, "%");
        tell(n, "heard", median_seen(s) * 1000, "ns");
}

static void end_clients(struct world *w, uint32_t n) {
        for (uint32_t i = 0; i < n; i++)
                process_end(&w->clients[i]);
}

static int measure(const struct bench *bench, struct world *w, uint32_t n) {
        const struct process *server = w->is_bare ? &w->bare : &w->kvd.daemon;
        uint64_t began, cpu;

        for (uint32_t i = 0; i < 6000 && atomic_load(&w->shared->ready) < n; i++)
                sleep_until(now_ns() + STEP_NS);
        if (atomic_load(&w->shared->ready) < n)
                return -ETIMEDOUT;
        atomic_store(&w->shared->go, 1);
        sleep_until(now_ns() + 20 * STEP_NS);
        memset(w->shared->clients, 0, sizeof w->shared->clients);
        memset(w->shared->seen, 0, sizeof w->shared->seen);
        began = now_ns();
        cpu = process_cpu_ns(server);
        sleep_until(began + (bench->quick ? 50 : 300) * STEP_NS);
        cpu = process_cpu_ns(server) - cpu;
        if (w->is_full)
                report_full(w->shared, n, cpu, now_ns() - began);
        else if (w->is_bare)
                report_bare(w->shared, n, cpu, now_ns() - began);
        else
                return report(w->shared, n, cpu, now_ns() - began);
        return 0;
}

static int run(const struct bench *bench, struct world *w, uint32_t n) {
        int r = 0;

        memset(w->shared, 0, sizeof *w->shared);
        for (w->number = 0; w->number < n && r == 0; w->number++) {
                w->clients[w->number] = NO_PROCESS;
                r = process_run(go_on, w, &w->clients[w->number]);
        }
        n = w->number;
        if (r == 0)
                r = measure(bench, w, n);
        end_clients(w, n);
        return r;
}

static int run_bare(const struct bench *bench, struct world *w, uint32_t n) {
        uint32_t made = 0;
        int r = 0;

        for (; made < n && r == 0; made++)
                r = socketpair(AF_UNIX, SOCK_SEQPACKET, 0, w->ends[made]) < 0 ? -errno : 0;
        made -= r < 0;
        w->number = made;
        w->is_bare = true;
        if (r == 0)
                r = process_run(read_all, w, &w->bare);
        if (r == 0)
                r = run(bench, w, n);
        process_end(&w->bare);
        w->is_bare = false;
        for (uint32_t i = 0; i < made; i++) {
                close(w->ends[i][0]);
                close(w->ends[i][1]);
        }
        return r;
}

static int run_full(const struct bench *bench, struct world *w) {
        int r;

        w->is_full = true;
        r = run(bench, w, FULL_CLIENTS);
        w->is_full = false;
        return r;
}

static int fill(struct world *w, struct kvd_pin *pin) {
        struct kvd_block blocks[PROMPT_BLOCKS];
        int r = fill_single(&w->kvd, POOL_BLOCKS);

        for (uint32_t i = 0; i < PROMPT_BLOCKS; i++)
                block_tokens((UINT64_C(1) << 39) + i, w->prompt + i * BLOCK_TOKENS);
        if (r >= 0)
                r = take_blocks(w->kvd.space, PROMPT_BLOCKS, blocks);
        return r < 0 ? r :
                       kvd_seal(w->kvd.space, pin, PROMPT_BLOCKS, blocks, w->prompt,
                                PROMPT_BLOCKS * BLOCK_TOKENS);
}

static int run_wanted(const struct bench *bench, struct world *w) {
        int r = 0;

        if (bench_wants(bench, "crowd-1"))
                r = run(bench, w, 1) ?: run_bare(bench, w, 1);
        if (r >= 0 && bench_wants(bench, "crowd-20"))
                r = run(bench, w, 20) ?: run_bare(bench, w, 20);
        if (r >= 0 && bench_wants(bench, "crowd-full"))
                r = run_full(bench, w);
        if (r >= 0 && !bench->quick && bench_wants(bench, "crowd-100"))
                r = run(bench, w, 100);
        return r;
}

int cases_crowd(const struct bench *bench) {
        static const char *const names[] = {"crowd-1", "crowd-20", "crowd-full", "crowd-100", NULL};
        static struct world w = {.kvd = {.daemon = NO_PROCESS}, .bare = NO_PROCESS};
        struct kvd_pin pin = {0};
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
        r = kvd_side_start(&w.kvd, bench->kvd, dir, &tiny_geometry, POOL_BLOCKS);
        if (r >= 0)
                r = fill(&w, &pin);
        if (r >= 0)
                r = run_wanted(bench, &w);
        kvd_side_end(&w.kvd);
        process_stay_on(bench->cpu);
        munmap(w.shared, sizeof *w.shared);
        return r;
}
