/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Parses the command line by the tables verbs.def and flags.def. The refusal of an unknown word
 * suggests the nearest known one.
 */

#include "tools/kvctl/args.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "ipc/base/util.h"
#include "tools/kvctl/text.h"

const struct flag_row flags[N_FLAGS] = {
#define FLAG(id, name, letter, value, kind, text) {name, letter, value, FLAG_##kind, text},
#include "tools/kvctl/flags.def"
#undef FLAG
};

/* State of the parser; errors go to why. */
struct reader {
        struct args *args;
        char **argv;
        int argc, at;
        const char *word[ARGS_OPERANDS_MAX + 2]; /* verb and operands */
        unsigned n_words;
        char unknown[64]; /* first flag that does not exist; the verb decides what to suggest */
        struct kvd_why *why;
};

/* ---- suggestions ----------------------------------------------------------------------------- */

struct nearest {
        const char *name;
        unsigned distance;
};

static void consider(struct nearest *nearest, const char *given, const char *name) {
        unsigned distance = text_distance(given, name);
        bool begins = strlen(given) >= 2 && strncmp(given, name, strlen(given)) == 0;

        distance = begins ? MIN(distance, 1u) : distance;
        if (distance < nearest->distance)
                *nearest = (struct nearest){name, distance};
}

/* A short word may have fewer wrong letters: three of three make another word. */
static struct nearest nearest_for(const char *given) {
        return (struct nearest){NULL, MIN((unsigned)strlen(given) / 3 + 2, 4u)};
}

static int unknown_verb(struct reader *reader, const char *given) {
        struct nearest nearest = nearest_for(given);

        for (unsigned i = 0; i < n_verbs; i++)
                consider(&nearest, given, verbs[i].name);
        if (nearest.name)
                return kvd_refuse(reader->why, -EINVAL, "no verb \"%s\"; did you mean \"%s\"?",
                                  given, nearest.name);
        return kvd_refuse(reader->why, -EINVAL, "no verb \"%s\"; \"kvctl --help\" lists them",
                          given);
}

static uint64_t allowed(const struct verb *verb) {
        return FLAGS_GLOBAL | (verb ? verb->required | verb->optional : 0);
}

static int unknown_flag(struct reader *reader) {
        const char *given = reader->unknown;
        const struct verb *verb = reader->args->verb;
        struct nearest nearest = nearest_for(given);

        for (unsigned i = 0; i < N_FLAGS; i++)
                if (!verb || allowed(verb) & FLAG_BIT(i))
                        consider(&nearest, given, flags[i].name);
        if (nearest.name)
                return kvd_refuse(reader->why, -EINVAL, "no flag --%s; did you mean --%s?", given,
                                  nearest.name);
        if (verb)
                return kvd_refuse(reader->why, -EINVAL,
                                  "no flag --%s; \"kvctl %s --help\" lists them", given,
                                  verb->name);
        return kvd_refuse(reader->why, -EINVAL, "no flag --%s; \"kvctl --help\" lists them", given);
}

/* ---- verb ------------------------------------------------------------------------------------ */

/* Number of words in the verb's name if the given words begin with all of them, else 0. */
static unsigned words_of(const struct verb *verb, const struct reader *reader) {
        const char *name = verb->name;
        unsigned n = 0;

        while (*name) {
                size_t length = strcspn(name, " ");

                if (n == reader->n_words || strlen(reader->word[n]) != length ||
                    strncmp(reader->word[n], name, length) != 0)
                        return 0;
                name += length + (name[length] == ' ');
                n++;
        }
        return n;
}

/* Only the first word of several verbs was given, which is valid with --help. */
static int take_group(struct reader *reader) {
        const char *group = reader->word[0];

        reader->args->group = group;
        if (args_has(reader->args, FLAG_HELP))
                return 0;
        return kvd_refuse(reader->why, -EINVAL,
                          "\"%s\" wants another word; \"kvctl %s --help\" lists them", group,
                          group);
}

