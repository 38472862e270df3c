/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Within a round each contender runs all its samples in a row. Each round has another order, so
 * that no contender always follows the same one (LMDB leaves the cache full of its own data). Each
 * draws its own items: if two contenders look up in the same index, the second must not find data
 * that the first has just brought into the cache. Before its samples, a contender runs some that do
 * not count, so that its process is scheduled and its code is in the cache.
 */

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ipc/base/util.h"
#include "tests/bench/harness.h"

void say(const char *format, ...) {
        va_list args;

        va_start(args, format);
        vfprintf(stderr, format, args);
        va_end(args);
}

uint64_t now_ns(void) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

/* The finaliser of splitmix64. */
uint64_t mix64(uint64_t x) {
        x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
        return x ^ (x >> 31);
}

uint64_t next_random(uint64_t *state) {
        *state += UINT64_C(0x9e3779b97f4a7c15);
        return mix64(*state);
}

/* Eight sums at once, so that additions do not limit the speed. */
uint64_t sum_bytes(const void *data, size_t bytes) {
        const uint64_t *words = data;
        uint64_t sums[8] = {0}, sum = 0;

        for (size_t i = 0; i + 8 <= bytes / sizeof *words; i += 8)
                for (size_t j = 0; j < 8; j++) {
                        uint64_t word;

                        memcpy(&word, &words[i + j], sizeof word);
                        sums[j] += word;
                }
        for (size_t j = 0; j < 8; j++)
                sum += sums[j];
        return sum;
}

static int ascending(const void *a, const void *b) {
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

struct spread spread_of(const double *values, size_t n) {
        struct spread s = {0};
        double *sorted;

        sorted = calloc(n, sizeof *sorted);
        if (!sorted)
                return s;
        memcpy(sorted, values, n * sizeof *sorted);
        qsort(sorted, n, sizeof *sorted, ascending);
        s = (struct spread){.median = sorted[n / 2], .min = sorted[0], .max = sorted[n - 1]};
        free(sorted);
        return s;
}

void contest_add(struct contest *contest, struct contender contender) {
        if (contest->n < MAX_CONTENDERS)
                contest->contenders[contest->n++] = contender;
}

/* One sample, in nanoseconds per operation; negative after a wrong answer. */
static double sample(const struct contest *c, const struct contender *who, uint32_t item) {
        uint64_t begin, end;
        int r = 0;

        if (who->prepare)
                r |= who->prepare(who->ctx, item);
        begin = now_ns();
        r |= who->run(who->ctx);
        end = now_ns();
        if (who->finish)
                r |= who->finish(who->ctx);
        return r ? -1 : (double)(end - begin) / MAX(c->divide, 1u);
}

static double round_of(const struct contest *c, size_t contender, uint32_t round, double *samples,
                       uint64_t *wrong) {
        const struct contender *who = &c->contenders[contender];
        uint32_t warm = MAX(c->samples / 8, 1u);
        uint64_t random = mix64(round * MAX_CONTENDERS + contender + 1);
        uint32_t item = (uint32_t)(next_random(&random) % c->n_items);

        for (uint32_t i = 0; i < warm + c->samples; i++) {
                double t;

                if (!c->hot)
                        item = (uint32_t)(next_random(&random) % c->n_items);
                t = sample(c, who, item);
                if (t < 0)
                        ++*wrong;
                if (i >= warm)
                        samples[i - warm] = t;
        }
        return spread_of(samples, c->samples).median;
}

static void shuffle(size_t *order, size_t n, uint64_t random) {
        for (size_t i = 0; i < n; i++) {
                size_t j = next_random(&random) % (i + 1);

                order[i] = order[j];
                order[j] = i;
        }
}

int contest_run(const struct contest *c, struct outcome *ret) {
        _cleanup_(freep) double *samples = NULL;

        if (c->rounds > MAX_ROUNDS || !c->rounds || !c->samples || !c->n_items)
                return -EINVAL;
        samples = calloc(c->samples, sizeof *samples);
        if (!samples)
                return -ENOMEM;

        ret->wrong = 0;
        for (uint32_t round = 0; round < c->rounds; round++) {
                size_t order[MAX_CONTENDERS];

                shuffle(order, c->n, round);
                for (size_t i = 0; i < c->n; i++)
                        ret->p50[order[i]][round] = round_of(c, order[i], round, samples,
                                                             &ret->wrong);
        }
        return 0;
}

struct spread contest_time(const struct contest *c, const struct outcome *outcome,
                           size_t contender) {
        return spread_of(outcome->p50[contender], c->rounds);
}

struct spread contest_ratio(const struct contest *c, const struct outcome *outcome, size_t peer) {
        double ratio[MAX_ROUNDS];

        for (uint32_t i = 0; i < c->rounds; i++)
                ratio[i] = outcome->p50[peer][i] / MAX(outcome->p50[0][i], 1e-3);
        return spread_of(ratio, c->rounds);
}
