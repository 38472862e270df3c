/* SPDX-License-Identifier: Apache-2.0 */

#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/bench/report.h"

/*
 * Without a peer, times are nanoseconds per operation (per block where a batch is published), and a
 * goal is the most. With one, a goal is the least number of times as long that the peer takes: the
 * median of per-round ratios. Reading a large block is bound by memory, so that parity with LMDB is
 * the best that is possible.
 */
static const struct goal {
        const char *case_name, *peer;
        double goal, aim;
} goals[] = {
        {"chain-cold", NULL, 8000, 2000},
        {"chain-hot", NULL, 2500, 1200},
        {"chain-cold", "lmdb", 15, 50},
        {"chain-cold", "lmdb-runs", 2, 4},
        {"chain-cold", "redis", 10, 25},
        {"chain-cold", "socket", 5, 20},
        {"chain-hot", "lmdb", 15, 50},
        {"chain-hot", "lmdb-runs", 1.2, 1.6},
        {"chain-hot", "redis", 10, 25},
        {"index", NULL, 256, 200},
        {"attach", NULL, 5e6, 1e6},
        {"owner-cpu", NULL, 1000, 500},
        {"alloc", NULL, 200, 60},
        {"post-1", NULL, 3000, 1000},
        {"post-16", NULL, 1000, 300},
        {"post-1-found", NULL, 100000, 20000},
        {"seal-16", NULL, 2000, 1000},
        {"seal-64", NULL, 1000, 1000},
        {"seal-1", "echo", 1 / 1.4, 1 / 1.2},
        {"seal-16", "echo", 1 / 2.0, 1 / 1.4},
        {"put-128k", "lmdb", 0.9, 1.0},
        {"put-128k", "redis", 4, 6.9},
        {"put-128k-post", "lmdb", 1, 1.2},
        {"put-2m", "lmdb", 0.9, 1.0},
        {"put-2m", "redis", 3, 4.5},
        {"read-128k", "lmdb", 0.8, 1.0},
        {"read-128k", "redis", 3, 5.5},
        {"read-2m", "lmdb", 0.8, 1.0},
        {"read-2m", "redis", 3, 4.9},
        {"crowd-20", NULL, 10, 5},
        {"crowd-20-fair", NULL, 2, 1.1},
        {"crowd-100", NULL, 50, 25},
        {"crowd-full", NULL, 2000, 1000},
        {"crowd-full-work", NULL, 1000, 500},
};

static uint64_t wrong;

static const struct goal *goal_of(const char *case_name, const char *peer) {
        for (size_t i = 0; i < ARRAY_SIZE(goals); i++)
                if (strcmp(goals[i].case_name, case_name) == 0 && !goals[i].peer == !peer &&
                    (!peer || strcmp(goals[i].peer, peer) == 0))
                        return &goals[i];
        return NULL;
}

static bool reaches(const struct goal *goal, double value, double limit) {
        return goal->peer ? value >= limit : value <= limit;
}

static const char *verdict(const struct goal *goal, double value) {
        return !goal                            ? "" :
               reaches(goal, value, goal->aim)  ? "aim" :
               reaches(goal, value, goal->goal) ? "goal" :
                                                  "missed";
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define ROOM 24

static const char *text(char to[ROOM], double value, const char *unit) {
        if (strcmp(unit, "ns") != 0)
                snprintf(to, ROOM, "%.3g%s", value, unit);
        else if (value < 1e3)
                snprintf(to, ROOM, "%.1f ns", value);
        else if (value < 1e6)
                snprintf(to, ROOM, "%.2f us", value / 1e3);
        else
                snprintf(to, ROOM, "%.2f ms", value / 1e6);
        return to;
}

static void print_row(const char *case_name, const char *who, const char *time, const char *ratio,
                      const char *spread, const char *goal, const char *aim, const char *end) {
        printf("%-15s %-8s %12s %8s  %-26s %10s %10s  %s\n", case_name, who, time, ratio, spread,
               goal, aim, end);
        fflush(stdout);
}

void report_begin(void) {
        print_row("case", "who", "p50", "kvd is", "spread over rounds", "goal", "aim", "verdict");
}

/* judged: what is compared with the goal, and in which unit: the time itself, or a ratio. */
static void report(const char *case_name, const char *peer, double time, struct spread judged,
                   const char *unit) {
        const struct goal *goal = goal_of(case_name, peer);
        char value[ROOM], ratio[ROOM], least[ROOM], most[ROOM], spread[2 * ROOM + 8] = "";
        char limit[ROOM], aim[ROOM];

        if (judged.min < judged.max)
                snprintf(spread, sizeof spread, "[%s..%s]", text(least, judged.min, unit),
                         text(most, judged.max, unit));
        print_row(case_name, peer ?: "kvd", text(value, time, peer ? "ns" : unit),
                  peer ? text(ratio, judged.median, unit) : "", spread,
                  goal ? text(limit, goal->goal, unit) : "", goal ? text(aim, goal->aim, unit) : "",
                  verdict(goal, judged.median));
}

void report_contest(const struct contest *c, const struct outcome *outcome) {
        struct spread own = contest_time(c, outcome, 0);

        report(c->name, NULL, own.median, own, "ns");
        for (size_t i = 1; i < c->n; i++)
                report(c->name, c->contenders[i].name, contest_time(c, outcome, i).median,
                       contest_ratio(c, outcome, i), "x");
        wrong += outcome->wrong;
        if (outcome->wrong)
                say("%s: %llu wrong answers\n", c->name, (unsigned long long)outcome->wrong);
}

void report_value(const char *case_name, double value, const char *unit) {
        report(case_name, NULL, value, (struct spread){value, value, value}, unit);
}

void report_absent(const char *case_name, const char *peer, const char *why) {
        print_row(case_name, peer, "", "", "", "", "", why);
}

uint64_t report_wrong(void) {
        return wrong;
}
