/* SPDX-License-Identifier: Apache-2.0 */

/*
 * kvlm on a GPU: logits equal the CPU's within fp32 accuracy, and are the same to the last bit with
 * and without sharing, however they are computed.
 */

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kvlm/gpu.h"
#include "tests/lib/suite.h"

static const float *private_logits(const char *device, const char *kv_type, const char *matmul,
                                   const char *chunk, size_t *n) {
        struct output o = kvlm("--model", folder_path("model"), "--no-share", "--tokens",
                               folder_path("ids"), "--logits", folder_path("logits"), "--device",
                               device, "--kv-type", kv_type, "--matmul", matmul, "--chunk", chunk,
                               NULL);

        return scene_logits(o, "logits", n);
}

static void assert_close(const float *a, const float *b, size_t n, double most, const char *what) {
        double worst = 0;

        for (size_t i = 0; i < n; i++)
                worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
        ck_assert_msg(worst < most, "%s: logits differ by %g", what, worst);
}

/* A key whose last bit rounds to a different number, or code, differs by the unit of that number. */
START_TEST(logits_are_those_of_the_processor) {
        static const struct {
                const char *kv_type, *matmul;
                double most;
        } cases[] = {{"f32", "f32", 2e-5},     {"f16", "f32", 4e-3},  {"bf16", "f32", 3e-2},
                     {"int8", "f32", 1e-2},    {"int4", "f32", 5e-2}, {"fp8", "f32", 5e-2},
                     {"fp8_e5m2", "f32", 0.1}, {"f32", "tf32", 2e-2}, {"bf16", "bf16", 0.2}};

        for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
                size_t n, m;
                const float *cpu = private_logits("cpu", cases[i].kv_type, "f32", "64", &n);
                const float *gpu = private_logits("cuda", cases[i].kv_type, cases[i].matmul, "64",
                                                  &m);

                ck_assert_uint_eq(n, m);
                assert_close(cpu, gpu, n, cases[i].most, cases[i].kv_type);
        }
}
END_TEST

START_TEST(logits_of_the_real_model_are_those_of_the_processor) {
        const char *model = getenv("KVLM_MODEL"), *devices[] = {"cpu", "cuda"};
        const float *logits[2];
        size_t n = 0, m = 0;

        if (!model)
                return;
        folder_write_text("short", "1 300 301 302 40 41 42 300 301 700 5 6 7 8 9 300 301 302 40");
        for (int i = 0; i < 2; i++)
                logits[i] = scene_logits(kvlm("--model", model, "--no-share", "--tokens",
                                              folder_path("short"), "--logits",
                                              folder_path(devices[i]), "--device", devices[i],
                                              NULL),
                                         devices[i], i == 0 ? &n : &m);
        ck_assert_uint_eq(n, m);
        /* logits are up to about 20 */
        assert_close(logits[0], logits[1], n, 1e-3, "the committed model");
}
END_TEST

START_TEST(bits_do_not_depend_on_chunks) {
        static const char *const chunks[] = {"1", "7", "48"}, *const types[] = {"f32", "bf16",
                                                                                "int4", "fp8"};

        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                size_t n, m;
                const float *whole = private_logits("cuda", types[t], "f32", "256", &n);

                for (size_t i = 0; i < ARRAY_SIZE(chunks); i++) {
                        const float *cut = private_logits("cuda", types[t], "f32", chunks[i], &m);

                        ck_assert_uint_eq(n, m);
                        ck_assert_msg(memcmp(whole, cut, n * sizeof *cut) == 0,
                                      "other bits with chunk %s, %s", chunks[i], types[t]);
                }
        }
}
END_TEST

/* ---- sharing ---- */

START_TEST(logits_are_the_same_from_the_pool) {
        static const char *const types[] = {"f32", "bf16", "int4", "fp8"},
                                 *const names[] = {"private", "computed", "reused"};
        const char *model = folder_path("model"), *socket = scene_socket();

        scene_daemon();
        for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
                const float *logits[3];
                size_t n[3];

                for (int i = 0; i < 3; i++) {
                        struct output o = kvlm("--model", model, "--socket", socket, "--tokens",
                                               folder_path("ids"), "--json", "--kv-type", types[t],
                                               "--space", types[t], "--logits",
                                               folder_path(names[i]),
                                               i == 0 ? "--no-share" : "--device=cuda",
                                               i == 0 ? "--device=cuda" : NULL, NULL);

                        logits[i] = scene_logits(o, names[i], n + i);
                        ck_assert_uint_eq(scene_sum(o.out, "reused_tokens"),
                                          i == 2 ? SCENE_TOKENS / 16 * 16 : 0);
                        ck_assert_uint_eq(scene_sum(o.out, "\"refused"), 0);
                }
                ck_assert_mem_eq(logits[0], logits[1], n[0] * sizeof(float));
                ck_assert_mem_eq(logits[0], logits[2], n[0] * sizeof(float));
        }
        scene_assert_clean();
}
END_TEST

