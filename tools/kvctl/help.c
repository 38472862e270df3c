/* SPDX-License-Identifier: Apache-2.0 */

/* Help, from the tables that also parse the command line, so that every verb has help. */

#include "tools/kvctl/args.h"

#include <stdarg.h>
#include <string.h>

#include "ipc/base/text.h"

#define INDENT 8u
#define VERB_TEXT 18u /* columns before the text of a verb */

/* Lines after the first are indented. */
_printf_(3, 4) static void put_line(FILE *to, unsigned indent, const char *format, ...) {
        char line[512];
        va_list list;

        va_start(list, format);
        vsnprintf(line, sizeof line, format, list);
        va_end(list);
        kvd_put_wrapped(to, line, KVD_HELP_WIDTH, indent);
        fputc('\n', to);
}

static void put_verb(FILE *to, const struct verb *verb) {
        put_line(to, VERB_TEXT, "  %-14s  %s", verb->name, verb->text);
}

static void put_flag_usage(FILE *to, enum flag flag, bool required) {
        const struct kvd_option *row = &flags[flag];
        const char *value = row->value ? row->value : "", *gap = row->value ? " " : "";

        fprintf(to, required ? " --%s%s%s" : " [--%s%s%s]", row->name, gap, value);
}

static void put_flags(FILE *to, uint64_t mask) {
        for (unsigned i = 0; i < N_FLAGS; i++)
                if (mask & FLAG_BIT(i))
                        kvd_option_help(to, &flags[i]);
}

static void put_usage(FILE *to, const struct verb *verb) {
        char line[1024] = "";
        FILE *whole = fmemopen(line, sizeof line, "w");

        if (!whole)
                return;
        fprintf(whole, "usage: kvctl %s%s%s", verb->name, *verb->operands ? " " : "",
                verb->operands);
        for (unsigned i = 0; i < N_FLAGS; i++)
                if ((verb->required | verb->optional) & FLAG_BIT(i))
                        put_flag_usage(whole, (enum flag)i, verb->required & FLAG_BIT(i));
        fclose(whole);
        kvd_put_wrapped(to, line, KVD_HELP_WIDTH - INDENT, INDENT);
}

void help_verb(FILE *to, const struct verb *verb) {
        uint64_t own = verb->required | verb->optional;

        put_usage(to, verb);
        fputs("\n\n", to);
        put_line(to, 0, "kvctl %s: %s.", verb->name, verb->text);
        if (*verb->more)
                put_line(to, 0, "%s", verb->more);
        fputc('\n', to);
        put_flags(to, own);
        put_flags(to, FLAGS_GLOBAL);
        fprintf(to, "\nexample: %s\n", verb->example); /* not wrapped, so that it can be pasted */
}

bool verb_is_of(const struct verb *verb, const char *group) {
        size_t n = strlen(group);

        return strncmp(verb->name, group, n) == 0 && verb->name[n] == ' ';
}

void help_group(FILE *to, const char *group) {
        fprintf(to, "usage: kvctl %s VERB [arguments]\n\n", group);
        for (unsigned i = 0; i < n_verbs; i++)
                if (verb_is_of(&verbs[i], group))
                        put_verb(to, &verbs[i]);
        fprintf(to, "\n\"kvctl help %s VERB\" has the flags of each and an example.\n", group);
}

void help_all(FILE *to) {
        fprintf(to, "usage: kvctl [flags] VERB [arguments]\n\n"
                    "Shows and changes the state of a kvd daemon. SPACE may be left out if\n"
                    "there is only one space.\n\n");
        for (unsigned i = 0; i < n_verbs; i++)
                put_verb(to, &verbs[i]);
        fprintf(to, "\nflags of every verb:\n\n");
        put_flags(to, FLAGS_GLOBAL);
        fprintf(to, "\nexit status: 0 done; 1 the answer is no, or refused; 2 wrong usage;\n"
                    "3 no daemon\n"
                    "\"kvctl help VERB\" has a verb's flags and an example; kvctl(1) the rest.\n");
}
