/* SPDX-License-Identifier: Apache-2.0 */

/* Logits are right, and the same to the last bit however they are computed. */

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kvlm/folder.h"
#include "tests/kvlm/reference.h"
#include "tests/lib/suite.h"

enum { N = 150 };

static const struct shape small = {3, 24, 6, 2, 10, 37, 283, true, "F32"};
static uint32_t tokens[N];

/* Writes tokens.txt: <bos> and N - 1 tokens that sometimes repeat. */
static const char *write_tokens(uint32_t vocab) {
        char text[N * 8], *at = text;

        for (uint32_t i = 0; i < N; i++) {
                tokens[i] = i == 0 ? 1 : (i * 7919u + i / 40) % vocab;
                at = print_to(at, "%u%c", tokens[i], i % 10 == 9 ? '\n' : ' ');
        }
        return folder_write_text("tokens.txt", text);
}

static const float *logits(const char *model, const char *chunk, const char *threads,
                           const char *variant, const char *kv_type, uint32_t vocab) {
        struct output o = kvlm("--model", folder_path(model), "--no-share", "--tokens",
                               folder_path("tokens.txt"), "--logits", folder_path("logits"),
                               "--chunk", chunk, "--threads", threads, "--kv-type", kv_type,
                               "--variant", variant, NULL);
        size_t size;
        float *data;

        ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
        data = folder_read("logits", &size);
        ck_assert_uint_eq(size, (size_t)N * vocab * sizeof *data);
        return data;
}

static bool runs_here(const char *variant) {
        struct output o = kvlm("--model", folder_path("model"), "--no-share", "--text", "/dev/null",
                               "--variant", variant, "--max-tokens", "0", NULL);

        return o.status == 0;
}

static double worst_error(const struct shape *shape, uint32_t seed, const char *name) {
        const struct random_model *m = folder_model(name, shape, seed);
        struct reference reference = reference_new(m, N, true);
        const float *got;
        double *expected, worst = 0.0;

        write_tokens(shape->vocab);
        got = logits(name, "64", "1", "scalar", "f32", shape->vocab);
        reference_embed(&reference, tokens, 0, N);
        reference_layers(&reference, 0, shape->layers, 0, N, N);
        expected = reference_logits(&reference, 0);
        for (size_t i = 0; i < (size_t)N * shape->vocab; i++)
                worst = fmax(worst, fabs((double)got[i] - expected[i]));
        return worst;
}

START_TEST(logits_are_right) {
        static const struct shape shapes[] = {
                {1, 16, 1, 1, 16, 16, 260, true, "F32"},  {3, 24, 6, 2, 10, 37, 283, true, "F32"},
                {2, 40, 5, 5, 8, 33, 300, false, "F32"},  {2, 32, 4, 1, 32, 48, 270, false, "F16"},
                {2, 33, 3, 3, 14, 65, 277, true, "BF16"},
        };

        for (size_t i = 0; i < ARRAY_SIZE(shapes); i++) {
                char name[16];

                snprintf(name, sizeof name, "model%zu", i);
                ck_assert_double_lt(worst_error(shapes + i, (uint32_t)i + 1, name), 2e-5);
        }
}
END_TEST

static void check_same(const float *expected, const char *chunk, const char *threads,
                       const char *variant, const char *kv_type) {
        const float *got = logits("model", chunk, threads, variant, kv_type, small.vocab);

        if (memcmp(expected, got, (size_t)N * small.vocab * sizeof *got) != 0)
                ck_abort_msg("other bits with chunk %s, %s threads, %s, %s", chunk, threads,
                             variant, kv_type);
}

START_TEST(bits_do_not_depend_on_how_they_are_computed) {
        static const char *const chunks[] = {"1", "7", "64", "256"};
        static const char *const kv_types[] = {"f32",  "f16", "bf16",    "int8",
                                               "int4", "fp8", "fp8_e5m2"};
        static const char *const variants[] = {"scalar", "avx2", "avx512"}, *const threads[] =
                                                                                    {"1", "3"};

        folder_model("model", &small, 7);
        write_tokens(small.vocab);
        for (size_t k = 0; k < ARRAY_SIZE(kv_types); k++) {
                const float *expected = logits("model", "150", "1", "scalar", kv_types[k],
                                               small.vocab);

                for (size_t v = 0; v < ARRAY_SIZE(variants); v++)
                        for (size_t c = 0; c < ARRAY_SIZE(chunks) && runs_here(variants[v]); c++)
                                for (size_t t = 0; t < ARRAY_SIZE(threads); t++)
                                        check_same(expected, chunks[c], threads[t], variants[v],
                                                   kv_types[k]);
        }
}
END_TEST

/* Each type is farther from f32 than the one before, and not farther than its limit. */
START_TEST(fewer_bits_are_close) {
        static const struct {
                const char *kv_type;
                double limit;
        } types[] = {{"f16", 0.02}, {"bf16", 0.1},     {"int8", 0.4},
                     {"fp8", 2.0},  {"fp8_e5m2", 4.0}, {"int4", 4.0}};
        double least = 0.0;
        const float *wide;

        folder_model("model", &small, 7);
        write_tokens(small.vocab);
        wide = logits("model", "64", "1", "scalar", "f32", small.vocab);
        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                const float *got = logits("model", "64", "1", "scalar", types[t].kv_type,
                                          small.vocab);
                double worst = 0.0;

                for (size_t i = 0; i < (size_t)N * small.vocab; i++)
                        worst = fmax(worst, fabs((double)wide[i] - (double)got[i]));
                if (worst <= least || worst > types[t].limit)
                        ck_abort_msg("%s differs by %g", types[t].kv_type, worst);
        }
}
END_TEST

/* Decoding is prefill one token at a time: a text and its continuation as a prompt must agree. */
START_TEST(generation_does_not_depend_on_chunk_or_threads) {
        const char *model, *text;
        char *first = NULL;

        folder_model("model", &small, 9);
        model = folder_path("model");
        text = folder_write_text(
                "text", "the theory abcd \xc3\xa9 of everything and the rest of it, twice over");
        for (int chunk = 1; chunk < 70; chunk += 17) {
                struct output o;
                char number[16];

                snprintf(number, sizeof number, "%d", chunk);
                o = kvlm("--model", model, "--no-share", "--text", text, "--chunk", number,
                         "--threads", chunk % 2 ? "2" : "1", "--max-tokens", "40", "--stop", "",
                         "--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--seed", "5",
                         "--json", NULL);
                ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
                *strstr(o.out, "\"ttft_ms\"") = '\0';
                ck_assert(!first || strcmp(first, o.out) == 0);
                first = o.out;
        }
}
END_TEST

SUITE("kvlm: logits", kvlm_program = argc > 1 ? argv[1] : "kvlm",
      FIXTURE(folder_make, folder_remove),
      TESTS(logits_are_right, bits_do_not_depend_on_how_they_are_computed, fewer_bits_are_close,
            generation_does_not_depend_on_chunk_or_threads))
