/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs the kernels of kernels.h. A contest is one kernel against "read", which loads as many bytes
 * as the kernel moves; against "near", the same kernel on cached data; and against numpy, in a
 * process of its own. So the ratio to "read" is the fraction of the read bandwidth; writes count as
 * much as reads, although they cost more. The ratio to "near" is the share of computation in the
 * time: at 100 %, the kernel is bound by computation only.
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/kernels.h"
#include "tests/bench/report.h"

#define FULL_BYTES ((size_t)256 << 20)
#define QUICK_BYTES ((size_t)4 << 20)
#define FULL_WINDOWS 64u
#define QUICK_WINDOWS 4u
#define SCRATCH_BYTES ((size_t)1 << 20)
#define NEAR_BYTES ((size_t)256 << 10)

struct numpy {
        pid_t pid; /* 0 if none */
        FILE *to, *from;
        const char *row;
};

struct reader {
        struct kernels *kernels;
        const struct kernel_row *row;
        uint64_t sum;
};

struct subject {
        struct kernels *kernels;
        const struct kernel_row *row;
};

/* Each contender goes through the windows independently. */
static int next_window(struct kernels *k) {
        k->window = (k->window + 1) % k->windows;
        return 0;
}

static int prepare_subject(void *ctx, uint32_t item) {
        return next_window(((struct subject *)ctx)->kernels);
}

static int prepare_reader(void *ctx, uint32_t item) {
        return next_window(((struct reader *)ctx)->kernels);
}

/* ---- reading, as fast as one thread can ------------------------------------------------------ */

#if defined(__x86_64__)
typedef uint64_t wide __attribute__((vector_size(32), aligned(1), may_alias));

__attribute__((target("avx2"))) static uint64_t sum_wide(const uint8_t *data, size_t bytes) {
        wide sum[8] = {0};

        for (size_t i = 0; i + 256 <= bytes; i += 256)
                for (int j = 0; j < 8; j++)
                        sum[j] += *(const wide *)(data + i + 32 * j);
        for (int j = 1; j < 8; j++)
                sum[0] += sum[j];
        return sum[0][0] + sum[0][1] + sum[0][2] + sum[0][3];
}
#endif

uint64_t sum_fast(const uint8_t *data, size_t bytes) {
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx2"))
                return sum_wide(data, bytes);
#endif
        return sum_bytes(data, bytes);
}

/* As many bytes as the kernel moves, which may be more than a window has. */
static int read_as_much(void *ctx) {
        struct reader *r = ctx;
        const struct kernels *k = r->kernels;
        uint32_t first = k->window * window_blocks(k), n = k->windows * window_blocks(k);
        size_t left = k->read + k->written;

        if (r->row->beside) {
                r->sum += r->row->beside(k);
                return 0;
        }
        for (uint32_t i = first; left; i = (i + 1) % n) {
                size_t pass = MIN(left, (size_t)KERNEL_BLOCK_BYTES);

                r->sum += sum_fast(k->blocks[i], pass);
                left -= pass;
        }
        return 0;
}

static int run_kernel(void *ctx) {
        struct subject *s = ctx;

        s->row->run(s->kernels);
        return 0;
}

/* The same work in a window that stays in the second-level cache, to measure computation alone. */
static int run_near(void *ctx) {
        struct subject *s = ctx;
        struct kernels k = *s->kernels;
        size_t moved = k.read + k.written;

        k.window = 0;
        while (moved / (k.windows / s->kernels->windows) > NEAR_BYTES &&
               window_bytes(&k) > KERNEL_BLOCK_BYTES)
                k.windows *= 2;
        for (size_t done = 0; done < moved; done += k.read + k.written)
                s->row->run(&k);
        return 0;
}

/* ---- numpy: a line with a name for each call, a line for its end ----------------------------- */

static int ask_numpy(void *ctx) {
        struct numpy *n = ctx;
        char line[64];

        fprintf(n->to, "%s\n", n->row);
        fflush(n->to);
        return !fgets(line, sizeof line, n->from) || strcmp(line, "done\n") != 0;
}

static bool numpy_knows(struct numpy *n, const char *row) {
        char line[64];

        if (!n->pid)
                return false;
        fprintf(n->to, "?%s\n", row);
        fflush(n->to);
        n->row = row;
        return fgets(line, sizeof line, n->from) && strcmp(line, "yes\n") == 0;
}

