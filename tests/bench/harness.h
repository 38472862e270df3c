/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_HARNESS_H
#define KVD_BENCH_HARNESS_H

/*
 * A contest: kvd and its peers do the same work in interleaved rounds of one run. Absolute times on
 * a shared machine move by a third between hours. The ratio of two medians of the same round does
 * not, so ratios are judged.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_CONTENDERS 8
#define MAX_ROUNDS 101

struct contender {
        const char *name;
        /* not timed: prepares what a caller would have ready. May be NULL */
        int (*prepare)(void *ctx, uint32_t item);
        int (*run)(void *ctx);    /* timed. 0, or a wrong answer */
        int (*finish)(void *ctx); /* not timed: releases the result. May be NULL */
        void *ctx;
};

struct contest {
        const char *name;
        bool hot;         /* one item per round instead of another one each time */
        uint32_t n_items; /* items are 0 to n_items - 1 */
        uint32_t rounds, samples;
        uint32_t divide; /* operations in one run; 0 means 1 */
        size_t n;
        /* the first is the subject, the others are its peers */
        struct contender contenders[MAX_CONTENDERS];
};

struct outcome {
        double p50[MAX_CONTENDERS][MAX_ROUNDS]; /* nanoseconds per operation */
        /* runs with a wrong answer: makes the figures void */
        uint64_t wrong;
};

struct spread {
        double median, min, max;
};

void contest_add(struct contest *contest, struct contender contender);
int contest_run(const struct contest *contest, struct outcome *ret);

struct spread spread_of(const double *values, size_t n);
struct spread contest_time(const struct contest *contest, const struct outcome *outcome,
                           size_t contender);
struct spread contest_ratio(const struct contest *contest, const struct outcome *outcome,
                            size_t peer);

uint64_t now_ns(void);

/* Progress and complaints, on standard error. */
__attribute__((format(printf, 1, 2))) void say(const char *format, ...);

/* Random numbers that are the same in every run. */
uint64_t mix64(uint64_t x);
uint64_t next_random(uint64_t *state);

/* Reads all bytes, as a kernel does with a block, at the speed of memory. */
uint64_t sum_bytes(const void *data, size_t bytes);

#endif
