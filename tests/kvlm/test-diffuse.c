/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Denoising without a daemon: results are right at every step, and the same to the last bit however
 * they are computed.
 */

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kvlm/test-diffuse.h"
#include "tests/lib/suite.h"

enum { N = 60, EXTRA = 6 };

static const struct shape small = {4, 24, 6, 2, 10, 37, 283, true, "F32"};
static uint32_t tokens[N];

/* Writes ids: <bos> and tokens that sometimes repeat. */
static void write_tokens(uint32_t n, uint32_t vocab) {
        char text[N * 8], *at = text;

        for (uint32_t i = 0; i < n; i++) {
                tokens[i] = i == 0 ? 1 : 4 + (i * 7919u + i / 40) % (vocab - 4);
                at = print_to(at, "%u ", tokens[i]);
        }
        folder_write_text("ids", text);
}

static const char *number(uint32_t n) {
        char *text = folder_memory(16);

        snprintf(text, 16, "%u", n);
        return text;
}

struct run {
        const float *logits; /* [steps][length][vocab] */
        const char *out;
        size_t size;
};

static struct run run(const struct denoising *d, const char *model,
                      const char *const extra[EXTRA]) {
        const char *mode = d->b == 0 ? "off" : "on";
        struct output o = kvlm("--model", folder_path(model), "--no-share", "--tokens",
                               folder_path("ids"), "--json", "--prefix-tokens", number(d->n_prefix),
                               "--gen-length", number(d->length), "--steps", number(d->steps),
                               "--bicache", mode, "--bicache-depth", number(MAX(d->b, 1)),
                               "--refresh", number(d->delta), "--logits", folder_path("logits"),
                               extra[0], extra[1], extra[2], extra[3], extra[4], extra[5], NULL);
        struct run r = {.out = o.out};

        ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
        r.logits = folder_read("logits", &r.size);
        ck_assert_uint_eq(r.size, (size_t)d->steps * d->length * d->m->shape.vocab * sizeof(float));
        return r;
}

static void check_tokens(const struct denoising *d, const char *out, const uint32_t *expected) {
        const char *at = strstr(out, "\"tokens\": [");

        ck_assert_ptr_nonnull(at);
        at += strlen("\"tokens\": [");
        for (uint32_t i = 0; i < d->length; i++) {
                char *end;

                ck_assert_uint_eq(strtoul(at, &end, 10), expected[i]);
                at = end + 2;
        }
}

/* The largest difference of a logit in any step; also compares the tokens. */
static double worst_error(const struct denoising *d, const char *model) {
        static const char *const none[EXTRA];
        struct denoised expected = reference_denoise(d);
        struct run got = run(d, model, none);
        double worst = 0.0;

        check_tokens(d, got.out, expected.tokens);
        for (size_t i = 0; i < got.size / sizeof(float); i++)
                worst = fmax(worst, fabs((double)got.logits[i] - expected.logits[i]));
        return worst;
}

START_TEST(every_step_is_right) {
        static const struct shape shapes[] = {
                {1, 16, 1, 1, 16, 16, 260, true, "F32"},  {3, 24, 6, 2, 10, 37, 283, true, "F32"},
                {2, 40, 5, 5, 8, 33, 300, false, "F32"},  {2, 32, 4, 1, 32, 48, 270, false, "F16"},
                {2, 33, 3, 3, 14, 65, 277, true, "BF16"},
        };

        for (size_t i = 0; i < ARRAY_SIZE(shapes); i++) {
                struct denoising d = {.tokens = tokens,
                                      .n = 37,
                                      .n_prefix = 20,
                                      .length = 11,
                                      .steps = 4,
                                      .delta = 1};
                char name[16];

                snprintf(name, sizeof name, "model%zu", i);
                d.m = diffusion_model(name, shapes + i, (uint32_t)i + 1);
                write_tokens(d.n, shapes[i].vocab);
                ck_assert_double_lt(worst_error(&d, name), 2e-5);
        }
}
END_TEST

/*
 * Shallow layers are used as stored, deep ones are restarted from the stored state; prefixes end
 * inside a block and at its end.
 */
