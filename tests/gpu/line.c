/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/line.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static char driver[256] = "none";

void line_driver(const char *name) {
        snprintf(driver, sizeof driver, "%s", name);
}

void line_string(FILE *to, const char *text) {
        fputc('"', to);
        for (const char *c = text; *c; c++) {
                if (*c == '"' || *c == '\\')
                        fprintf(to, "\\%c", *c);
                else if ((unsigned char)*c < 0x20)
                        fprintf(to, "\\u%04x", *c);
                else
                        fputc(*c, to);
        }
        fputc('"', to);
}

void line_begin(struct line *l, const char *check, const char *format, ...) {
        va_list more;

        *l = (struct line){.check = check};
        va_start(more, format);
        vsnprintf(l->question, sizeof l->question, format, more);
        va_end(more);
        l->to = open_memstream(&l->numbers, &l->size);
        if (!l->to)
                abort();
}

void line_number(struct line *l, const char *name, double x) {
        fprintf(l->to, "%s", ftell(l->to) ? ", " : "");
        line_string(l->to, name);
        if (isfinite(x))
                fprintf(l->to, ": %.10g", x);
        else
                fputs(": null", l->to);
}

void line_answer(struct line *l, enum verdict ok, const char *format, ...) {
        static const char *const words[] = {"false", "true", "null"};
        char answer[512];
        va_list more;

        va_start(more, format);
        vsnprintf(answer, sizeof answer, format, more);
        va_end(more);
        fclose(l->to);
        printf("{\"check\": ");
        line_string(stdout, l->check);
        printf(", \"question\": ");
        line_string(stdout, l->question);
        printf(", \"answer\": ");
        line_string(stdout, answer);
        printf(", \"ok\": %s, \"numbers\": {%s}, \"driver\": ", words[ok], l->numbers);
        line_string(stdout, driver);
        printf("}\n");
        fflush(stdout);
        free(l->numbers);
}
