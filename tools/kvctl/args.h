/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_ARGS_H
#define KVCTL_ARGS_H

/* The command line: a verb of verbs.def, its operands, and flags of flags.def anywhere. */

#include <stdbool.h>
#include <stdint.h>
#include "ipc/base/options.h"

struct kvctl;
struct answer;

enum flag {
#define FLAG(id, name, letter, value, kind, text) FLAG_##id,
#include "tools/kvctl/flags.def"
#undef FLAG
        N_FLAGS
};

extern const struct kvd_option flags[N_FLAGS];

#define FLAG_BIT(flag) (UINT64_C(1) << (flag))
#define FLAGS_GLOBAL (FLAG_BIT(FLAG_WATCH) - 1)

/* Fills the answer. 0; 1: the answer is "no"; negative errno, noted with kvctl_fail(). */
typedef int verb_fn(struct kvctl *kvctl, struct answer *answer);

#define VERB(name, run, operands, least, most, required, optional, text, more, example) verb_fn run;
#include "tools/kvctl/verbs.def"
#undef VERB

struct verb {
        const char *name;
        verb_fn *run;
        const char *operands;
        unsigned least, most;        /* operands */
        uint64_t required, optional; /* FLAG_BIT of its own flags */
        const char *text, *more, *example;
};

extern const struct verb verbs[];
extern const unsigned n_verbs;

#define ARGS_OPERANDS_MAX 32u

struct args {
        const struct verb *verb; /* NULL if none was given */
        const char *group;       /* first word of several verbs, as in "space --help"; or NULL */
        const char *operand[ARGS_OPERANDS_MAX + 1]; /* one too many, for the refusal */
        unsigned n_operands;
        uint64_t given; /* FLAG_BIT of the flags */
        const char *text[N_FLAGS];
        uint64_t number[N_FLAGS];
        float seconds[N_FLAGS];
        int word[N_FLAGS]; /* number of the word, from 1 as in ipc/base/enums.h; 0: not given */
};

/*
 * 0, or -EINVAL with a line in why. With --help or --version, flags and operands need not fit the
 * verb.
 */
int args_parse(struct args *args, int argc, char **argv, struct kvd_why *why);

static inline bool args_has(const struct args *args, enum flag flag) {
        return args->given & FLAG_BIT(flag);
}

/* help */
void help_all(FILE *to);
void help_verb(FILE *to, const struct verb *verb);
void help_group(FILE *to, const char *group);
bool verb_is_of(const struct verb *verb, const char *group);

#endif