START_TEST(deep_layers_restart_from_the_stored_state) {
        static const struct {
                uint32_t n_prefix, b, delta;
        } cases[] = {{20, 1, 3}, {20, 2, 1}, {32, 2, 4}, {33, 3, 2},
                     {16, 4, 2}, {1, 1, 2},  {49, 3, 16}};
        struct denoising d = {.tokens = tokens, .n = 50, .length = 9, .steps = 6};

        d.m = diffusion_model("model", &small, 5);
        write_tokens(d.n, small.vocab);
        for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
                d.n_prefix = cases[i].n_prefix;
                d.b = cases[i].b;
                d.delta = cases[i].delta;
                ck_assert_double_lt(worst_error(&d, "model"), 2e-5);
        }
}
END_TEST

/* The whole request may be prefix. */
START_TEST(a_prompt_may_be_all_prefix) {
        struct denoising d = {.tokens = tokens,
                              .n = 32,
                              .n_prefix = 32,
                              .length = 5,
                              .steps = 5,
                              .b = 2,
                              .delta = 2};

        d.m = diffusion_model("model", &small, 6);
        write_tokens(d.n, small.vocab);
        ck_assert_double_lt(worst_error(&d, "model"), 2e-5);
}
END_TEST

/* Sharing is an approximation: if it were exact, these tests could not distinguish the modes. */
START_TEST(modes_differ) {
        static const char *const none[EXTRA], *const naive[EXTRA] = {"--bicache", "naive"};
        struct denoising d = {.tokens = tokens,
                              .n = 50,
                              .n_prefix = 40,
                              .length = 8,
                              .steps = 8,
                              .b = 1,
                              .delta = 4};
        struct run some, all, nothing;

        d.m = diffusion_model("model", &small, 7);
        write_tokens(d.n, small.vocab);
        some = run(&d, "model", none);
        all = run(&d, "model", naive);
        d.b = 0;
        nothing = run(&d, "model", none);
        ck_assert_int_ne(memcmp(some.logits, all.logits, some.size), 0);
        ck_assert_int_ne(memcmp(some.logits, nothing.logits, some.size), 0);
        ck_assert_int_ne(memcmp(all.logits, nothing.logits, some.size), 0);
}
END_TEST

static bool runs_here(const char *variant) {
        return kvlm("--model", folder_path("model"), "--no-share", "--prompts", "/dev/null",
                    "--variant", variant, NULL)
                       .status == 0;
}

START_TEST(bits_do_not_depend_on_how) {
        static const char *const ways[][4] = {
                {"--threads", "2"},
                {"--threads", "3"},
                {"--variant", "scalar"},
                {"--variant", "avx2"},
                {"--variant", "avx512", "--threads", "2"},
        };
        static const char *const types[] = {"f32", "f16", "bf16"};
        struct denoising d = {.tokens = tokens,
                              .n = 50,
                              .n_prefix = 37,
                              .length = 9,
                              .steps = 6,
                              .b = 2,
                              .delta = 3};

        d.m = diffusion_model("model", &small, 8);
        write_tokens(d.n, small.vocab);
        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                const char *const plain[EXTRA] = {"--kv-type", types[t]};
                struct run expected = run(&d, "model", plain);

                for (size_t i = 0; i < ARRAY_SIZE(ways); i++) {
                        const char *const all[EXTRA] = {"--kv-type", types[t],   ways[i][0],
                                                        ways[i][1],  ways[i][2], ways[i][3]};
                        struct run got;

                        if (strcmp(ways[i][0], "--variant") == 0 && !runs_here(ways[i][1]))
                                continue;
                        got = run(&d, "model", all);
                        ck_assert_int_eq(memcmp(got.logits, expected.logits, expected.size), 0);
                }
        }
}
END_TEST

/* ---- documents, tables, errors ---- */

static uint64_t member(const char *line, const char *name) {
        char key[64];
        const char *at;

        snprintf(key, sizeof key, "\"%s\": ", name);
        at = strstr(line, key);
        ck_assert_msg(at, "no %s in %s", name, line);
        return strtoull(at + strlen(key), NULL, 10);
}

static struct output ask(const char *prompts, const char *table) {
        return kvlm("--model", folder_path("model"), "--no-share", "--json", "--gen-length", "10",
                    "--steps", "5", "--bicache", "on", "--prompts",
                    folder_write_text("prompts", prompts), "--bicache-table",
                    folder_write_text("table", table), NULL);
}

