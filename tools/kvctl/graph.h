/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_GRAPH_H
#define KVCTL_GRAPH_H

/* Little graphs of one line, of block characters where the terminal's language has them. */

#include "tools/kvctl/screen.h"

struct share { /* of a bar */
        double part; /* of the whole */
        const char *colour;
};

/* Shares one behind the other, each in its own pattern, and what is left. */
void graph_bar(FILE *to, const struct screen *screen, unsigned width, const struct share *shares,
               size_t n);
/* A column each, of values from 0 to 1; negative: there is none. */
void graph_history(FILE *to, const struct screen *screen, const double *values, size_t n);
/* The darker, the more: 0 to 1. */
void graph_heat(FILE *to, const struct screen *screen, const double *values, size_t n);

#endif