static int no_verb(struct reader *reader) {
        char two[128];

        for (unsigned i = 0; i < n_verbs && reader->n_words == 1; i++)
                if (verb_is_of(&verbs[i], reader->word[0]))
                        return take_group(reader);
        if (reader->n_words >= 2) {
                snprintf(two, sizeof two, "%s %s", reader->word[0], reader->word[1]);
                for (unsigned i = 0; i < n_verbs; i++)
                        if (strncmp(verbs[i].name, two, strlen(reader->word[0]) + 1) == 0)
                                return unknown_verb(reader, two);
        }
        return unknown_verb(reader, reader->word[0]);
}

/* "help VERB" is "VERB --help". */
static void take_help(struct reader *reader) {
        if (!reader->n_words || strcmp(reader->word[0], "help") != 0)
                return;
        reader->args->given |= FLAG_BIT(FLAG_HELP);
        memmove(reader->word, reader->word + 1, --reader->n_words * sizeof *reader->word);
}

static int find_verb(struct reader *reader) {
        struct args *args = reader->args;
        unsigned n = 0;

        take_help(reader);
        for (unsigned i = 0; i < n_verbs && !n; i++) {
                n = words_of(&verbs[i], reader);
                args->verb = n ? &verbs[i] : NULL;
        }
        if (!n && reader->n_words)
                return no_verb(reader);
        args->n_operands = reader->n_words - n;
        memcpy(args->operand, reader->word + n, args->n_operands * sizeof *args->operand);
        return 0;
}

/* ---- flags ----------------------------------------------------------------------------------- */

static int read_number(struct reader *reader, enum flag flag, const char *text) {
        uint64_t *number = &reader->args->number[flag];
        char *end;

        errno = 0;
        *number = strtoull(text, &end, 10);
        if (!isdigit((unsigned char)*text) || *end || errno)
                return kvd_refuse(reader->why, -EINVAL, "--%s takes a whole number, not \"%s\"",
                                  flags[flag].name, text);
        return 0;
}

static int read_seconds(struct reader *reader, enum flag flag, const char *text) {
        double *seconds = &reader->args->seconds[flag];
        char *end;

        *seconds = strtod(text, &end);
        if (end == text || *end || !(*seconds >= 0.01 && *seconds <= 86400))
                return kvd_refuse(reader->why, -EINVAL,
                                  "--%s takes seconds, 0.01 to 86400, not \"%s\"", flags[flag].name,
                                  text);
        return 0;
}

static int read_value(struct reader *reader, enum flag flag, const char *text) {
        reader->args->text[flag] = text;
        if (flags[flag].kind == FLAG_NUMBER)
                return read_number(reader, flag, text);
        if (flags[flag].kind == FLAG_SECONDS)
                return read_seconds(reader, flag, text);
        return 0;
}

static int take_flag(struct reader *reader, enum flag flag, const char *value) {
        const struct flag_row *row = &flags[flag];

        reader->args->given |= FLAG_BIT(flag);
        if (row->kind == FLAG_BARE)
                return value ? kvd_refuse(reader->why, -EINVAL, "--%s takes no value", row->name) :
                               0;
        if (!value) {
                if (reader->at + 1 >= reader->argc)
                        return kvd_refuse(reader->why, -EINVAL, "--%s wants a value: --%s %s",
                                          row->name, row->name, row->value);
                value = reader->argv[++reader->at];
        }
        return read_value(reader, flag, value);
}

static int take_long(struct reader *reader, const char *word) {
        const char *equals = strchr(word, '=');
        size_t n = equals ? (size_t)(equals - word) : strlen(word);

        for (unsigned i = 0; i < N_FLAGS; i++)
                if (strlen(flags[i].name) == n && strncmp(flags[i].name, word, n) == 0)
                        return take_flag(reader, (enum flag)i, equals ? equals + 1 : NULL);
        if (!*reader->unknown)
                snprintf(reader->unknown, sizeof reader->unknown, "%.*s", (int)MIN(n, (size_t)100),
                         word);
        return 0;
}

