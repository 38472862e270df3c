/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Encoding takes the longest piece, decoding returns the bytes, and JSON carries them in and out.
 */

#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tests/kvlm/folder.h"
#include "tests/lib/oracle.h"
#include "tests/lib/suite.h"

static const struct shape tiny = {1, 16, 1, 1, 16, 16, 300, true, "F32"};

static const char *tokenize(const void *bytes, size_t size) {
        struct output o = kvlm("--model", folder_path("model"), "--tokenize",
                               folder_write("text", bytes, size), NULL);

        ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
        return o.out;
}

START_TEST(the_longest_piece_matches) {
        static const struct {
                const char *text, *ids;
        } cases[] = {
                {"", "\n"},
                {" the", "260\n"},
                {" theory", "272\n"},        /* longer than " the" */
                {" theor", "260 115 118\n"}, /* back to the last piece that ended */
                {"the", "261\n"},
                {"abc", "269 103\n"}, /* "abcd" began, "ab" ended */
                {"abcd", "270\n"},
                {"\n\n\n", "266 265\n"},
                {"\\", "267\n"},
                {"\t", "268\n"},
                {"\xc3\xa9", "271\n"},
                {"\xc3", "199\n"},
                {"\xff\xfe\xff", "274 259\n"},
                {"<bos>", "64 102 115 119 66\n"}, /* control tokens are not text */
        };

        folder_model("model", &tiny, 1);
        for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
                ck_assert_str_eq(tokenize(cases[i].text, strlen(cases[i].text)), cases[i].ids);
        ck_assert_str_eq(tokenize("\0", 1), "273\n");
}
END_TEST

/* The bytes of an id in the test's vocabulary, from the file. */
static size_t piece_bytes(uint32_t id, char *to) {
        static const char *const pieces[] = {" the",    "the", "th",       "e",  " ",    "\n",
                                             "\n\n",    "\\",  "\t",       "ab", "abcd", "\xc3\xa9",
                                             " theory", "\0",  "\xFF\xfe", "0"};

        if (id < 260) {
                *to = (char)(id - 4);
                return 1;
        }
        if (id - 260 >= ARRAY_SIZE(pieces))
                return (size_t)sprintf(to, "piece%u", id);
        memcpy(to, pieces[id - 260], MAX(strlen(pieces[id - 260]), 1));
        return MAX(strlen(pieces[id - 260]), 1);
}

START_TEST(every_text_comes_back) {
        char text[400], back[4000];
        struct random dice = {1};

        folder_model("model", &tiny, 1);
        for (int round = 0; round < 60; round++) {
                size_t size = (size_t)round * 5, n = 0;
                char *ids, *end;

                /* any bytes, or mostly characters of pieces */
                for (size_t i = 0; i < size; i++) {
                        uint32_t byte = random_below(&dice, 256);

                        text[i] = round % 2 ? (char)byte : "the abcdory\n\\0piece2789"[byte % 23];
                }
                ids = (char *)tokenize(text, size);
                for (end = ids; *ids != '\n' && *ids; ids = end)
                        n += piece_bytes((uint32_t)strtoul(ids, &end, 10), back + n);
                ck_assert_uint_eq(n, size);
                ck_assert_int_eq(memcmp(text, back, size), 0);
        }
}
END_TEST

/* A prompt is the same in whichever way it is escaped. */
START_TEST(prompts_are_json) {
        static const char *const same[] = {
                "{\"prompt\": \"the \\u00e9\\n\\\"\\\\ \xf0\x9f\xa6\x89\"}",
                "{\"other\": [1, {\"prompt\": 2}], "
                "\"prompt\": \"\\u0074he\\u0020\\u00E9\\u000a\\\"\\u005C \\uD83E\\udd89\"}",
        };
        const char *text = folder_write_text("text", "the \xc3\xa9\n\"\\ \xf0\x9f\xa6\x89"), *model;
        struct output expected;

        folder_model("model", &tiny, 3);
        model = folder_path("model");
        expected = kvlm("--model", model, "--no-share", "--text", text, "--json", "--stop", "",
                        NULL);
        ck_assert_int_eq(expected.status, 0);
        *strstr(expected.out, "\"ttft_ms\"") = '\0';
        for (size_t i = 0; i < ARRAY_SIZE(same); i++) {
                const char *prompts = folder_write_text("prompts", same[i]);
                struct output o = kvlm("--model", model, "--no-share", "--prompts", prompts,
                                       "--json", "--stop", "", NULL);

                ck_assert_msg(o.status == 0, "status %d: %s", o.status, o.err);
                *strstr(o.out, "\"ttft_ms\"") = '\0';
                ck_assert_str_eq(o.out, expected.out);
        }
}
END_TEST

/* A bad line is reported separately; the lines around it are answered. */
START_TEST(bad_prompts_do_not_stop_good_ones) {
        const char *prompts =
                folder_write_text("prompts", "{\"prompt\": \"the\"}\n\nnonsense\n{\"prompt\": 7}\n"
                                             "{\"prompt\": \"\\ud83e\"}\n{\"prompt\": \"\\q\"}\n");
        struct output o;
        int answers = 0, errors = 0;

        folder_model("model", &tiny, 3);
        o = kvlm("--model", folder_path("model"), "--no-share", "--prompts", prompts, "--json",
                 NULL);
        ck_assert_int_eq(o.status, 1);
        for (const char *line = o.out; *line; line = strchr(line, '\n') + 1) {
                answers += strncmp(line, "{\"text\": ", 9) == 0;
                errors += strncmp(line, "{\"error\": ", 10) == 0;
        }
        ck_assert_int_eq(answers, 1);
        ck_assert_int_eq(errors, 4); /* half a surrogate pair is not text, either */
}
END_TEST

SUITE("kvlm: tokenizer", kvlm_program = argc > 1 ? argv[1] : "kvlm",
      FIXTURE(folder_make, folder_remove),
      TESTS(the_longest_piece_matches, every_text_comes_back, prompts_are_json,
            bad_prompts_do_not_stop_good_ones))
