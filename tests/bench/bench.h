/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_BENCH_H
#define KVD_BENCH_BENCH_H

/* The parameters of all groups of cases, and the groups. */

#include <stdbool.h>
#include <stdint.h>

#include "tests/bench/harness.h"

struct bench {
        bool quick;
        const char *only; /* a case, a prefix of cases, or NULL: all */
        const char *dir;  /* an empty directory, in memory if possible */
        const char *kvd;  /* the daemon */
        uint64_t entries; /* blocks in the index */
        uint32_t rounds, samples;
};

bool bench_wants(const struct bench *bench, const char *case_name);
bool bench_wants_any(const struct bench *bench, const char *const *case_names);

/* A contest with this run's rounds and samples. */
struct contest bench_contest(const struct bench *bench, const char *name, uint32_t n_items);

/* Runs and reports a contest, if it is wanted. */
int bench_run(const struct bench *bench, const struct contest *contest);

/* Each returns 0, or a negative errno after a line on standard error. */
int cases_lookup(const struct bench *bench);
int cases_publish(const struct bench *bench);
int cases_blocks(const struct bench *bench);
int cases_crowd(const struct bench *bench);

#endif
