/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kvlm/lossy.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"

const struct shape lossy_shape = {4, 24, 4, 2, 10, 37, 283, true, "F32"};
const struct random_model *lossy_model;
uint32_t lossy_tokens[LOSSY_N];

void lossy_prepare(void) {
        char text[LOSSY_N * 8], *at = text;

        folder_make();
        lossy_model = folder_model("model", &lossy_shape, 5);
        for (uint32_t i = 0; i < LOSSY_N; i++) {
                lossy_tokens[i] = i == 0 ? 1 : (i * 7919u + i / 40) % lossy_shape.vocab;
                at = print_to(at, "%u ", lossy_tokens[i]);
        }
        folder_write_text("tokens.txt", text);
}

struct output lossy_run(const char *options) {
        char text[512], *word[24] = {0};
        int n = 0;

        snprintf(text, sizeof text, "%s", options);
        for (char *at = strtok(text, " "); at && n < 23; at = strtok(NULL, " "))
                word[n++] = at;
        return kvlm("--model", folder_path("model"), "--no-share", "--tokens", folder_path("tokens.txt"), word[0],
                    word[1], word[2], word[3], word[4], word[5], word[6], word[7], word[8], word[9], word[10], word[11],
                    word[12], word[13], word[14], word[15], word[16], word[17], word[18], word[19], word[20], word[21],
                    word[22], NULL);
}

const float *lossy_logits(const char *options) {
        char text[512];
        struct output o;
        size_t size;
        float *data;

        snprintf(text, sizeof text, "--logits %s %s", folder_path("logits"), options);
        o = lossy_run(text);
        ck_assert_msg(o.status == 0, "%s: status %d: %s", options, o.status, o.err);
        data = folder_read("logits", &size);
        ck_assert_uint_eq(size, (size_t)LOSSY_N * lossy_shape.vocab * sizeof *data);
        return data;
}

void lossy_check_same(const char *a, const char *b) {
        size_t bytes = (size_t)LOSSY_N * lossy_shape.vocab * sizeof(float);

        ck_assert_msg(memcmp(lossy_logits(a), lossy_logits(b), bytes) == 0, "%s | %s differ", a, b);
}

double lossy_distance(const double *expected, const char *options) {
        const float *got = lossy_logits(options);
        double worst = 0.0;

        for (size_t i = 0; i < (size_t)LOSSY_N * lossy_shape.vocab; i++)
                worst = fmax(worst, isfinite(got[i]) ? fabs((double)got[i] - expected[i]) : INFINITY);
        return worst;
}

double lossy_distance_between(const char *options, const char *others) {
        const float *logits = lossy_logits(others);
        double *expected = folder_memory((size_t)LOSSY_N * lossy_shape.vocab * sizeof *expected);

        for (size_t i = 0; i < (size_t)LOSSY_N * lossy_shape.vocab; i++)
                expected[i] = (double)logits[i];
        return lossy_distance(expected, options);
}

double lossy_number(const char *json, const char *name) {
        char quoted[64];
        const char *at;

        snprintf(quoted, sizeof quoted, "\"%s\": ", name);
        at = strstr(json, quoted);
        ck_assert_msg(at, "no %s in %s", name, json);
        return strtod(at + strlen(quoted), NULL);
}
