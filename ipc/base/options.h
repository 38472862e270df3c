/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_OPTIONS_H
#define KVD_BASE_OPTIONS_H

/* Command lines, read by a table of options that is their help as well. */

#include <stdio.h>

#include "ipc/base/why.h"

enum kvd_option_kind {
        KVD_OPTION_NONE, /* nothing is stored */
        KVD_OPTION_BOOL, /* bool: true if most is not 0 */
        KVD_OPTION_YES,  /* bool: yes or no */
        KVD_OPTION_TEXT, /* const char *: the value itself */
        KVD_OPTION_WORD, /* int: least for the first of the words, and so on */
        KVD_OPTION_U32,  /* numbers from least to most; if most is 0, any of the type */
        KVD_OPTION_U64,
        KVD_OPTION_FLOAT,
        KVD_OPTION_OWN, /* this and higher ones: the program's own kinds */
};

struct kvd_option {
        const char *name;  /* NULL: text is a heading in the help */
        char letter;       /* 0 if none */
        const char *value; /* name of the value in the help; NULL if the option takes none */
        const char *text;
        int kind;
        size_t at;          /* where its value is stored: offset in the program's struct */
        double least, most; /* range of a number */
        const char *words;  /* choices, separated by blanks; NULL: value has them, as in on|off */
};

/* ---- reading --------------------------------------------------------------------------------- */

struct kvd_words { /* of a command line; the caller sets the first members */
        const char *program;
        const struct kvd_option *options;
        size_t n_options;
        int argc;
        char **argv;
        struct kvd_why *why;

        const struct kvd_option *option; /* the one just read; NULL: value is an operand */
        const char *value;               /* NULL if the option takes none */

        int at;              /* number of words read */
        const char *letters; /* that are left of a word such as -hV; NULL: none */
        bool flags_end;      /* after -- */
};

/*
 * Reads the next option with its value, or the next operand; both may be mixed. 1: there was one
 * more; 0: no more; -EINVAL, with a line in why: an unknown option, or one without its value.
 */
int kvd_next_option(struct kvd_words *words);

/* Stores a value in base, the program's struct. 0, or -EINVAL with a line in why. */
int kvd_option_store(const struct kvd_option *option, const char *value, void *base,
                     struct kvd_why *why);

/* ---- help ------------------------------------------------------------------------------------ */

#define KVD_HELP_WIDTH 79u

/* "  -h, --help" and the text in a column of its own, or a heading. */
void kvd_option_help(FILE *to, const struct kvd_option *option);

#endif
