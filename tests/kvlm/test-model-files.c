/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Whatever a model's files contain, kvlm works, or exits with status 1 and one line; it never
 * crashes.
 */

#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kvlm/folder.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

static const struct shape tiny = {2, 16, 2, 1, 8, 16, 270, false, "F32"};

static struct output try(void) {
        return kvlm("--model", folder_path("model"), "--no-share", "--text", "/dev/null",
                    "--max-tokens", "2", NULL);
}

static void check_refused(const char *what) {
        struct output o = try();
        char *newline = strchr(o.err, '\n');

        ck_assert_msg(o.status == 1, "%s: status %d, \"%s\"", what, o.status, o.err);
        ck_assert_msg(strncmp(o.err, "kvlm: ", 6) == 0 && newline && newline[1] == '\0',
                      "%s: \"%s\"", what, o.err);
        ck_assert_str_eq(o.out, "");
}

static void make_good(void) {
        struct output o;

        folder_make();
        folder_model("model", &tiny, 1);
        o = try();
        ck_assert_msg(o.status == 0, "the model to be damaged does not run: %s", o.err);
}

/* ---- safetensors ---- */

static void write_weights(uint64_t header_size, const char *header, size_t size, size_t data) {
        char *file = folder_memory(8 + size + data);

        memcpy(file, &header_size, 8);
        memcpy(file + 8, header, size);
        folder_write("model/model.safetensors", file, 8 + size + data);
}

START_TEST(truncated_weights) {
        size_t size;
        char *good = folder_read("model/model.safetensors", &size);

        for (size_t keep = 0; keep < size; keep += keep < 1200 ? 13 : 997) {
                folder_write("model/model.safetensors", good, keep);
                check_refused("truncated weights");
        }
}
END_TEST

START_TEST(impossible_header_lengths) {
        static const uint64_t lengths[] = {0,
                                           1,
                                           9,
                                           1 << 20,
                                           UINT64_C(1) << 32,
                                           UINT64_C(1) << 63,
                                           UINT64_MAX,
                                           UINT64_MAX - 7,
                                           UINT64_MAX - 8};

        for (size_t i = 0; i < ARRAY_SIZE(lengths); i++) {
                write_weights(lengths[i], "{}", 2, 64);
                check_refused("an impossible header length");
        }
}
END_TEST

#define TENSOR(type, shape, offsets) \
        "{\"model.embed_tokens.weight\": {\"dtype\": \"" type "\", \"shape\": " shape \
        ", \"data_offsets\": " offsets "}}"

START_TEST(headers_that_are_not_what_they_should_be) {
        static const char *const headers[] = {
                "",
                "{",
                "}",
                "[]",
                "null",
                "{}",
                "\"a\"",
                "{\"a\"}",
                "{\"a\":}",
                "{\"a\":1,}",
                "{\"a\" 1}",
                "tru",
                "{\"model.embed_tokens.weight\": 1}",
                "{\"model.embed_tokens.weight\": {}}",
                "{\"model.embed_tokens.weight\": {\"dtype\": \"F32\"}}",
                TENSOR("I64", "[270, 16]", "[0, 17280]"),
                TENSOR("F32", "[270]", "[0, 17280]"),
                TENSOR("F32", "[16, 270]", "[0, 17280]"),
                TENSOR("F32", "[270, [16]]", "[0, 17280]"),
                TENSOR("F32", "[270, 16]", "[0, 17279]"),
                TENSOR("F32", "[270, 16]", "[17280, 0]"),
                TENSOR("F32", "[270, 16]", "[-4, 17276]"),
                TENSOR("F32", "[270, 16]", "[99999999, 100017279]"),
                TENSOR("F32", "[270, 16]", "[18446744073709551600, 17264]"),
                TENSOR("F32", "[270, 16]", "[99999999999999999999999, 0]"),
                TENSOR("F32", "[2.7e2, 16]", "[0, 17280]"),
                TENSOR("F32", "[270, 16]", "[0, 17280]"),
        };

        for (size_t i = 0; i < ARRAY_SIZE(headers); i++) {
                write_weights(strlen(headers[i]), headers[i], strlen(headers[i]), 20000);
                check_refused(headers[i]);
        }
}
END_TEST

START_TEST(nesting_without_end) {
        enum { DEPTH = 1 << 20 };
        char *deep = folder_memory(DEPTH);

        memset(deep, '[', DEPTH);
        write_weights(DEPTH, deep, DEPTH, 64);
        check_refused("a million brackets");
        for (size_t i = 0; i + 5 <= DEPTH; i += 5)
                memcpy(deep + i, "{\"a\":", 5);
        write_weights(DEPTH, deep, DEPTH, 64);
        check_refused("objects in objects");
        folder_write("model/config.json", deep, DEPTH);
        check_refused("a configuration of objects in objects");
}
END_TEST

/*
 * Any byte of the header may have any value. Most changes are detected; some do no harm (a name in
 * the metadata).
 */
START_TEST(damaged_bytes) {
        size_t size;
        char *good = folder_read("model/model.safetensors", &size);
        struct random dice = {7};

        for (int i = 0; i < 300; i++) {
                char *bad = folder_memory(size);
                struct output o;

                memcpy(bad, good, size);
                for (int n = 0; n < 3; n++) {
                        bad[random_below(&dice, 1500)] = (char)random_below(&dice, 256);
                }
                folder_write("model/model.safetensors", bad, size);
                o = try();
                ck_assert_msg(o.status == 0 || o.status == 1, "status %d: %s", o.status, o.err);
        }
}
END_TEST

/* ---- config.json ---- */

