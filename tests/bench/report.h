/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_REPORT_H
#define KVD_BENCH_REPORT_H

/*
 * Results: a JSON line each on standard output as soon as they are known, and at the end a table
 * with goals and aims on standard error. A release must reach the goal; the aim is where we want to
 * get in the end.
 */

#include <stdint.h>

#include "tests/bench/harness.h"

/*
 * One line for the subject, one for each peer, and one for the fastest of the peers named redis-...
 */
void report_contest(const struct contest *contest, const struct outcome *outcome);

/* A figure that is not a time, or has no rounds. */
void report_value(const char *case_name, const char *subject, uint64_t entries, double value,
                  const char *unit);

/* A row that could not be measured, and why. */
void report_absent(const char *case_name, const char *peer, const char *why);

void report_table(void);
uint64_t report_wrong(void); /* wrong answers so far, of all contests */

#endif
