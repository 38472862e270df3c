/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BENCH_GOALS_H
#define KVD_BENCH_GOALS_H

enum goal_kind {
        AT_MOST,          /* the subject's own figure */
        AT_LEAST_AS_FAST, /* peer's time / subject's time, in the same round */
};

struct goal {
        const char *case_name, *peer; /* peer: NULL for the subject itself */
        enum goal_kind kind;
        double goal, aim;
};

/* NULL if there is no goal. */
const struct goal *goal_find(const char *case_name, const char *peer);

/* "aim", "goal" or "missed". */
const char *goal_verdict(const struct goal *goal, double value);

#endif