START_TEST(impossible_configurations) {
        static const char *const members[] = {
                "\"num_hidden_layers\": 0",
                "\"num_hidden_layers\": 3",
                "\"num_hidden_layers\": -1",
                "\"num_hidden_layers\": 99999999999999999999",
                "\"num_hidden_layers\": \"2\"",
                "\"num_hidden_layers\": null",
                "\"hidden_size\": 4294967312",
                "\"hidden_size\": 15",
                "\"hidden_size\": 1e9",
                "\"hidden_size\": []",
                "\"num_attention_heads\": 4097",
                "\"num_attention_heads\": 0",
                "\"num_key_value_heads\": 3",
                "\"head_dim\": 7",
                "\"head_dim\": 0",
                "\"head_dim\": 1000000",
                "\"vocab_size\": 1",
                "\"vocab_size\": 271",
                "\"intermediate_size\": 4194305",
                "\"rms_norm_eps\": -1",
                "\"rms_norm_eps\": \"x\"",
                "\"rope_theta\": 0",
                "\"rope_theta\": 1e999",
                "\"rope_theta\": 1e",
                "\"max_position_embeddings\": 0",
                "\"model_type\": \"bert\"",
                "\"model_type\": 4",
                "\"hidden_act\": \"gelu\"",
                "\"attention_bias\": true",
                "\"rope_scaling\": {\"rope_type\": \"yarn\"}",
                "\"mlp_bias\": true",
        };
        size_t size;
        char *good = folder_read("model/config.json", &size);

        for (size_t i = 0; i < ARRAY_SIZE(members); i++) {
                char *bad = folder_memory(size + 128);

                /* the first of two equal members is used */
                snprintf(bad, size + 128, "{%s, %s", members[i], good + 1);
                folder_write_text("model/config.json", bad);
                check_refused(members[i]);
        }
        folder_write_text("model/config.json", "");
        check_refused("an empty configuration");
        folder_write_text("model/config.json", "{\"a\": \"\\");
        check_refused("an open string");
}
END_TEST

/* ---- vocab.txt ---- */

START_TEST(impossible_vocabularies) {
        size_t size;
        char *good = folder_read("model/vocab.txt", &size), *bad = folder_memory(size + 100000);

        for (size_t keep = 0; keep < size / 2; keep += 211) {
                folder_write("model/vocab.txt", good, keep);
                check_refused("a truncated vocabulary");
        }
        static const char *const lines[] = {"\\", "\\x", "\\x1", "\\xg0", "\\q", "", "\\x4\\n"};
        for (size_t i = 0; i < ARRAY_SIZE(lines); i++) {
                snprintf(bad, size + 100, "%s%s\n", good, lines[i]);
                folder_write_text("model/vocab.txt", bad);
                check_refused(lines[i]);
        }
        memcpy(bad, good, size);
        memset(bad + size, 'a', 100000);
        folder_write("model/vocab.txt", bad, size + 100000);
        check_refused("a piece of 100,000 bytes");
        folder_vocabulary("model", 271);
        check_refused("more pieces than the model knows");
        memset(bad, '\n', 100000);
        folder_write("model/vocab.txt", bad, 100000);
        check_refused("a vocabulary of empty lines");
}
END_TEST

/* ---- command line and missing files ---- */

START_TEST(missing_files) {
        static const char *const names[] = {"model/model.safetensors", "model/config.json",
                                            "model/vocab.txt"};

        for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
                size_t size;
                void *good = folder_read(names[i], &size);

                ck_assert_int_eq(remove(folder_path(names[i])), 0);
                check_refused(names[i]);
                folder_write(names[i], good, size);
        }
}
END_TEST

static void check_usage(struct output o) {
        ck_assert_msg(o.status == 2, "status %d: %s", o.status, o.err);
        ck_assert_str_eq(o.out, "");
        ck_assert_msg(strncmp(o.err, "kvlm: ", 6) == 0 && strchr(o.err, '\n')[1] == '\0', "\"%s\"",
                      o.err);
}

START_TEST(wrong_usage) {
        const char *model = folder_path("model");

        check_usage(kvlm("--no-share", NULL));
        check_usage(kvlm("--model", NULL));
        check_usage(kvlm("--model", model, NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--prompts", "-", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--chunk", "0", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--chunk", "-1", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--chunk", "1x", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--max-tokens", "", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--temperature", "nan", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--kv-type", "f8", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--space", "a/b", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--logits", "x", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "--frobnicate", NULL));
        check_usage(kvlm("--model", model, "--text", "-", "prompt", NULL));
        ck_assert_int_eq(kvlm("--help", NULL).status, 0);
        ck_assert_int_eq(kvlm("--version", NULL).status, 0);
}
END_TEST

START_TEST(wrong_token_files) {
        static const char *const files[] = {"270", "-1", "1 2 x", "1e3", "99999999999999999999",
                                            "",    "\n"};

        for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
                struct output o = kvlm("--model", folder_path("model"), "--no-share", "--tokens",
                                       folder_write_text("tokens", files[i]), NULL);

                ck_assert_msg(o.status == 1, "\"%s\": status %d", files[i], o.status);
                ck_assert_ptr_eq(strchr(o.err, '\n') + 1, o.err + strlen(o.err));
        }
}
END_TEST

SUITE("kvlm: hostile files", kvlm_program = argc > 1 ? argv[1] : "kvlm",
      FIXTURE(make_good, folder_remove),
      TESTS(truncated_weights, impossible_header_lengths, headers_that_are_not_what_they_should_be,
            nesting_without_end, damaged_bytes, impossible_configurations, impossible_vocabularies,
            missing_files, wrong_usage, wrong_token_files))