/* A document of 40 tokens including <bos>, since each digit is a token. */
#define DOCUMENT "\"document\": \"012345678901234567890123456789012345678\""

START_TEST(the_table_says_how_deep) {
        static const struct {
                const char *table, *prompt;
                uint32_t r, b;
        } cases[] = {
                /* 40 of 50 */
                {"{\"def\": \"INCLUDE_GEN\", \"entries\": [[50, 2], [80, 3]]}", "", 80, 3},
                {"{\"def\": \"INCLUDE_GEN\", \"entries\": [[50, 2], [81, 3]]}", "", 80, 2},
                /* 40 of 40 */
                {"{\"def\": \"PROMPT_ONLY\", \"entries\": [[50, 2], [81, 4]]}", "", 100, 4},
                /* 62.5 */
                {"{\"def\": \"INCLUDE_GEN\", \"entries\": [[62, 2], [63, 3]]}", "01234567890123",
                 62, 2},
                {"{\"def\": \"INCLUDE_GEN\", \"entries\": [[90, 2]]}", "", 80, 1},
                {"{\"def\": \"INCLUDE_GEN\", \"entries\": []}", "", 80, 1},
        };

        diffusion_model("model", &small, 9);
        for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
                char prompts[256];
                struct output o;

                snprintf(prompts, sizeof prompts, "{\"prompt\": \"%s\", " DOCUMENT "}\n",
                         cases[i].prompt);
                o = ask(prompts, cases[i].table);
                ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
                ck_assert_uint_eq(member(o.out, "prefix_tokens"), 40);
                ck_assert_uint_eq(member(o.out, "r"), cases[i].r);
                ck_assert_uint_eq(member(o.out, "b"), cases[i].b);
        }
}
END_TEST

static void check_list(const char *line, const char *name, const double *expected, uint32_t n,
                       double tolerance) {
        char key[32], *end;
        const char *at;

        snprintf(key, sizeof key, "\"%s\": [", name);
        at = strstr(line, key);
        ck_assert_ptr_nonnull(at);
        at += strlen(key);
        for (uint32_t i = 0; i < n; i++, at = end + 2) {
                double value = strtod(at, &end);

                ck_assert_double_eq_tol(value, expected[i], tolerance);
                /* the first layer's keys and values see no other token */
                ck_assert(i > 0 || value == 1.0);
        }
        ck_assert_int_eq(*end, ']');
}

/* Checks one line of a profile, for the prefix of d; returns the next line. */
static const char *check_sample(const struct denoising *d, const char *line, double tolerance) {
        struct similarity expected = reference_similarity(d);
        uint32_t n = d->n + d->length;

        ck_assert_uint_eq(member(line, "r"), lrint(100.0 * d->n_prefix / n));
        ck_assert_uint_eq(member(line, "prefix_tokens"), d->n_prefix);
        ck_assert_uint_eq(member(line, "tokens"), n);
        check_list(line, "sim", expected.token_mean, small.layers, tolerance);
        check_list(line, "sim_flat", expected.flat, small.layers, tolerance);
        return strchr(line, '\n') + 1;
}

static const char *profile(const char *type, const char *option, const char *value) {
        const char *path = folder_path("profile");
        struct output o;
        size_t size;

        remove(path);
        o = kvlm("--model", folder_path("model"), "--no-share", "--tokens", folder_path("ids"),
                 "--prefix-tokens", "33", "--gen-length", "14", "--kv-type", type, "--profile-out",
                 path, option, value, NULL);
        ck_assert_msg(o.status == 0 && !*o.out, "status %d: %s", o.status, o.err);
        return folder_read("profile", &size);
}

/*
 * Both similarities of every layer, end to end, at the request's own prefix and at multiples of a
 * percentage of it.
 */
START_TEST(profiles_are_right) {
        struct denoising d = {.tokens = tokens, .n = 50, .n_prefix = 33, .length = 14};
        const char *line;

        d.m = diffusion_model("model", &small, 12);
        write_tokens(d.n, small.vocab);
        ck_assert_str_eq(check_sample(&d, profile("f32", NULL, NULL), 1e-5), "");
        ck_assert_str_eq(check_sample(&d, profile("f16", NULL, NULL), 1e-3), "");
        line = profile("f32", "--profile-step", "35");
        d.n_prefix = 22; /* of 64: 35 % */
        line = check_sample(&d, line, 1e-5);
        d.n_prefix = 45; /* 70 %; the prompt has no 105 % */
        ck_assert_str_eq(check_sample(&d, line, 1e-5), "");
}
END_TEST

