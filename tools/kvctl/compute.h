/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_COMPUTE_H
#define KVCTL_COMPUTE_H

/*
 * "kvctl compute": one operation of kernels/ on arrays in files. A method is a file compute_METHOD.c with a table of
 * rows; the frame reads the arrays, checks them against the row, makes the outputs, and writes them.
 *
 * Shapes are text: "heads,tokens,dim". A name stands for one size wherever it occurs in a row: the frame complains if
 * two arrays disagree about it, and functions ask for it with compute_size(). A whole-number parameter of that name is
 * such a size as well. Outputs whose shape is known by then exist, zeroed, when the function is called; for others it
 * calls compute_make().
 */

#include "kernels/ops.h"
#include "tools/kvctl/npy.h"

#define COMPUTE_INPUTS 8u
#define COMPUTE_OUTPUTS 4u
#define COMPUTE_PARAMS 12u

/* What an input may be: any of these. */
#define COMPUTE_IS(type) (1u << (type))
#define COMPUTE_NUMBER (COMPUTE_IS(NPY_F32) | COMPUTE_IS(NPY_F16) | COMPUTE_IS(NPY_BF16)) /* all inputs alike */
#define COMPUTE_ANY (COMPUTE_IS(NPY_TYPES) - 1)
#define COMPUTE_OPTIONAL (1u << 31) /* may be left out at the end, or given as "-" */

#define COMPUTE_LIKE_NUMBER NPY_TYPES   /* type of an output: that of the COMPUTE_NUMBER inputs */
#define COMPUTE_LIKE_FIRST (NPY_TYPES + 1) /* that of the first input */

struct compute;

struct compute_row {
        const char *name; /* "method.operation"; NULL ends a table */
        const char *text; /* one line, without a full stop */
        struct {
                const char *name, *shape;
                unsigned types;
                const char *text;
        } in[COMPUTE_INPUTS];
        struct {
                const char *name;
                const char *choices; /* NULL: a number; "whole": a whole number; else words: "a|b|c" */
                const char *value;   /* if not given; NULL: must be given */
                const char *text;
        } param[COMPUTE_PARAMS];
        struct {
                const char *name, *shape;
                unsigned type; /* enum npy_type, or COMPUTE_LIKE_... */
                const char *text;
        } out[COMPUTE_OUTPUTS];
        int (*run)(struct compute *c); /* 0, or what compute_fail() returned */
};

extern const struct compute_row compute_attend[], compute_bicache[], compute_block[], compute_hshare[],
        compute_keydiff[], compute_memshare[], compute_sketch[];

/* ---- for the functions of rows ---- */

struct compute {
        const struct compute_row *row;
        const struct kvd_ops *ops;  /* of --variant */
        enum kvd_number type;       /* of the COMPUTE_NUMBER inputs */
        struct npy in[COMPUTE_INPUTS];
        struct npy out[COMPUTE_OUTPUTS];
        struct compute_private *private;
};

/* A size of a shape of the row; a name that has none yet is a mistake in the row, and aborts. */
uint64_t compute_size(const struct compute *c, const char *name);

double compute_number(const struct compute *c, const char *name);   /* parameters; */
uint64_t compute_whole(const struct compute *c, const char *name);
unsigned compute_choice(const struct compute *c, const char *name); /* index of the word */

/* Makes output i, zeroed. */
int compute_make(struct compute *c, unsigned i, uint32_t rank, const uint64_t *shape);

/* Zeroed memory until the operation is done; NULL (and noted) if there is none. */
void *compute_scratch(struct compute *c, size_t bytes);

__attribute__((format(printf, 2, 3))) int compute_fail(struct compute *c, const char *format, ...);

/* ---- for kvctl ---- */

/* Shapes, types and parameters of an operation. False: there is none of that name. */
bool compute_help(const char *operation);

#endif