static void become_numpy(int in, int out, const struct kernels *k) {
        char size[32], windows[16];

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        snprintf(size, sizeof size, "%zu", k->pool_bytes);
        snprintf(windows, sizeof windows, "%u", k->windows);
        if (dup2(in, 0) < 0 || dup2(out, 1) < 0)
                _exit(1);
        execlp("python3", "python3", KVD_BENCH_FOLDER "/case_kernels.py", size, windows,
               (char *)NULL);
        _exit(1);
}

/* Leaves pid 0 if there is no numpy. */
static int start_numpy(struct numpy *n, const struct kernels *k) {
        int to[2], from[2];
        char line[64];

        if (pipe2(to, O_CLOEXEC) < 0 || pipe2(from, O_CLOEXEC) < 0)
                return -errno;
        n->pid = fork();
        if (n->pid < 0)
                return -errno;
        if (n->pid == 0)
                become_numpy(to[0], from[1], k);
        close(to[0]);
        close(from[1]);
        n->to = fdopen(to[1], "w");
        n->from = fdopen(from[0], "r");
        if (n->to && n->from && fgets(line, sizeof line, n->from) && strcmp(line, "ready\n") == 0)
                return 0;
        waitpid(n->pid, NULL, 0);
        n->pid = 0;
        return 0;
}

static void end_numpy(struct numpy *n) {
        if (n->to)
                fclose(n->to); /* ends it */
        if (n->from)
                fclose(n->from);
        if (n->pid)
                waitpid(n->pid, NULL, 0);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void *map(size_t bytes) {
        void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                            0);

        if (memory == MAP_FAILED)
                return NULL;
        madvise(memory, bytes, MADV_HUGEPAGE);
        return memset(memory, 0, bytes);
}

static void fill(struct kernels *k) {
        uint32_t n = k->windows * window_blocks(k);
        uint64_t random = 1;

        /* bf16: signs and fractions at random, exponent 0 */
        for (size_t i = 0; i < k->pool_bytes; i += 8) {
                uint64_t four = next_random(&random) & UINT64_C(0x807f807f807f807f);

                four |= UINT64_C(0x3f803f803f803f80);
                memcpy(k->pool + i, &four, 8);
        }
        for (uint32_t i = 0; i < n; i++)
                k->blocks[i] = k->in_other_order[i] = k->pool + (size_t)i * KERNEL_BLOCK_BYTES;
        for (uint32_t i = n; i > 1; i--) {
                uint32_t j = (uint32_t)(next_random(&random) % i);
                const uint8_t *swapped = k->in_other_order[i - 1];

                k->in_other_order[i - 1] = k->in_other_order[j];
                k->in_other_order[j] = swapped;
        }
}

static int make_kernels(struct kernels *k, bool quick) {
        uint32_t n_blocks, n_scores;

        k->ops = kvd_ops_pick(NULL);
        k->pool_bytes = quick ? QUICK_BYTES : FULL_BYTES;
        k->windows = quick ? QUICK_WINDOWS : FULL_WINDOWS;
        n_blocks = k->windows * window_blocks(k);
        n_scores = window_rows(k);
        k->pool = map(k->pool_bytes);
        k->other = map(k->pool_bytes);
        k->blocks = calloc(n_blocks, sizeof *k->blocks);
        k->in_other_order = calloc(n_blocks, sizeof *k->in_other_order);
        k->anchors = calloc((size_t)KERNEL_HEADS * KERNEL_DIM, sizeof *k->anchors);
        k->scores = calloc(n_scores, sizeof *k->scores);
        k->cells = calloc(KERNEL_CELLS, sizeof *k->cells);
        k->scratch = calloc(1, SCRATCH_BYTES + (size_t)n_scores * 3 * sizeof *k->scratch);
        k->indices = calloc((size_t)n_blocks * KERNEL_BLOCK, sizeof *k->indices);
        if (!k->pool || !k->other || !k->blocks || !k->in_other_order || !k->anchors ||
            !k->scores || !k->cells || !k->scratch || !k->indices)
                return -ENOMEM;
        fill(k);
        return 0;
}

static void free_kernels(struct kernels *k) {
        if (k->pool)
                munmap(k->pool, k->pool_bytes);
        if (k->other)
                munmap(k->other, k->pool_bytes);
        free(k->blocks);
        free(k->in_other_order);
        free(k->anchors);
        free(k->scores);
        free(k->cells);
        free(k->scratch);
        free(k->indices);
}

/* ---- the roofline ---------------------------------------------------------------------------- */

