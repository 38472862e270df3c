/* SPDX-License-Identifier: Apache-2.0 */

/* HShare in kvlm: which tokens a decoding query sees, and who chooses how often. */

#include <check.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kvlm/lossy.h"

enum { N = LOSSY_N, TAIL = 101, PROMPT = N - TAIL };

/* H7, and n <= N_c: nothing is left out, not even a bit. */
START_TEST(all_critical_is_dense) {
        lossy_check_same("--chunk 256", "--hshare 1,1,1 --critical 100,100,100 --decode-tail 101");
        lossy_check_same("--chunk 256", "--hshare 1/2,1/2,1/4 --critical 4,8,288 --dense-layers 0 --decode-tail 101");
        lossy_check_same("--chunk 256", "--hshare 1,1,1 --critical 1,1,1 --dense-layers 4 --decode-tail 101");
}
END_TEST

/*
 * Without a middle, what is seen is known: the first tokens, what was recent when the group's first query chose, and
 * all that came since. The query of token n, the next one, is what becomes visible after n tokens.
 */
static void window(const struct forgetting *f, uint32_t n, const double *k, uint32_t stride, uint32_t dim,
                   const double *mass, bool *visible) {
        if (n < PROMPT || (n - PROMPT) % f->every != 0 || n + 1 <= f->sinks + f->recent)
                return;
        for (uint32_t i = f->sinks; i < n + 1 - f->recent; i++)
                visible[i] = false;
}

/* H8: the newest token is always attended, and no token that came since the choice is missing. */
START_TEST(H8_the_window_grows_between_choices) {
        static const struct {
                struct forgetting f;
                const char *options;
        } cases[] = {
                {{window, 0, 1, 0, 16, 32, "every query"}, "--hshare 1,1,1 --critical 16,32,0"},
                {{window, 0, 4, 0, 16, 32, "one of four"}, "--hshare 1,1,1/4 --critical 16,32,0"},
                {{window, 0, 7, 0, 3, 1, "one of seven"}, "--hshare 1/2,1/2,1/7 --critical 3,1,0 --share-by greedy"},
        };

        for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
                const double *expected = reference_logits_forgetting(lossy_model, lossy_tokens, N, &cases[i].f);
                char options[256];

                snprintf(options, sizeof options, "%s --dense-layers 0 --decode-tail 101", cases[i].options);
                ck_assert_double_lt(lossy_distance(expected, options), 5e-5);
                ck_assert_double_gt(lossy_distance(expected, "--chunk 256"), 1e-3);
        }
}
END_TEST

/* A group's later queries see what the first one chose: with one query a group the same as without sharing. */
START_TEST(a_ratio_of_one_shares_nothing) {
        static const char once[] = "--hshare 1,1,1 --critical 8,16,24 --dense-layers 0 --decode-tail 101";
        static const char star[] = "--hshare 1,1,1 --critical 8,16,24 --dense-layers 0 --decode-tail 101 "
                                   "--share-by star";
        static const char shared[] = "--hshare 1/2,1/2,1/2 --critical 8,16,24 --dense-layers 0 --decode-tail 101";

        lossy_check_same(once, star);
        ck_assert_double_gt(lossy_distance_between(once, shared), 1e-4);
        ck_assert_double_gt(lossy_distance_between(once, "--chunk 256"), 1e-4);
}
END_TEST

/* More critical tokens, less error: what is chosen matters more than what is not. */
START_TEST(chosen_tokens_are_worth_more) {
        static const char format[] = "--hshare 1,1,1 --critical 4,16,%u --labels 10 --dense-layers 0 --decode-tail 101";
        char few[128], many[128];

        snprintf(few, sizeof few, format, 4);
        snprintf(many, sizeof many, format, 160);
        ck_assert_double_lt(lossy_distance_between("--chunk 256", many), lossy_distance_between("--chunk 256", few));
}
END_TEST

