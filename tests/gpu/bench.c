/* SPDX-License-Identifier: Apache-2.0 */
/*
 *      gpu-bench [--only NAME[,NAME...]]
 *
 * Prints JSON lines (line.h). ok: was the aim reached? null if there is no aim, or it cannot be
 * judged. KVD_GPU is the device.
 */
#include "tests/gpu/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/gpu/check.h"
#include "tests/gpu/driver.h"

#define ROUNDS 21
#define NOISE (64 * MIB)

/* ---- memory ---------------------------------------------------------------------------------- */

static _Noreturn void give_up(const struct bench *b) {
        struct line l;

        line_begin(&l, "bench", "can it go on?");
        line_answer(&l, NO, "%s", b->gpu.why);
        exit(1);
}

static void must(struct bench *b, int error, const char *what) {
        if (gpu_check(&b->gpu, error, what) < 0)
                give_up(b);
}

cu_address bench_room(struct bench *b, uint64_t bytes) {
        cu_address at = 0;

        if (b->n_rooms == ARRAY_SIZE(b->rooms))
                abort();
        must(b, b->gpu.cuda->cuMemAlloc(&at, MAX(bytes, 256u)), "cuMemAlloc");
        return b->rooms[b->n_rooms++] = at;
}

void *bench_pinned(struct bench *b, uint64_t bytes) {
        void *at = NULL;

        if (b->n_pinned == ARRAY_SIZE(b->pinned))
                abort();
        must(b, b->gpu.cuda->cuMemHostAlloc(&at, bytes, CU_HOST_PORTABLE | CU_HOST_MAPPED),
             "cuMemHostAlloc");
        return b->pinned[b->n_pinned++] = at;
}

void bench_free(struct bench *b) {
        must(b, b->gpu.cuda->cuCtxSynchronize(), "waiting for the case");
        while (b->n_rooms)
                b->gpu.cuda->cuMemFree(b->rooms[--b->n_rooms]);
        while (b->n_pinned)
                b->gpu.cuda->cuMemFreeHost(b->pinned[--b->n_pinned]);
}

static uint32_t next(uint32_t *state) {
        *state ^= *state << 13;
        *state ^= *state >> 17;
        *state ^= *state << 5;
        return *state;
}

/*
 * bf16 numbers of 2^-6 to 2: random fraction and sign, exponents 121 to 127. Read as fp16 they are
 * also finite.
 */
static uint16_t noise_number(uint32_t *state) {
        uint32_t r = next(state);

        return (uint16_t)((r & 0x807f) | (121 + (r >> 16) % 7) << 7);
}

static void make_noise(struct bench *b) {
        uint64_t bytes = bench_size(b, NOISE, 64 * KIB);
        uint16_t *numbers = malloc(bytes);
        uint32_t state = 12345;

        if (!numbers)
                abort();
        for (uint64_t i = 0; i < bytes / 2; i++)
                numbers[i] = noise_number(&state);
        must(b, b->gpu.cuda->cuMemAlloc(&b->noise, bytes), "cuMemAlloc");
        must(b, b->gpu.cuda->cuMemcpyHtoDAsync(b->noise, numbers, bytes, NULL),
             "cuMemcpyHtoDAsync");
        must(b, b->gpu.cuda->cuStreamSynchronize(NULL), "noise");
        free(numbers);
}

/* Fills memory with repeated noise, each time from another offset in it. */
cu_address bench_random(struct bench *b, uint64_t bytes) {
        uint64_t whole = bench_size(b, NOISE, 64 * KIB), skip = 0;
        cu_address to = bench_room(b, bytes);

        for (uint64_t at = 0; at < bytes; skip = (skip + 4099 * 16) % (whole / 2)) {
                uint64_t n = MIN(bytes - at, whole - skip);

                must(b, b->gpu.cuda->cuMemcpyDtoDAsync(to + at, b->noise + skip, n, b->stream),
                     "cuMemcpyDtoDAsync");
                at += n;
        }
        return to;
}

