/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The goals. Times are nanoseconds per operation (per block where a batch is published). Ratios are
 * medians of per-round ratios. Reading a large block is bound by memory, so that parity with LMDB
 * is the best that is possible.
 */

#include <stddef.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/bench/goals.h"

static const struct goal goals[] = {
        {"chain-cold", NULL, AT_MOST, 8000, 2500},
        {"chain-hot", NULL, AT_MOST, 2500, 1200},
        {"chain-cold", "lmdb", AT_LEAST_AS_FAST, 15, 50},
        {"chain-cold", "redis", AT_LEAST_AS_FAST, 10, 25},
        {"chain-cold", "socket", AT_LEAST_AS_FAST, 5, 20},
        {"chain-hot", "lmdb", AT_LEAST_AS_FAST, 15, 50},
        {"chain-hot", "redis", AT_LEAST_AS_FAST, 10, 25},
        {"chain-tail", NULL, AT_MOST, 8000, 2500},
        {"chain-new", NULL, AT_MOST, 8000, 2500},
        {"owner-cpu", NULL, AT_MOST, 1000, 500},
        {"alloc", NULL, AT_MOST, 200, 60},
        {"post-1", NULL, AT_MOST, 3000, 1000},
        {"post-16", NULL, AT_MOST, 1000, 300},
        {"post-1-found", NULL, AT_MOST, 100000, 20000},
        {"crowd-1-seen", NULL, AT_MOST, 100000, 20000},
        {"crowd-20", NULL, AT_MOST, 10, 5},
        {"crowd-100", NULL, AT_MOST, 50, 25},
        {"crowd-full", NULL, AT_MOST, 2000, 1000},
        {"crowd-full-work", NULL, AT_MOST, 1000, 500},
        {"seal-16", NULL, AT_MOST, 2000, 1000},
        {"seal-64", NULL, AT_MOST, 1000, 1000},
        {"seal-1", "echo", AT_LEAST_AS_FAST, 1 / 1.4, 1 / 1.2},
        {"seal-16", "echo", AT_LEAST_AS_FAST, 1 / 2.0, 1 / 1.4},
        {"put-128k", "lmdb", AT_LEAST_AS_FAST, 1.3, 1.9},
        {"put-128k", "redis", AT_LEAST_AS_FAST, 4, 6.9},
        {"put-128k-post", "lmdb", AT_LEAST_AS_FAST, 1, 1.2},
        {"put-2m", "lmdb", AT_LEAST_AS_FAST, 1.2, 1.45},
        {"put-2m", "redis", AT_LEAST_AS_FAST, 3, 4.5},
        {"read-128k", "lmdb", AT_LEAST_AS_FAST, 0.8, 1.0},
        {"read-128k", "redis", AT_LEAST_AS_FAST, 3, 5.5},
        {"read-2m", "lmdb", AT_LEAST_AS_FAST, 0.8, 1.0},
        {"read-2m", "redis", AT_LEAST_AS_FAST, 3, 4.9},
        {"index-layout", NULL, AT_MOST, 256, 200},
        {"index-resident", NULL, AT_MOST, 256, 200},
        {"attach", "populate", AT_LEAST_AS_FAST, 1, 10},
};

const struct goal *goal_find(const char *case_name, const char *peer) {
        for (size_t i = 0; i < ARRAY_SIZE(goals); i++) {
                const struct goal *g = &goals[i];

                if (strcmp(g->case_name, case_name) != 0 || !g->peer != !peer)
                        continue;
                if (!peer || strcmp(g->peer, peer) == 0)
                        return g;
        }
        return NULL;
}

static bool reaches(const struct goal *goal, double value, double limit) {
        return goal->kind == AT_MOST ? value <= limit : value >= limit;
}

const char *goal_verdict(const struct goal *goal, double value) {
        return reaches(goal, value, goal->aim)  ? "aim" :
               reaches(goal, value, goal->goal) ? "goal" :
                                                  "missed";
}
