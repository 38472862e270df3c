/* SPDX-License-Identifier: Apache-2.0 */

/* Eviction to a budget: what stays is what the definition says, and what is not evicted is exact. */

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kvlm/lossy.h"

enum { N = LOSSY_N, TAIL = 60 };

/* ---- the oracle ---- */

static double length(const double *x, uint32_t n) {
        double squares = 0.0;

        for (uint32_t i = 0; i < n; i++)
                squares += x[i] * x[i];
        return sqrt(squares);
}

/* The definition, over the visible tokens. */
static void keydiff(const bool *visible, uint32_t n, const double *k, uint32_t stride, uint32_t dim, double *to) {
        double *anchor = folder_memory(dim * sizeof *anchor);

        for (uint32_t i = 0; i < n; i++)
                for (uint32_t d = 0; d < dim && visible[i]; d++)
                        anchor[d] += k[i * stride + d] / length(k + i * stride, dim);
        for (uint32_t i = 0; i < n; i++) {
                double dot = 0.0;

                for (uint32_t d = 0; d < dim; d++)
                        dot += anchor[d] * k[i * stride + d];
                to[i] = -dot / (length(anchor, dim) * length(k + i * stride, dim));
        }
}

static void forget(const struct forgetting *f, uint32_t n, const double *k, uint32_t stride, uint32_t dim,
                   const double *mass, bool *visible) {
        double *score = folder_memory(n * sizeof *score);
        uint32_t kept = 0, prompt = N - TAIL, newest;

        for (uint32_t i = 0; i < n; i++)
                kept += visible[i];
        if (n < prompt ? n % f->every != 0 : n > prompt && kept <= f->budget + f->slack)
                return;
        if (strcmp(f->what, "keydiff") == 0)
                keydiff(visible, n, k, stride, dim, score);
        for (uint32_t i = 0; i < n && strcmp(f->what, "keydiff") != 0; i++)
                score[i] = strcmp(f->what, "window") == 0 ? i : mass[i] / (n - i);
        newest = n;
        for (uint32_t left = f->recent; left > 0 && newest > 0; left -= visible[newest])
                newest--;
        for (; kept > f->budget; kept--) {
                uint32_t worst = UINT32_MAX;

                for (uint32_t i = f->sinks; i < newest; i++)
                        if (visible[i] && (worst == UINT32_MAX || score[i] < score[worst]))
                                worst = i;
                visible[worst] = false;
        }
}

static double worst_error(const struct forgetting *f, const char *options) {
        return lossy_distance(reference_logits_forgetting(lossy_model, lossy_tokens, N, f), options);
}

static const char *const policies[] = {"keydiff", "window", "attention"};

/* Blocks of a prompt, then one token after the other with slack; sinks and a recent part protected. */
START_TEST(tokens_stay_as_defined) {
        struct forgetting serve = {forget, 100, 32, 16, 16, 20, NULL}, paper = {forget, 64, 128, 0, 0, 0, NULL};
        char options[128];

        for (size_t i = 0; i < ARRAY_SIZE(policies); i++) {
                serve.what = paper.what = policies[i];
                snprintf(options, sizeof options,
                         "--evict %s --budget 100 --evict-every 32 --recent-frac 0.2 --decode-tail 60", policies[i]);
                ck_assert_double_lt(worst_error(&serve, options), 2e-5);
                snprintf(options, sizeof options, "--evict %s --budget 64 --profile paper --decode-tail 60",
                         policies[i]);
                ck_assert_double_lt(worst_error(&paper, options), 2e-5);
        }
}
END_TEST

START_TEST(forgetting_changes_the_reference) { /* or the test above would prove nothing */
        static const struct forgetting f = {forget, 100, 32, 16, 16, 20, "keydiff"};

        ck_assert_double_gt(worst_error(&f, "--kv-type f32"), 1e-3);
}
END_TEST

