/* SPDX-License-Identifier: Apache-2.0 */

/* Graphs of one line. Patterns repeat what colours show, so that colours are not needed. */

#include "tools/kvctl/graph.h"

#include "ipc/base/util.h"

static const char *const bars[2][4] = {{"#", "=", "-", "."}, {"█", "▓", "▒", "·"}};
static const char *const levels[2][9] = {{" ", ".", ":", "-", "=", "+", "*", "#", "@"},
                                         {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"}};
static const char *const shades[2][5] = {{".", ":", "+", "#", "@"}, {"·", "░", "▒", "▓", "█"}};

static void put_cells(FILE *to, const char *cell, unsigned n) {
        while (n--)
                fputs(cell, to);
}

void graph_bar(FILE *to, const struct screen *screen, unsigned width, const struct share *shares,
               size_t n) {
        unsigned at = 0;
        double sum = 0;

        fputc('[', to);
        for (size_t i = 0; i < n; i++) {
                unsigned end;

                sum += shares[i].part;
                end = (unsigned)(MIN(MAX(sum, 0.0), 1.0) * width + 0.5);
                if (screen->colour && end > at)
                        fprintf(to, "\033[%sm", shares[i].colour);
                put_cells(to, bars[screen->utf8][MIN(i, 2u)], end > at ? end - at : 0);
                if (screen->colour && end > at)
                        fputs("\033[0m", to);
                at = MAX(at, end);
        }
        put_cells(to, bars[screen->utf8][3], width - at);
        fputc(']', to);
}

/* The lowest level is for 0 only. */
static size_t level_of(double value, size_t n) {
        size_t level = (size_t)(MIN(MAX(value, 0.0), 1.0) * (double)(n - 1) + 0.5);

        return value > 0 ? MAX(level, (size_t)1) : 0;
}

void graph_history(FILE *to, const struct screen *screen, const double *values, size_t n) {
        for (size_t i = 0; i < n; i++)
                fputs(values[i] < 0 ? " " : levels[screen->utf8][MAX(level_of(values[i], 9), 1u)],
                      to);
}

void graph_heat(FILE *to, const struct screen *screen, const double *values, size_t n) {
        for (size_t i = 0; i < n; i++)
                fputs(shades[screen->utf8][level_of(values[i], 5)], to);
}