START_TEST(bad_tables_are_refused) {
        static const char *const tables[] = {
                "",
                "[]",
                "{\"entries\": []}",
                "{\"def\": \"OTHER\", \"entries\": []}",
                "{\"def\": \"INCLUDE_GEN\"}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [[1, 0]]}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [[1, 5]]}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [[101, 1]]}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [[1]]}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [[5, 1], [5, 2]]}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [[5, 3], [6, 2]]}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [[1, 2, 3]]}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [[]]}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [7]}",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": [[1, -1]]}",
        };

        diffusion_model("model", &small, 9);
        for (size_t i = 0; i < ARRAY_SIZE(tables); i++) {
                struct output o = ask("{\"prompt\": \"0\"}\n", tables[i]);

                ck_assert_int_eq(o.status, 1);
                ck_assert_ptr_nonnull(strstr(o.err, "table"));
                ck_assert_str_eq(o.out, "");
        }
}
END_TEST

/* A line may have its own length and steps; an impossible value is an error of that line only. */
START_TEST(a_prompt_may_say_how_long) {
        struct output o;

        diffusion_model("model", &small, 10);
        o = ask("{\"prompt\": \"0\", \"gen_length\": 7, \"steps\": 3}\n{\"prompt\": \"0\", "
                "\"gen_length\": 4}\n"
                "{\"prompt\": \"0\", \"gen_length\": 0}\n{\"prompt\": \"0\", \"steps\": "
                "\"5\"}\n{\"prompt\": \"0\"}\n",
                "{\"def\": \"INCLUDE_GEN\", \"entries\": []}");
        ck_assert_int_eq(o.status, 1);
        ck_assert_uint_eq(member(o.out, "generated_tokens"), 7);
        ck_assert_uint_eq(member(o.out, "steps"), 3);
        ck_assert_ptr_nonnull(strstr(o.err, "5 steps for 4 tokens"));
        ck_assert_ptr_nonnull(strstr(o.err, "line 3: \"gen_length\" is not a number"));
        ck_assert_ptr_nonnull(strstr(o.err, "line 4: \"steps\" is not a number"));
        ck_assert_uint_eq(member(strrchr(o.out, '{'), "generated_tokens"), 10);
}
END_TEST

START_TEST(a_model_needs_a_mask) {
        static const char *const configs[] = {
                "\"attention\": \"bidirectional\"",
                "\"attention\": \"bidirectional\", \"mask_token_id\": 283",
                "\"attention\": \"bidirectional\", \"mask_token_id\": \"3\"",
                "\"attention\": \"sideways\"",
                "\"attention\": \"bidirectional\", \"mask_token_id\": -1",
        };

        diffusion_model("model", &small, 11);
        for (size_t i = 0; i < ARRAY_SIZE(configs); i++) {
                char text[512];
                struct output o;

                snprintf(text, sizeof text,
                         "{%s, \"num_hidden_layers\": 4, \"hidden_size\": 24, "
                         "\"num_attention_heads\": 6, "
                         "\"num_key_value_heads\": 2, \"head_dim\": 10, \"intermediate_size\": 37, "
                         "\"vocab_size\": 283, \"tie_word_embeddings\": true}",
                         configs[i]);
                folder_write_text("model/config.json", text);
                o = ask("{\"prompt\": \"0\"}\n", "{\"def\": \"INCLUDE_GEN\", \"entries\": []}");
                ck_assert_int_eq(o.status, 1);
                ck_assert_ptr_nonnull(strstr(o.err, "config.json"));
        }
}
END_TEST

SUITE("kvlm: masked diffusion", kvlm_program = argc > 1 ? argv[1] : "kvlm",
      FIXTURE(folder_make, folder_remove),
      TESTS(every_step_is_right, deep_layers_restart_from_the_stored_state,
            a_prompt_may_be_all_prefix, modes_differ, bits_do_not_depend_on_how,
            the_table_says_how_deep, profiles_are_right, bad_tables_are_refused,
            a_prompt_may_say_how_long, a_model_needs_a_mask))