cu_address bench_copied(struct bench *b, const void *from, uint64_t bytes) {
        cu_address to = bench_room(b, bytes);

        must(b, b->gpu.cuda->cuMemcpyHtoDAsync(to, from, bytes, b->stream), "cuMemcpyHtoDAsync");
        must(b, b->gpu.cuda->cuStreamSynchronize(b->stream), "a copy");
        return to;
}

void bench_floats(struct bench *b, cu_address at, uint64_t n) {
        float *numbers = malloc(n * sizeof *numbers);
        uint32_t state = 777;

        if (!numbers)
                abort();
        for (uint64_t i = 0; i < n; i++)
                numbers[i] = (float)next(&state) / 2147483648.0f - 1;
        must(b, b->gpu.cuda->cuMemcpyHtoDAsync(at, numbers, n * sizeof *numbers, b->stream),
             "cuMemcpyHtoDAsync");
        must(b, b->gpu.cuda->cuStreamSynchronize(b->stream), "a copy");
        free(numbers);
}

cu_address bench_ids(struct bench *b, uint32_t n, uint32_t of, uint32_t *copy) {
        uint32_t *ids = malloc(of * sizeof *ids), state = 99 + b->n_rooms;
        cu_address at;

        if (!ids)
                abort();
        for (uint32_t i = 0; i < of; i++) {
                uint32_t other = next(&state) % (i + 1);

                ids[i] = ids[other];
                ids[other] = i;
        }
        if (copy)
                memcpy(copy, ids, n * sizeof *ids);
        at = bench_copied(b, ids, n * sizeof *ids);
        free(ids);
        return at;
}

uint64_t bench_size(const struct bench *b, uint64_t n, uint64_t least) {
        return b->tiny ? MAX(n >> 10, least) : n;
}

/* ---- time ------------------------------------------------------------------------------------ */

/* Microseconds for n launches. */
static double one_round(struct bench *b, launch_fn *launch, const void *state, unsigned n,
                        unsigned *turn) {
        const struct kvd_cuda *cuda = b->gpu.cuda;
        float ms = 0;

        must(b, cuda->cuEventRecord(b->from, b->stream), "cuEventRecord");
        for (unsigned i = 0; i < n; i++)
                if (launch(b, state, (*turn)++ % TURNS) < 0)
                        return -1;
        must(b, cuda->cuEventRecord(b->to, b->stream), "cuEventRecord");
        must(b, cuda->cuEventSynchronize(b->to), "the launches");
        must(b, cuda->cuEventElapsedTime(&ms, b->from, b->to), "cuEventElapsedTime");
        return (double)ms * 1000;
}

double bench_time(struct bench *b, launch_fn *launch, const void *state) {
        unsigned rounds = b->tiny ? 2 : ROUNDS, turn = 0, n = 1;
        /* loads kernels and warms up */
        double times[ROUNDS], first = one_round(b, launch, state, TURNS, &turn);

        if (first < 0)
                return -1;
        first = one_round(b, launch, state, TURNS, &turn) / TURNS;
        /* at least two milliseconds per round: events are coarse */
        while (!b->tiny && n < 200 && n * first < 2000)
                n *= 2;
        for (unsigned i = 0; i < rounds; i++) {
                times[i] = one_round(b, launch, state, n, &turn);
                if (times[i] < 0)
                        return -1;
                times[i] /= n;
                if (first * n > 200e3 && i == 4) /* five rounds are enough if they are long */
                        rounds = 5;
        }
        return median(times, rounds);
}

/* ---- lines ----------------------------------------------------------------------------------- */

static const char *const bandwidths[] = {"read bandwidth", "copy bandwidth", "the bus", ""};