/* Bytes and answers are compared with those that each process computes alone. */
START_TEST(many_at_once_agree) {
        static const char *const names[] = {"a", "b", "c"};
        pid_t all[ARRAY_SIZE(names)];
        const char *expected;
        struct output last;
        size_t size;

        scene_prompts();
        expected = scene_texts(scene_ask("--no-share", "--device=cuda"));
        scene_daemon();
        for (size_t i = 0; i < ARRAY_SIZE(names); i++)
                all[i] = scene_ask_in_background(names[i]);
        for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
                ck_assert_int_eq(wait_status(all[i]), 0);
                scene_assert_answers((struct output){0, folder_read(names[i], &size), ""},
                                     expected);
        }
        last = scene_ask("--verify", NULL);
        scene_assert_answers(last, expected);
        ck_assert_uint_gt(scene_sum(last.out, "reused_tokens"), 100);
        ck_assert_uint_gt(scene_sum(last.out, "verified_bytes"), 0);
        ck_assert_uint_eq(scene_sum(last.out, "\"refused"), 0);
        scene_assert_clean();
}
END_TEST

/*
 * Tokens decoded with --decode fast have other bits than a prompt, and are not published; with
 * --decode exact they have the same bits, and are published.
 */
START_TEST(what_is_generated_is_published_if_it_is_exact) {
        const char *model = folder_path("model"), *socket;
        uint64_t shared[2];

        scene_daemon();
        socket = scene_socket();
        for (int i = 0; i < 2; i++) {
                struct output o = kvlm("--model", model, "--socket", socket, "--tokens",
                                       folder_path("ids"), "--stop", "", "--max-tokens", "12",
                                       "--json", "--decode", i == 0 ? "fast" : "exact", NULL);

                ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
                shared[i] = scene_sum(o.out, "shared_blocks");
        }
        ck_assert_uint_eq(shared[0], SCENE_TOKENS / 16);
        ck_assert_uint_eq(shared[1], (SCENE_TOKENS + 11) / 16);
        scene_assert_clean();
}
END_TEST

/* ---- errors ---- */

START_TEST(errors_are_one_line) {
        const char *model = folder_path("model"), *ids = folder_path("ids");

        scene_assert_refused(kvlm("--model", model, "--no-share", "--tokens", ids, "--device",
                                  "cuda:63", NULL),
                             "");
        scene_assert_refused(kvlm("--model", model, "--no-share", "--tokens", ids, "--device",
                                  "cuda", "--sequence", "on", NULL),
                             "methods run on the CPU");
        ck_assert_int_eq(kvlm("--model", model, "--tokens", ids, "--device", "tpu", NULL).status,
                         2);
        if (!scene_stand_in())
                return;
        setenv("LD_LIBRARY_PATH", "/nonexistent", 1);
        scene_assert_refused(kvlm("--model", model, "--no-share", "--tokens", ids, "--device",
                                  "cuda", NULL),
                             "no CUDA driver");
}
END_TEST

START_TEST(the_processor_does_not_share_a_gpus_pool) {
        struct output o;

        scene_prompts();
        scene_daemon();
        o = scene_ask("--device=cpu", NULL);
        ck_assert_ptr_nonnull(strstr(o.err, "pool is in GPU memory"));
        ck_assert_str_eq(scene_texts(o), scene_texts(scene_ask("--device=cpu", "--no-share")));
}
END_TEST

SUITE("kvlm: logits on a GPU", scene_begin(argc, argv), FIXTURE(scene_set_up, scene_tear_down),
      TESTS(logits_are_those_of_the_processor, logits_of_the_real_model_are_those_of_the_processor,
            bits_do_not_depend_on_chunks, logits_are_the_same_from_the_pool, many_at_once_agree,
            what_is_generated_is_published_if_it_is_exact, errors_are_one_line,
            the_processor_does_not_share_a_gpus_pool))