START_TEST(given_channels_are_used) {
        static const char all[] = "--hshare 1,1,1 --critical 4,16,24 --decode-tail 101 --labels 10";
        static const char two[] = "--hshare 1,1,1 --critical 4,16,24 --decode-tail 101 --labels 0,1";
        struct output o;

        lossy_check_same(all, "--hshare 1,1,1 --critical 4,16,24 --decode-tail 101 --labels 0,1,2,3,4,5,6,7,8,9");
        ck_assert_double_gt(lossy_distance_between(all, two), 0.0);
        o = lossy_run("--hshare 1,1,1 --labels 0,10");
        ck_assert_int_ne(o.status, 0);
        ck_assert_ptr_nonnull(strstr(o.err, "--labels"));
}
END_TEST

/* H12: (n_l - k_l)(n_h - k_h) ceil(n_q / a) */
START_TEST(H12_choices_are_counted) {
        static const struct {
                const char *ratios, *dense;
                double expected; /* over 64 queries, 4 layers, 2 heads */
        } cases[] = {
                {"1,1,1", "0", 4 * 2 * 64},       {"1/2,1,1", "0", 2 * 2 * 64},  {"1/2,1/2,1/2", "0", 2 * 1 * 32},
                {"1/4,1/2,1/5", "0", 1 * 1 * 13}, {"1,1/2,1/64", "1", 3 * 1 * 1}, {"1,1,1", "4", 0},
        };

        for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
                char options[256];
                struct output o;

                snprintf(options, sizeof options,
                         "--hshare %s --dense-layers %s --critical 4,16,24 --decode-tail 64 --json --max-tokens 0",
                         cases[i].ratios, cases[i].dense);
                o = lossy_run(options);
                ck_assert_int_eq(o.status, 0);
                ck_assert_double_eq(lossy_number(o.out, "selections"), cases[i].expected);
        }
}
END_TEST

START_TEST(threads_and_variants_do_not_matter) {
        static const char *const methods[] = {
                "--hshare 1/2,1/2,1/2 --critical 4,16,24 --decode-tail 101",
                "--hshare 3/4,1,1/4 --critical 4,16,24 --decode-tail 101 --kv-type f16",
                "--hshare 3/4,1,1/4 --critical 4,16,24 --decode-tail 101 --evict keydiff --budget 120",
                "--hshare 3/4,1,1/4 --critical 4,16,24 --decode-tail 101 --evict reviver --budget 120",
        };
        char more[256];

        for (size_t i = 0; i < ARRAY_SIZE(methods); i++) {
                snprintf(more, sizeof more, "%s --threads 3", methods[i]);
                lossy_check_same(methods[i], more);
                snprintf(more, sizeof more, "%s --variant scalar --threads 2 --chunk 37", methods[i]);
                lossy_check_same(methods[i], more);
        }
}
END_TEST

int main(int argc, char **argv) {
        Suite *s = suite_create("kvlm-hshare");
        TCase *c = tcase_create("hshare");
        SRunner *runner;
        int failed;

        kvlm_program = argc > 1 ? argv[1] : "kvlm";
        suite_add_tcase(s, c);
        tcase_set_timeout(c, 100);
        tcase_add_checked_fixture(c, lossy_prepare, folder_remove);
        tcase_add_test(c, all_critical_is_dense);
        tcase_add_test(c, H8_the_window_grows_between_choices);
        tcase_add_test(c, a_ratio_of_one_shares_nothing);
        tcase_add_test(c, chosen_tokens_are_worth_more);
        tcase_add_test(c, given_channels_are_used);
        tcase_add_test(c, H12_choices_are_counted);
        tcase_add_test(c, threads_and_variants_do_not_matter);
        runner = srunner_create(s);
        srunner_run_all(runner, CK_ENV);
        failed = srunner_ntests_failed(runner);
        srunner_free(runner);
        return failed != 0;
}