static void say_op(struct bench *b, const struct op *op, double us, double fixed) {
        double gb_s = us > 0 ? (double)op->bytes / us / 1e3 : 0;
        double share = op->of != OF_NOTHING && b->gb_s[op->of] > 0 ? gb_s / b->gb_s[op->of] : 0;
        enum verdict ok = b->tiny || op->aim == 0 ? OPEN_QUESTION : share >= op->aim ? YES : NO;
        struct line l;

        line_begin(&l, "bench", "%s", op->name);
        if (op->bytes)
                line_number(&l, "bytes", (double)op->bytes);
        if (b->tiny) {
                line_answer(&l, ok, TINY);
                return;
        }
        line_number(&l, "us", us);
        if (op->bytes)
                line_number(&l, "gb_s", gb_s);
        if (share > 0) {
                line_number(&l, "share", share);
                line_number(&l, "rest_us", us - (double)op->bytes / b->gb_s[op->of] / 1e3);
        }
        if (fixed >= 0)
                line_number(&l, "fixed_us", fixed);
        if (op->aim > 0)
                line_number(&l, "aim", op->aim);
        if (share > 0)
                line_answer(&l, ok, "%.1f us, %.0f GB/s, %.0f %% of %s%s", us, gb_s, share * 100,
                            bandwidths[op->of],
                            op->aim == 0 ? "" :
                            ok == YES    ? ": aim reached" :
                                           ": aim not reached");
        else
                line_answer(&l, ok, "%.1f us", us);
}

double bench_op(struct bench *b, const struct op *op) {
        double us = bench_time(b, op->launch, op->state), fixed = -1;
        struct line l;

        if (us >= 0 && op->least)
                fixed = bench_time(b, op->launch, op->least);
        if (us >= 0) {
                say_op(b, op, us, fixed);
                return us;
        }
        line_begin(&l, "bench", "%s", op->name);
        line_answer(&l, NO, "not run: %s", b->gpu.why);
        return us;
}

void bench_ratio(struct bench *b, const char *name, double slower_us, double faster_us,
                 double aim) {
        double ratio = faster_us > 0 && slower_us > 0 ? slower_us / faster_us : 0;
        struct line l;

        line_begin(&l, "bench", "%s", name);
        if (b->tiny || ratio == 0) {
                line_answer(&l, OPEN_QUESTION, "%s", ratio == 0 ? "not run" : TINY);
                return;
        }
        line_number(&l, "ratio", ratio);
        if (aim > 0)
                line_number(&l, "aim", aim);
        line_answer(&l, aim == 0 ? OPEN_QUESTION : ratio >= aim ? YES : NO, "%.2f times", ratio);
}

/* ---- cases ----------------------------------------------------------------------------------- */

static const struct {
        const char *name;
        void (*run)(struct bench *b);
} cases[] = {
        {"memory", bench_memory},
        {"keydiff", bench_keydiff},
        {"attend", bench_attend},
        {"memshare", bench_memshare},
};

static void open_bench(struct bench *b, const struct driver *driver) {
        const char *ordinal = getenv("KVD_GPU");

        *b = (struct bench){.tiny = driver->stand_in, .free = driver->free};
        if (gpu_open(&b->gpu, ordinal ? atoi(ordinal) : 0) < 0)
                give_up(b);
        must(b, b->gpu.cuda->cuStreamCreateWithPriority(&b->stream, CU_STREAM_NON_BLOCKING, 0),
             "a stream");
        must(b, b->gpu.cuda->cuEventCreate(&b->from, 0), "cuEventCreate");
        must(b, b->gpu.cuda->cuEventCreate(&b->to, 0), "cuEventCreate");
        make_noise(b);
}

int main(int argc, char **argv) {
        const char *only = argc > 2 && strcmp(argv[1], "--only") == 0 ? argv[2] : NULL;
        struct driver driver;
        struct bench b;

        if (!driver_say(&driver))
                return 77;
        open_bench(&b, &driver);
        if (gpu_has_kernels(&b.gpu) < 0) {
                fprintf(stderr, "gpu-bench: %s\n", b.gpu.why);
                return 77;
        }
        for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
                if (i == 0 || check_is_wanted(only, cases[i].name)) {
                        cases[i].run(&b);
                        bench_free(&b);
                }
        gpu_close(&b.gpu);
        return 0;
}
