/* SPDX-License-Identifier: Apache-2.0 */

#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/bench/goals.h"
#include "tests/bench/report.h"

#define MAX_ROWS 256

struct row {
        char case_name[32], who[24];
        uint64_t entries;
        double value, ratio; /* ratio: 0 in the subject's row */
        struct spread spread;
        char unit[16];
        const struct goal *goal;
        const char *verdict;
};

static struct row rows[MAX_ROWS];
static size_t n_rows;
static uint64_t wrong;

static struct row *new_row(const char *case_name, const char *who, uint64_t entries,
                           const char *goal_peer) {
        static struct row spare;
        struct row *row = n_rows < MAX_ROWS ? &rows[n_rows++] : &spare;

        *row = (struct row){.entries = entries, .goal = goal_find(case_name, goal_peer), .verdict = ""};
        snprintf(row->case_name, sizeof row->case_name, "%s", case_name);
        snprintf(row->who, sizeof row->who, "%s", who);
        snprintf(row->unit, sizeof row->unit, "ns");
        return row;
}

static void judge(struct row *row, double value) {
        if (row->goal)
                row->verdict = goal_verdict(row->goal, value);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void print_goal(const struct row *row) {
        if (row->goal)
                printf(",\"goal\":%.4g,\"aim\":%.4g,\"verdict\":\"%s\"", row->goal->goal,
                       row->goal->aim, row->verdict);
        printf("}\n");
        fflush(stdout);
}

static void print_times(const struct contest *c, const char *peer, struct spread time) {
        printf("{\"case\":\"%s\",\"subject\":\"%s\",\"peer\":", c->name, c->contenders[0].name);
        printf(peer ? "\"%s\"" : "null", peer);
        printf(",\"entries\":%llu,\"hot\":%s,\"rounds\":%u,\"n\":%u",
               (unsigned long long)c->entries, c->hot ? "true" : "false", c->rounds,
               c->rounds * c->samples);
        printf(",\"p50_ns\":%.1f,\"min_ns\":%.1f,\"max_ns\":%.1f", time.median, time.min, time.max);
}

/* ---- contests -------------------------------------------------------------------------------- */

static void report_subject(const struct contest *c, const struct outcome *outcome) {
        struct row *row = new_row(c->name, c->contenders[0].name, c->entries, NULL);

        row->spread = contest_time(c, outcome, 0);
        row->value = row->spread.median;
        judge(row, row->value);
        print_times(c, NULL, row->spread);
        print_goal(row);
}

static void report_peer(const struct contest *c, const struct outcome *outcome, size_t peer,
                        const char *as) {
        struct spread time = contest_time(c, outcome, peer);
        struct row *row = new_row(c->name, as, c->entries, as);

        row->spread = contest_ratio(c, outcome, peer);
        row->value = time.median;
        row->ratio = row->spread.median;
        judge(row, row->ratio);
        print_times(c, as, time);
        printf(",\"ratio_median\":%.4g,\"ratio_min\":%.4g,\"ratio_max\":%.4g", row->ratio,
               row->spread.min, row->spread.max);
        if (strcmp(as, c->contenders[peer].name) != 0)
                printf(",\"form\":\"%s\"", c->contenders[peer].name);
        print_goal(row);
}

static size_t fastest_redis(const struct contest *c, const struct outcome *outcome) {
        size_t best = 0;

        for (size_t i = 1; i < c->n; i++)
                if (strncmp(c->contenders[i].name, "redis-", 6) == 0 &&
                    (!best ||
                     contest_time(c, outcome, i).median < contest_time(c, outcome, best).median))
                        best = i;
        return best;
}

void report_contest(const struct contest *c, const struct outcome *outcome) {
        size_t redis = fastest_redis(c, outcome);

        report_subject(c, outcome);
        for (size_t i = 1; i < c->n; i++)
                report_peer(c, outcome, i, c->contenders[i].name);
        if (redis)
                report_peer(c, outcome, redis, "redis");
        wrong += outcome->wrong;
        if (outcome->wrong)
                fprintf(stderr, "%s: %llu wrong answers\n", c->name,
                        (unsigned long long)outcome->wrong);
}

void report_value(const char *case_name, const char *subject, uint64_t entries, double value,
                  const char *unit) {
        struct row *row = new_row(case_name, subject, entries, NULL);

        row->value = row->spread.min = row->spread.max = value;
        snprintf(row->unit, sizeof row->unit, "%s", unit);
        judge(row, value);
        printf("{\"case\":\"%s\",\"subject\":\"%s\",\"peer\":null,\"entries\":%llu,\"value\":%.6g,\"unit\":\"%s\"",
               case_name, subject, (unsigned long long)entries, value, unit);
        print_goal(row);
}

void report_absent(const char *case_name, const char *peer, const char *why) {
        struct row *row = new_row(case_name, peer, 0, peer);

        row->verdict = strstr(why, "not installed") ? "not installed" : "not measured";
        row->goal = NULL;
        printf("{\"case\":\"%s\",\"subject\":\"kvd\",\"peer\":\"%s\",\"verdict\":\"%s\",\"why\":\"%s\"}\n",
               case_name, peer, row->verdict, why);
        fflush(stdout);
}

uint64_t report_wrong(void) {
        return wrong;
}

/* ---- table ----------------------------------------------------------------------------------- */

static void format_value(char *to, size_t room, double value, const char *unit) {
        if (strcmp(unit, "ns") != 0)
                snprintf(to, room, "%.4g %s", value, unit);
        else if (value < 1000)
                snprintf(to, room, "%.1f ns", value);
        else if (value < 1e6)
                snprintf(to, room, "%.2f us", value / 1e3);
        else
                snprintf(to, room, "%.2f ms", value / 1e6);
}

static void format_spread(char *to, size_t room, const struct row *row) {
        char min[24], max[24];

        *to = 0;
        if (row->spread.min == row->spread.max)
                return;
        if (row->ratio > 0) {
                snprintf(to, room, "[%.3g..%.3g]x", row->spread.min, row->spread.max);
                return;
        }
        format_value(min, sizeof min, row->spread.min, row->unit);
        format_value(max, sizeof max, row->spread.max, row->unit);
        snprintf(to, room, "[%s..%s]", min, max);
}

static void format_limit(char *to, size_t room, const struct row *row, double limit) {
        *to = 0;
        if (!row->goal)
                return;
        if (row->ratio > 0)
                snprintf(to, room, "%s %.3gx", row->goal->kind == AT_MOST ? "<=" : ">=", limit);
        else
                format_value(to, room, limit, row->unit);
}

static void print_row(const struct row *row) {
        char value[32] = "", ratio[32] = "", spread[64], goal[32], aim[32], entries[24] = "";

        format_value(value, sizeof value, row->value, row->unit);
        format_spread(spread, sizeof spread, row);
        format_limit(goal, sizeof goal, row, row->goal ? row->goal->goal : 0);
        format_limit(aim, sizeof aim, row, row->goal ? row->goal->aim : 0);
        if (row->ratio > 0)
                snprintf(ratio, sizeof ratio, "%.3gx", row->ratio);
        if (row->entries)
                snprintf(entries, sizeof entries, "%llu", (unsigned long long)row->entries);
        fprintf(stderr, "%-15s %-16s %9s %12s %8s %-26s %10s %10s  %s\n", row->case_name, row->who,
                entries, value, ratio, spread, goal, aim, row->verdict);
}

void report_table(void) {
        fprintf(stderr, "\n%-15s %-16s %9s %12s %8s %-26s %10s %10s  %s\n", "case", "who",
                "entries", "p50", "kvd is", "spread over rounds", "goal", "aim", "verdict");
        for (size_t i = 0; i < n_rows; i++) {
                if (i && strcmp(rows[i].case_name, rows[i - 1].case_name) != 0)
                        fprintf(stderr, "\n");
                print_row(&rows[i]);
        }
}
