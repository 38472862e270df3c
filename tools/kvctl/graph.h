/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_GRAPH_H
#define KVCTL_GRAPH_H

/* Graphs of one line, made of block characters if the terminal shows UTF-8. */

#include "tools/kvctl/screen.h"

struct share {       /* of a bar */
        double part; /* of the whole */
        const char *colour;
};

/* The shares one after the other, each in its own pattern, and then the rest. */
void graph_bar(FILE *to, const struct screen *screen, unsigned width, const struct share *shares,
               size_t n);
/* A column per value from 0 to 1; a negative value leaves it empty. */
void graph_history(FILE *to, const struct screen *screen, const double *values, size_t n);
/* A shade per value from 0 to 1; darker is more. */
void graph_heat(FILE *to, const struct screen *screen, const double *values, size_t n);

#endif