START_TEST(within_the_budget_all_is_exact) {
        static const char *const options[] = {
                "--evict keydiff --budget 300", "--evict keydiff --budget 300 --evict-unit block",
                "--evict attention --budget 301 --profile paper", "--evict random --budget 100%",
                "--evict window --budget 1000 --decode-tail 50", "--evict keydiff --budget 300 --threads 3",
        };

        for (size_t i = 0; i < ARRAY_SIZE(options); i++)
                lossy_check_same("--chunk 256", options[i]);
}
END_TEST

START_TEST(threads_and_variants_do_not_matter) {
        static const char *const methods[] = {
                "--evict keydiff --budget 90", "--evict attention --budget 90 --evict-unit block",
                "--evict random --budget 90 --decode-tail 40", "--evict keydiff --budget 90 --kv-type bf16",
        };
        char more[128];

        for (size_t i = 0; i < ARRAY_SIZE(methods); i++) {
                snprintf(more, sizeof more, "%s --threads 3", methods[i]);
                lossy_check_same(methods[i], more);
                snprintf(more, sizeof more, "%s --variant scalar --threads 2", methods[i]);
                lossy_check_same(methods[i], more);
        }
}
END_TEST

START_TEST(seeds_differ) {
        ck_assert_double_gt(lossy_distance_between("--evict random --budget 90 --evict-seed 1",
                                                   "--evict random --budget 90 --evict-seed 2"), 1e-3);
}
END_TEST

/* 300 tokens are 19 blocks; a budget of 96 with a prompt block of 128 never needs more than 14. */
START_TEST(memory_shrinks) {
        static const char *const units[] = {"head", "block"};
        const double block = 2.0 * 4 * 2 * 16 * 10 * 4;

        for (size_t i = 0; i < ARRAY_SIZE(units); i++) {
                char options[128];
                struct output o;

                snprintf(options, sizeof options,
                         "--evict keydiff --budget 96 --max-tokens 40 --stop \x01 --json --evict-unit %s", units[i]);
                o = lossy_run(options);
                ck_assert_int_eq(o.status, 0);
                ck_assert_double_le(lossy_number(o.out, "kv_bytes_peak"), 14 * block);
                ck_assert_double_le(lossy_number(o.out, "kv_bytes"), 7 * block);
                ck_assert_double_le(lossy_number(o.out, "kept_tokens"), 96 + 16);
                ck_assert_double_ge(lossy_number(o.out, "evicted_tokens"), 200);
        }
}
END_TEST

START_TEST(nonsense_is_refused) {
        static const char *const options[] = {
                "--evict keydiff", "--budget 100", "--evict sometimes --budget 9", "--evict window --budget 0%",
                "--split 1:2:3", "--hshare 1,2", "--critical 1,2,3", "--evict-unit block", "--profile both",
                "--evict reviver --budget 50 --evict-unit block", "--hshare 1,1,1 --critical 1,0,1",
                "--evict reviver --budget 50 --spill none --sketch-delete exact", "--labels 4", "--hshare 1,1,0",
        };

        for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
                struct output o = lossy_run(options[i]);

                ck_assert_msg(o.status == 2, "%s: %d", options[i], o.status);
                ck_assert_uint_gt(strlen(o.err), 10);
                ck_assert_ptr_eq(strchr(o.err, '\n'), strrchr(o.err, '\n'));
        }
}
END_TEST

int main(int argc, char **argv) {
        Suite *s = suite_create("kvlm-budget");
        TCase *c = tcase_create("budget");
        SRunner *runner;
        int failed;

        kvlm_program = argv[1];
        suite_add_tcase(s, c);
        tcase_set_timeout(c, 100);
        tcase_add_checked_fixture(c, lossy_prepare, folder_remove);
        tcase_add_test(c, tokens_stay_as_defined);
        tcase_add_test(c, forgetting_changes_the_reference);
        tcase_add_test(c, within_the_budget_all_is_exact);
        tcase_add_test(c, threads_and_variants_do_not_matter);
        tcase_add_test(c, seeds_differ);
        tcase_add_test(c, memory_shrinks);
        tcase_add_test(c, nonsense_is_refused);
        runner = srunner_create(s);
        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed != 0;
}
