/* SPDX-License-Identifier: Apache-2.0 */

/* Eviction to a budget: what stays is what the definition says, and what is not evicted is exact. */

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kvlm/folder.h"

enum { N = 300, TAIL = 60 };

static const struct shape small = {2, 24, 4, 2, 10, 37, 283, true, "F32"};
static const struct random_model *model;
static uint32_t tokens[N];

static void prepare(void) {
        char text[N * 8], *at = text;

        folder_make();
        model = folder_model("model", &small, 5);
        for (uint32_t i = 0; i < N; i++) {
                tokens[i] = i == 0 ? 1 : (i * 7919u + i / 40) % small.vocab;
                at = print_to(at, "%u ", tokens[i]);
        }
        folder_write_text("tokens.txt", text);
}

/* Logits of all tokens, with options as one string. */
static const float *logits(const char *options) {
        char text[256], *word[16] = {0};
        struct output o;
        size_t size;
        float *data;
        int n = 0;

        snprintf(text, sizeof text, "%s", options);
        for (char *at = strtok(text, " "); at && n < 15; at = strtok(NULL, " "))
                word[n++] = at;
        o = kvlm("--model", folder_path("model"), "--no-share", "--tokens", folder_path("tokens.txt"), "--logits",
                 folder_path("logits"), word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7], word[8],
                 word[9], word[10], word[11], word[12], word[13], word[14], NULL);
        ck_assert_msg(o.status == 0, "%s: status %d: %s", options, o.status, o.err);
        data = folder_read("logits", &size);
        ck_assert_uint_eq(size, (size_t)N * small.vocab * sizeof *data);
        return data;
}

static void check_same(const char *a, const char *b) {
        ck_assert_msg(memcmp(logits(a), logits(b), (size_t)N * small.vocab * sizeof(float)) == 0, "%s | %s differ", a, b);
}

/* ---- the oracle ---- */

static double length(const double *x, uint32_t n) {
        double squares = 0.0;

        for (uint32_t i = 0; i < n; i++)
                squares += x[i] * x[i];
        return sqrt(squares);
}

/* methods.md, appendix A, over the visible tokens. */
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
        const double *expected = reference_logits_forgetting(model, tokens, N, f);
        const float *got = logits(options);
        double worst = 0.0;

        for (size_t i = 0; i < (size_t)N * small.vocab; i++)
                worst = fmax(worst, fabs((double)got[i] - expected[i]));
        return worst;
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
                check_same("--chunk 256", options[i]);
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
                check_same(methods[i], more);
                snprintf(more, sizeof more, "%s --variant scalar --threads 2", methods[i]);
                check_same(methods[i], more);
        }
}
END_TEST

START_TEST(seeds_differ) {
        const float *a = logits("--evict random --budget 90 --evict-seed 1");

        ck_assert(memcmp(a, logits("--evict random --budget 90 --evict-seed 2"),
                         (size_t)N * small.vocab * sizeof *a) != 0);
}
END_TEST

static double number(const char *json, const char *name) {
        char quoted[64];
        const char *at;

        snprintf(quoted, sizeof quoted, "\"%s\": ", name);
        at = strstr(json, quoted);
        ck_assert_msg(at, "no %s in %s", name, json);
        return strtod(at + strlen(quoted), NULL);
}

/* 300 tokens are 19 blocks; a budget of 96 with a prompt block of 128 never needs more than 14. */
START_TEST(memory_shrinks) {
        static const char *const units[] = {"head", "block"};
        const double block = 2.0 * 2 * 2 * 16 * 10 * 4;

        for (size_t i = 0; i < ARRAY_SIZE(units); i++) {
                struct output o = kvlm("--model", folder_path("model"), "--no-share", "--tokens",
                                       folder_path("tokens.txt"), "--evict", "keydiff", "--budget", "96", "--evict-unit",
                                       units[i], "--max-tokens", "40", "--stop", "", "--json", NULL);

                ck_assert_int_eq(o.status, 0);
                ck_assert_double_le(number(o.out, "kv_bytes_peak"), 14 * block);
                ck_assert_double_le(number(o.out, "kv_bytes"), 7 * block);
                ck_assert_double_le(number(o.out, "kept_tokens"), 96 + 16);
                ck_assert_double_ge(number(o.out, "evicted_tokens"), 200);
        }
}
END_TEST

START_TEST(nonsense_is_refused) {
        static const char *const options[][4] = {
                {"--evict", "keydiff"}, {"--budget", "100"}, {"--evict", "sometimes", "--budget", "9"},
                {"--evict", "window", "--budget", "0%"}, {"--split", "1:2:3"}, {"--hshare", "1,2"},
                {"--critical", "1,2,3"}, {"--evict-unit", "block"},
        };

        for (size_t i = 0; i < ARRAY_SIZE(options); i++) {
                struct output o = kvlm("--model", folder_path("model"), "--no-share", "--tokens",
                                       folder_path("tokens.txt"), options[i][0], options[i][1], options[i][2],
                                       options[i][3], NULL);

                ck_assert_int_eq(o.status, 2);
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
        tcase_add_checked_fixture(c, prepare, folder_remove);
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
