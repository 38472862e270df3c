/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Command lines. Options have their full names: an abbreviation would change its meaning with the
 * next option. The refusal of an unknown one suggests the nearest.
 */

#include "ipc/base/options.h"

#include <ctype.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/text.h"

/* ---- reading --------------------------------------------------------------------------------- */

static int unknown(struct kvd_words *w, const char *hyphens, const char *given) {
        struct kvd_nearest nearest = kvd_nearest_to(given);

        for (size_t i = 0; i < w->n_options; i++)
                if (w->options[i].name)
                        kvd_consider(&nearest, w->options[i].name);
        if (nearest.name)
                return kvd_refuse(w->why, -EINVAL, "no option %s%s; did you mean --%s?", hyphens,
                                  given, nearest.name);
        return kvd_refuse(w->why, -EINVAL, "no option %s%s; \"%s --help\" lists them", hyphens,
                          given, w->program);
}

/* value: what is in the option's own word; NULL: it may be the next word. */
static int take(struct kvd_words *w, const struct kvd_option *option, const char *value) {
        w->option = option;
        w->value = value;
        if (!option->value && value)
                return kvd_refuse(w->why, -EINVAL, "--%s takes no value", option->name);
        if (!option->value || value)
                return 1;
        if (w->at >= w->argc)
                return kvd_refuse(w->why, -EINVAL, "--%s wants a value: --%s %s", option->name,
                                  option->name, option->value);
        w->value = w->argv[w->at++];
        return 1;
}

static int take_name(struct kvd_words *w, const char *word) {
        size_t n = strcspn(word, "=");
        char name[64];

        snprintf(name, sizeof name, "%.*s", (int)MIN(n, sizeof name - 1), word);
        for (size_t i = 0; i < w->n_options; i++)
                if (w->options[i].name && strcmp(w->options[i].name, name) == 0)
                        return take(w, &w->options[i], word[n] ? word + n + 1 : NULL);
        return unknown(w, "--", name);
}

static int take_letter(struct kvd_words *w) {
        const char letter[] = {*w->letters, 0}, *rest = w->letters[1] ? w->letters + 1 : NULL;

        w->letters = rest;
        for (size_t i = 0; i < w->n_options; i++) {
                const struct kvd_option *option = &w->options[i];

                if (option->letter != *letter)
                        continue;
                w->letters = option->value ? NULL : rest;
                return take(w, option, option->value ? rest : NULL);
        }
        return unknown(w, "-", letter);
}

int kvd_next_option(struct kvd_words *w) {
        const char *word;

        if (w->letters)
                return take_letter(w);
        w->at = MAX(w->at, 1);
        if (!w->flags_end && w->at < w->argc && strcmp(w->argv[w->at], "--") == 0) {
                w->flags_end = true;
                w->at++;
        }
        if (w->at >= w->argc)
                return 0;
        word = w->argv[w->at++];
        if (!w->flags_end && word[0] == '-' && word[1] == '-')
                return take_name(w, word + 2);
        if (!w->flags_end && word[0] == '-' && word[1]) {
                w->letters = word + 1;
                return take_letter(w);
        }
        w->option = NULL;
        w->value = word;
        return 1;
}

/* ---- values ---------------------------------------------------------------------------------- */

static int store_whole(const struct kvd_option *o, const char *value, void *to,
                       struct kvd_why *why) {
        unsigned long long number;
        char *end;

        errno = 0;
        number = strtoull(value, &end, 10);
        if (!isdigit((unsigned char)*value) || *end || errno ||
            (o->most > 0 && ((double)number < o->least || (double)number > o->most)))
                return o->most > 0 ?
                               kvd_refuse(why, -EINVAL,
                                          "--%s takes a number from %.0f to %.0f, not \"%s\"",
                                          o->name, o->least, o->most, value) :
                               kvd_refuse(why, -EINVAL, "--%s takes a whole number, not \"%s\"",
                                          o->name, value);
        if (o->kind == KVD_OPTION_U32)
                *(uint32_t *)to = (uint32_t)number;
        else
                *(uint64_t *)to = number;
        return 0;
}

static int store_real(const struct kvd_option *o, const char *value, void *to,
                      struct kvd_why *why) {
        char *end;
        double number = strtod(value, &end);

        if (end == value || *end || !(number >= o->least && number <= o->most))
                return kvd_refuse(why, -EINVAL, "--%s takes a number from %g to %g, not \"%s\"",
                                  o->name, o->least, o->most, value);
        *(float *)to = (float)number;
        return 0;
}

static int store_word(const struct kvd_option *o, const char *words, const char *value, void *to,
                      struct kvd_why *why) {
        int i = kvd_word_index(words, value);

        if (i < 0)
                return kvd_refuse(why, -EINVAL, "--%s takes one of these: %s; not \"%s\"", o->name,
                                  words, value);
        if (o->kind == KVD_OPTION_YES)
                *(bool *)to = i;
        else
                *(int *)to = i + (int)o->least;
        return 0;
}

int kvd_option_store(const struct kvd_option *option, const char *value, void *base,
                     struct kvd_why *why) {
        void *to = (char *)base + option->at;

        switch (option->kind) {
        case KVD_OPTION_BOOL: *(bool *)to = option->most > 0; return 0;
        case KVD_OPTION_TEXT: *(const char **)to = value; return 0;
        case KVD_OPTION_YES: return store_word(option, "no yes", value, to, why);
        case KVD_OPTION_WORD:
                return store_word(option, option->words ?: option->value, value, to, why);
        case KVD_OPTION_U32:
        case KVD_OPTION_U64: return store_whole(option, value, to, why);
        case KVD_OPTION_FLOAT: return store_real(option, value, to, why);
        }
        return 0;
}

/* ---- help ------------------------------------------------------------------------------------ */

enum { NAMES = 20, COLUMN = 28 }; /* width of a name with its value; start of the text */

void kvd_option_help(FILE *to, const struct kvd_option *option) {
        bool value = option->value;
        int n;

        if (!option->name) {
                fprintf(to, "\n%s\n", option->text);
                return;
        }
        fprintf(to, option->letter ? "  -%c, " : "      ", option->letter);
        n = fprintf(to, "--%s%s%s", option->name, value ? " " : "", value ? option->value : "");
        fprintf(to, n > NAMES ? "\n%*s" : "%*s", n > NAMES ? COLUMN : COLUMN - 6 - n, "");
        kvd_put_wrapped(to, option->text, KVD_HELP_WIDTH - COLUMN, COLUMN);
        fputc('\n', to);
}
