/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_LINE_H
#define KVD_TESTS_GPU_LINE_H

/*
 * One result, one line of JSON on standard output:
 *
 *      {"check": "T1", "question": "...", "answer": "...", "ok": true, "numbers": {...}, "driver": "..."}
 *
 * ok: is the answer the one that kvd relies on? null: kvd relies on no answer, or the question
 * could not be asked (the answer says why). driver names the driver that answered, so that a
 * stand-in's line cannot be taken for a GPU's.
 */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum verdict { NO, YES, OPEN_QUESTION };

struct line {
        FILE *to; /* collects numbers until the answer is known */
        char *numbers;
        size_t size;
        const char *check;
        char question[256];
};

/* The driver that all lines name from now on. */
void line_driver(const char *driver);

__attribute__((format(printf, 3, 4))) void line_begin(struct line *l, const char *check,
                                                      const char *format, ...);
void line_number(struct line *l, const char *name, double x);
__attribute__((format(printf, 3, 4))) void line_answer(struct line *l, enum verdict ok,
                                                       const char *format, ...);

/* Writes the text in quotes, with escapes. */
void line_string(FILE *to, const char *text);

#endif