static int take_short(struct reader *reader, const char *word) {
        for (unsigned i = 0; i < N_FLAGS; i++)
                if (flags[i].letter == word[0])
                        return take_flag(reader, (enum flag)i, word[1] ? word + 1 : NULL);
        return kvd_refuse(reader->why, -EINVAL, "no flag -%s; \"kvctl --help\" lists them", word);
}

static int take_word(struct reader *reader, const char *word) {
        if (reader->n_words == ARRAY_SIZE(reader->word))
                return kvd_refuse(reader->why, -EINVAL, "too many arguments, from \"%s\" on", word);
        reader->word[reader->n_words++] = word;
        return 0;
}

static int take_all(struct reader *reader) {
        bool flags_end = false;
        int r = 0;

        for (reader->at = 1; reader->at < reader->argc && r == 0; reader->at++) {
                const char *word = reader->argv[reader->at];

                if (flags_end || word[0] != '-' || !word[1])
                        r = take_word(reader, word);
                else if (strcmp(word, "--") == 0)
                        flags_end = true;
                else
                        r = word[1] == '-' ? take_long(reader, word + 2) :
                                             take_short(reader, word + 1);
        }
        return r;
}

/* ---- does it fit the verb? ------------------------------------------------------------------- */

/* A space of opaque blocks requires other flags. */
static uint64_t required(const struct args *args) {
        static const uint64_t opaque = FLAG_BIT(FLAG_BLOCK_BYTES) | FLAG_BIT(FLAG_LAYOUT);

        return args->given & opaque ? opaque : args->verb->required;
}

static int check_flags(struct reader *reader) {
        const struct args *args = reader->args;
        const char *verb = args->verb->name;
        uint64_t surplus = args->given & ~allowed(args->verb),
                 missing = required(args) & ~args->given;

        for (unsigned i = 0; i < N_FLAGS; i++) {
                if (surplus & FLAG_BIT(i))
                        return kvd_refuse(reader->why, -EINVAL,
                                          "\"%s\" takes no --%s; \"kvctl %s --help\" lists its flags",
                                          verb, flags[i].name, verb);
                if (missing & FLAG_BIT(i))
                        return kvd_refuse(reader->why, -EINVAL,
                                          "\"%s\" wants --%s %s; \"kvctl %s --help\" has an example",
                                          verb, flags[i].name, flags[i].value, verb);
        }
        return 0;
}

static int check_operands(struct reader *reader) {
        const struct args *args = reader->args;

        if (args->n_operands < args->verb->least)
                return kvd_refuse(reader->why, -EINVAL, "\"%s\" wants %s; try: %s",
                                  args->verb->name, args->verb->operands, args->verb->example);
        if (args->n_operands > args->verb->most)
                return kvd_refuse(reader->why, -EINVAL,
                                  "\"%s\" does not know what to do with \"%s\"; \"kvctl %s "
                                  "--help\" has an example",
                                  args->verb->name, args->operand[args->verb->most],
                                  args->verb->name);
        return 0;
}

int args_parse(struct args *args, int argc, char **argv, struct kvd_why *why) {
        struct reader reader = {.args = args, .argv = argv, .argc = argc, .why = why};
        int r;

        *args = (struct args){0};
        r = take_all(&reader);
        if (r == 0)
                r = find_verb(&reader);
        if (r == 0 && *reader.unknown)
                r = unknown_flag(&reader);
        if (r < 0)
                return r;
        if (args_has(args, FLAG_HELP) || args_has(args, FLAG_VERSION) || !args->verb)
                return 0;
        r = check_flags(&reader);
        return r < 0 ? r : check_operands(&reader);
}
