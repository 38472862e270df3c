/* SPDX-License-Identifier: Apache-2.0 */

/* Parses the command line by the tables verbs.def and flags.def. */

#include "tools/kvctl/args.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "ipc/base/enums.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"

#define F(id) FLAG_BIT(FLAG_##id)

const struct verb verbs[] = {
#define VERB(name, run, operands, least, most, required, optional, text, more, example) \
        {name, run, operands, least, most, required, optional, text, more, example},
#include "tools/kvctl/verbs.def"
#undef VERB
};

const unsigned n_verbs = ARRAY_SIZE(verbs);

#define AT(member, id) .at = offsetof(struct args, member[FLAG_##id])
#define KIND_BARE(id) .kind = KVD_OPTION_NONE
#define KIND_TEXT(id) .kind = KVD_OPTION_TEXT, AT(text, id)
#define KIND_NUMBER(id) .kind = KVD_OPTION_U64, AT(number, id)
#define KIND_SECONDS(id) .kind = KVD_OPTION_FLOAT, AT(seconds, id), .least = 0.01, .most = 86400
#define KIND_WORD(id) .kind = KVD_OPTION_WORD, AT(word, id), .least = 1

const struct kvd_option flags[N_FLAGS] = {
#define FLAG(id, name, letter, value, kind, text) {name, letter, value, text, KIND_##kind(id)},
#include "tools/kvctl/flags.def"
#undef FLAG
};

/* State of the parser; errors go to why. */
struct reader {
        struct args *args;
        const char *word[ARGS_OPERANDS_MAX + 2]; /* verb and operands */
        unsigned n_words;
        struct kvd_why *why;
};

/* ---- verb ------------------------------------------------------------------------------------ */

static int unknown_verb(struct reader *reader, const char *given) {
        struct kvd_nearest nearest = kvd_nearest_to(given);

        for (unsigned i = 0; i < n_verbs; i++)
                kvd_consider(&nearest, verbs[i].name);
        if (nearest.name)
                return kvd_refuse(reader->why, -EINVAL, "no verb \"%s\"; did you mean \"%s\"?",
                                  given, nearest.name);
        return kvd_refuse(reader->why, -EINVAL, "no verb \"%s\"; \"kvctl --help\" lists them",
                          given);
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

/* "help VERB" is "VERB --help". */
static void take_help(struct reader *reader) {
        if (!reader->n_words || strcmp(reader->word[0], "help") != 0)
                return;
        reader->args->given |= FLAG_BIT(FLAG_HELP);
        memmove(reader->word, reader->word + 1, --reader->n_words * sizeof *reader->word);
}

static bool find(struct args *args, const char *name) {
        for (unsigned i = 0; i < n_verbs && !args->verb; i++)
                if (strcmp(verbs[i].name, name) == 0)
                        args->verb = &verbs[i];
        return args->verb;
}

/* A verb has one word or two. */
static int find_verb(struct reader *reader) {
        const char *first = reader->word[0], *second = reader->word[1];
        struct args *args = reader->args;
        bool group = false;
        char two[128];
        unsigned n;

        if (!reader->n_words)
                return 0;
        snprintf(two, sizeof two, "%s %s", first, reader->n_words > 1 ? second : "");
        n = find(args, two) ? 2 : 1;
        if (find(args, first)) {
                args->n_operands = reader->n_words - n;
                memcpy(args->operand, reader->word + n, args->n_operands * sizeof *args->operand);
                return 0;
        }
        for (unsigned i = 0; i < n_verbs; i++)
                group |= verb_is_of(&verbs[i], first);
        if (group && reader->n_words == 1)
                return take_group(reader);
        return unknown_verb(reader, group ? two : first);
}

/* ---- words ----------------------------------------------------------------------------------- */

static int take_word(struct reader *reader, const struct kvd_words *words) {
        ptrdiff_t flag = words->option - flags;

        if (words->option) {
                reader->args->given |= FLAG_BIT(flag);
                return kvd_option_store(words->option, words->value, reader->args, reader->why);
        }
        if (reader->n_words == ARRAY_SIZE(reader->word))
                return kvd_refuse(reader->why, -EINVAL, "too many arguments, from \"%s\" on",
                                  words->value);
        reader->word[reader->n_words++] = words->value;
        return 0;
}

static int take_all(struct reader *reader, int argc, char **argv) {
        struct kvd_words words = {"kvctl", flags, N_FLAGS, argc, argv, .why = reader->why};
        int r;

        while ((r = kvd_next_option(&words)) > 0) {
                r = take_word(reader, &words);
                if (r < 0)
                        break;
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
        uint64_t taken = FLAGS_GLOBAL | args->verb->required | args->verb->optional,
                 surplus = args->given & ~taken, missing = required(args) & ~args->given;

        for (unsigned i = 0; i < N_FLAGS; i++) {
                if (surplus & FLAG_BIT(i))
                        return kvd_refuse(
                                reader->why, -EINVAL,
                                "\"%s\" takes no --%s; \"kvctl %s --help\" lists its flags", verb,
                                flags[i].name, verb);
                if (missing & FLAG_BIT(i))
                        return kvd_refuse(
                                reader->why, -EINVAL,
                                "\"%s\" wants --%s %s; \"kvctl %s --help\" has an example", verb,
                                flags[i].name, flags[i].value, verb);
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
        struct reader reader = {.args = args, .why = why};
        int r;

        *args = (struct args){0};
        r = take_all(&reader, argc, argv);
        take_help(&reader);
        if (r == 0)
                r = find_verb(&reader);
        if (r < 0)
                return r;
        if (args_has(args, FLAG_HELP) || args_has(args, FLAG_VERSION) || !args->verb)
                return 0;
        r = check_flags(&reader);
        return r < 0 ? r : check_operands(&reader);
}
