/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_COMPUTE_FRAME_H
#define KVCTL_COMPUTE_FRAME_H

/* Between compute.c, which knows the command line, and compute_bind.c, which fits arrays and parameters to a row. */

#include "tools/kvctl/compute.h"

#define COMPUTE_SIZES 32u

struct compute_private {
        struct {
                char name[24];
                uint64_t size;
                const char *owner; /* the array or parameter that it came from */
        } sizes[COMPUTE_SIZES];
        unsigned n_sizes;
        double value[COMPUTE_PARAMS]; /* numbers, or indices of words */
        void *scratch[16];
        unsigned n_scratch;
        char why[400];
};

int compute_bind_params(struct compute *c, const char *given); /* "a=1,b=word", or NULL */
int compute_bind_inputs(struct compute *c);                    /* c->in is loaded; bf16 is told apart already */
int compute_bind_outputs(struct compute *c);
void compute_clear(struct compute *c);

unsigned compute_count_inputs(const struct compute_row *row, bool required);
unsigned compute_count_outputs(const struct compute_row *row);

#endif