static void report_roofline(const struct contest *c, const struct outcome *outcome,
                            const struct kernels *k) {
        double bytes = (double)(k->read + k->written), ns = contest_time(c, outcome, 0).median;
        double roof = bytes / contest_time(c, outcome, 1).median,
               fraction = contest_ratio(c, outcome, 1).median,
               near = contest_ratio(c, outcome, 2).median;

        printf("{\"case\":\"%s\",\"roofline\":{\"variant\":\"%s\",\"read_bytes\":%zu,\"written_"
               "bytes\":%zu,\"ms\":%.4g,"
               "\"gb_s\":%.4g,\"read_gb_s\":%.4g,\"fraction\":%.4g,\"of_near\":%.4g,"
               "\"flop_per_byte\":%.3g,\"gflop_s\":%.4g",
               c->name, k->ops->name, k->read, k->written, ns * 1e-6, bytes / ns, roof, fraction,
               near, k->operations / bytes, k->operations / ns);
        if (c->n > 3)
                printf(",\"numpy_ms\":%.4g", contest_time(c, outcome, 3).median * 1e-6);
        printf("}}\n");
        fflush(stdout);
        say("  %-26s %7.1f + %-6.1f %8.2f ms %7.2f of %6.2f GB/s %5.0f %% %6.0f %% %7.2f %8.1f",
            c->name, (double)k->read / 1048576, (double)k->written / 1048576, ns * 1e-6, bytes / ns,
            roof, fraction * 100, near * 100, k->operations / bytes, k->operations / ns);
        if (c->n > 3)
                say(" %9.1f ms", contest_time(c, outcome, 3).median * 1e-6);
        say("\n");
}

/* Runs on every window once: prepares it, populates its pages, and learns how much a row moves. */
static void warm_up(struct kernels *k, const struct kernel_row *row) {
        for (uint32_t i = 0; i < k->windows; i++) {
                next_window(k);
                if (row->prepare)
                        row->prepare(k);
                row->run(k);
        }
}

static int run_row(const struct bench *bench, struct kernels *k, const struct kernel_row *row,
                   struct numpy *numpy) {
        struct contest contest = bench_contest(bench, row->name, 0, 1u << 20);
        struct reader reader = {k, row, 0};
        struct subject subject = {k, row};
        static struct outcome outcome;
        int r;

        contest.samples = MIN(bench->samples, 10u);
        contest.computes = true;
        contest.remote = "numpy";
        contest_add(&contest,
                    (struct contender){"kvd", prepare_subject, run_kernel, NULL, &subject});
        contest_add(&contest,
                    (struct contender){row->beside_name ? row->beside_name : "read", prepare_reader,
                                       read_as_much, NULL, &reader});
        contest_add(&contest, (struct contender){"near", NULL, run_near, NULL, &subject});
        if (numpy_knows(numpy, row->name + strlen("kernels-")))
                contest_add(&contest, (struct contender){"numpy", NULL, ask_numpy, NULL, numpy});
        else if (!numpy->pid)
                report_absent(row->name, "numpy",
                              bench->quick ? "not with --quick" : "not installed");
        warm_up(k, row);
        r = contest_run(&contest, &outcome);
        if (r < 0)
                return r;
        report_contest(&contest, &outcome);
        report_roofline(&contest, &outcome, k);
        return 0;
}

static int run_rows(const struct bench *bench, struct kernels *k, struct numpy *numpy) {
        int r = 0;

        say("kernels (%s), %zu MiB of keys, %zu MiB a call\n", k->ops->name, k->pool_bytes >> 20,
            window_bytes(k) >> 20);
        say("  %-26s %16s %10s %25s %6s %8s %7s %8s %12s\n", "", "MiB read+written", "time",
            "bandwidth of read's", "part", "of near", "flop/B", "GFLOP/s", "numpy");
        for (const struct kernel_row *row = kernel_rows; row->name && r >= 0; row++)
                if (bench_wants(bench, row->name))
                        r = run_row(bench, k, row, numpy);
        return r;
}

int cases_kernels(const struct bench *bench) {
        struct kernels kernels = {0};
        struct numpy numpy = {0};
        const struct kernel_row *row = kernel_rows;
        int r;

        while (row->name && !bench_wants(bench, row->name))
                row++;
        if (!row->name)
                return 0;
        r = make_kernels(&kernels, bench->quick);
        if (r >= 0 && !bench->quick)
                r = start_numpy(&numpy, &kernels);
        if (r >= 0)
                r = run_rows(bench, &kernels, &numpy);
        end_numpy(&numpy);
        free_kernels(&kernels);
        return r;
}
