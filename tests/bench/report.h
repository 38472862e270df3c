/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_REPORT_H
#define KVD_BENCH_REPORT_H

/*
 * Results: a table on standard output, whose rows are printed as soon as they are known, with goals
 * and aims. A release must reach the goal; the aim is where we want to get in the end.
 */

#include <stdint.h>

#include "tests/bench/harness.h"

void report_begin(void);

/* One row for the subject, one for each peer. */
void report_contest(const struct contest *contest, const struct outcome *outcome);

/* A figure that has no rounds. */
void report_value(const char *case_name, double value, const char *unit);

/* A row that could not be measured, and why. */
void report_absent(const char *case_name, const char *peer, const char *why);

uint64_t report_wrong(void); /* wrong answers so far, of all contests */

#endif
