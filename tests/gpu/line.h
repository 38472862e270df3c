/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_TESTS_GPU_LINE_H
#define KVD_TESTS_GPU_LINE_H

/*
 * One result, one line of JSON on standard output:
 *
 *      {"check": "T1", "question": "...", "answer": "...", "ok": true, "numbers": {...}, "driver": "..."}
 *
 * ok says whether the answer is the one that kvd is built on; null: there is no such answer, or the
 * question could not be asked (the answer says why). driver names what answered: nobody can take a
 * stand-in's line for a GPU's.
 */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum verdict { NO, YES, OPEN_QUESTION };

struct line {
        FILE *to;          /* numbers, until the answer is known */
        char *numbers;
        size_t size;
        const char *check;
        char question[256];
};

/* What stands in every line from now on. */
void line_driver(const char *driver);

__attribute__((format(printf, 3, 4))) void line_begin(struct line *l, const char *check,
                                                      const char *format, ...);
void line_number(struct line *l, const char *name, double x);
__attribute__((format(printf, 3, 4))) void line_answer(struct line *l, enum verdict ok,
                                                       const char *format, ...);

/* "..." with escapes. */
void line_string(FILE *to, const char *text);

#endif
