/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvd-bench: compares kvd with LMDB, Redis and plain sockets in the same run. Usually started by
 * the script "run" in this folder.
 */

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/bench/bench.h"
#include "tests/bench/process.h"
#include "tests/bench/report.h"

static const struct group {
        const char *name;
        int (*run)(const struct bench *bench);
} groups[] = {
        {"lookups", cases_lookup},
        {"allocate and seal", cases_publish},
        {"large blocks", cases_blocks},
        {"many clients", cases_crowd},
};

bool bench_wants(const struct bench *bench, const char *case_name) {
        return !bench->only || strncmp(bench->only, case_name, strlen(bench->only)) == 0;
}

bool bench_wants_any(const struct bench *bench, const char *const *case_names) {
        for (; *case_names; case_names++)
                if (bench_wants(bench, *case_names))
                        return true;
        return false;
}

struct contest bench_contest(const struct bench *bench, const char *name, uint32_t n_items) {
        return (struct contest){.name = name,
                                .n_items = n_items,
                                .rounds = bench->rounds,
                                .samples = bench->samples};
}

int bench_run(const struct bench *bench, const struct contest *contest) {
        static struct outcome outcome;
        int r;

        if (!bench_wants(bench, contest->name))
                return 0;
        r = contest_run(contest, &outcome);
        if (r >= 0)
                report_contest(contest, &outcome);
        return r;
}

static void describe_machine(void) {
        double load[3] = {0};

        getloadavg(load, 3);
        if (load[0] > 0.5)
                say("the machine is busy (load %.2f): times are high, ratios hold\n", load[0]);
}

static int usage(const char *name) {
        say("usage: %s --dir DIR --kvd PATH [--quick] [--only CASE] [--entries N] [--rounds N]\n",
            name);
        return 2;
}

static int parse(struct bench *bench, int argc, char **argv) {
        static const struct option options[] = {
                {"quick", no_argument, NULL, 'q'},
                {"only", required_argument, NULL, 'o'},
                {"dir", required_argument, NULL, 'd'},
                {"kvd", required_argument, NULL, 'k'},
                {"entries", required_argument, NULL, 'e'},
                {"rounds", required_argument, NULL, 'r'},
                {0},
        };
        int c;

        while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0) {
                switch (c) {
                case 'q':
                        bench->quick = true;
                        bench->samples = 60;
                        break;
                case 'o': bench->only = optarg; break;
                case 'd': bench->dir = optarg; break;
                case 'k': bench->kvd = optarg; break;
                case 'e': bench->entries = strtoull(optarg, NULL, 0); break;
                case 'r': bench->rounds = (uint32_t)atoi(optarg); break;
                default: return -EINVAL;
                }
        }
        return bench->dir && bench->kvd && optind == argc ? 0 : -EINVAL;
}

int main(int argc, char **argv) {
        struct bench bench = {.rounds = 15, .samples = 300, .entries = 1048576};
        int failed = 0;

        if (parse(&bench, argc, argv) < 0 || bench.rounds > MAX_ROUNDS || bench.rounds < 1)
                return usage(argv[0]);
        process_stay();
        describe_machine();
        report_begin();
        for (size_t i = 0; i < ARRAY_SIZE(groups); i++) {
                int r = groups[i].run(&bench);

                if (r < 0) {
                        say("%s: %s\n", groups[i].name, strerror(-r));
                        failed = 1;
                }
        }
        return failed || report_wrong() ? 1 : 0;
}
