/* SPDX-License-Identifier: Apache-2.0 */

/*
 * completion: a script that completes kvctl's command line in a shell, made from the tables that
 * also parse the command line. It offers a verb's words first, then its flags, and where a space is
 * expected also the names of spaces, for which the script asks a daemon.
 */

#include <errno.h>

#include "tools/kvctl/kvctl.h"
#include "tools/kvctl/verbs.h"

static uint64_t flags_of(const struct verb *verb) {
        return FLAGS_GLOBAL | verb->required | verb->optional;
}

static bool wants_space(const struct verb *verb) {
        return strncmp(verb->operands, "[SPACE]", 7) == 0 ||
               strncmp(verb->operands, "SPACE", 5) == 0 ||
               (verb_is_of(verb, "space") && strcmp(verb->name, "space create") != 0);
}

/* A flag whose value is one of some words, and one whose value is a file. */
static bool takes_word(const struct flag_row *flag) {
        return flag->value && strchr(flag->value, '|');
}

static bool takes_file(const struct flag_row *flag) {
        return flag->value && (strcmp(flag->value, "PATH") == 0 || strcmp(flag->value, "FILE") == 0);
}

/* ---- writing --------------------------------------------------------------------------------- */

/* In single quotes, for all three shells. */
static void put_quoted(FILE *to, const char *text) {
        fputc('\'', to);
        for (; *text; text++)
                fputs(*text == '\'' ? "'\\''" : (char[]){*text, 0}, to);
        fputc('\'', to);
}

static void put_values(FILE *to, const struct flag_row *flag) {
        for (const char *at = flag->value; *at; at++)
                fputc(*at == '|' ? ' ' : *at, to);
}

/* The first word of verb i, if no verb before it begins with the same one. */
static bool first_word(unsigned i, char to[32]) {
        unsigned before = 0;

        snprintf(to, 32, "%.*s", (int)strcspn(verbs[i].name, " "), verbs[i].name);
        while (before < i && !verb_is_of(&verbs[before], to))
                before++;
        return before == i;
}

static const char *second_word(const struct verb *verb) {
        return strchr(verb->name, ' ') + 1;
}

/* Calls put for every word that may follow the group, or kvctl if the group is "". */
static void each_word(FILE *to, const char *group,
                      void (*put)(FILE *to, const char *word, const char *text)) {
        char word[32];

        for (unsigned i = 0; i < n_verbs; i++)
                if (*group && verb_is_of(&verbs[i], group))
                        put(to, second_word(&verbs[i]), verbs[i].text);
                else if (!*group && first_word(i, word))
                        put(to, word, strcmp(word, verbs[i].name) == 0 ? verbs[i].text : "several verbs");
}

/* Calls put for the first word of verbs that have two. */
static void each_group(FILE *to, void (*put)(FILE *to, const char *group)) {
        char word[32];

        for (unsigned i = 0; i < n_verbs; i++)
                if (first_word(i, word) && strcmp(word, verbs[i].name) != 0)
                        put(to, word);
}

/* ---- bash ------------------------------------------------------------------------------------ */

static void bash_word(FILE *to, const char *word, const char *text) {
        fprintf(to, " %s", word);
}

static void bash_group(FILE *to, const char *group) {
        fprintf(to, "        '%s ') words='", group);
        each_word(to, group, bash_word);
        fputs("' ;;\n", to);
}

static void bash_verb(FILE *to, const struct verb *verb) {
        fprintf(to, "        '%s '*) words=\"", verb->name);
        for (unsigned i = 0; i < N_FLAGS; i++)
                if (flags_of(verb) & FLAG_BIT(i))
                        fprintf(to, " --%s", flags[i].name);
        fputs(wants_space(verb) ? " $(_kvctl_spaces)\" ;;\n" : "\" ;;\n", to);
}

static void bash_values(FILE *to) {
        for (unsigned i = 0; i < N_FLAGS; i++) {
                if (takes_word(&flags[i])) {
                        fprintf(to, "        --%s) words='", flags[i].name);
                        put_values(to, &flags[i]);
                        fputs("' ;;\n", to);
                } else if (flags[i].value) { /* the shell's default: files */
                        fprintf(to, "        --%s) return ;;\n", flags[i].name);
                }
        }
}

#define SPACES "kvctl spaces 2>/dev/null | awk 'any { print $1 } /^SPACE / { any = 1 }'"

static void put_bash(FILE *to) {
        fputs("# bash completion for kvctl, made by: kvctl completion bash\n"
              "_kvctl_spaces() { " SPACES "; }\n"
              "_kvctl() {\n"
              "        local cur=${COMP_WORDS[COMP_CWORD]} verb= words= word\n"
              "        for word in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n"
              "                [[ $word == -* ]] || verb+=\"$word \"\n"
              "        done\n"
              "        case ${COMP_WORDS[COMP_CWORD-1]} in\n",
              to);
        bash_values(to);
        fputs("        *) case $verb in\n        '') words='", to);
        each_word(to, "", bash_word);
        fputs("' ;;\n", to);
        each_group(to, bash_group);
        for (unsigned i = 0; i < n_verbs; i++)
                bash_verb(to, &verbs[i]);
        fputs("        esac ;;\n"
              "        esac\n"
              "        COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
              "}\n"
              "complete -o default -F _kvctl kvctl\n",
              to);
}

/* ---- zsh ------------------------------------------------------------------------------------- */

static void zsh_word(FILE *to, const char *word, const char *text) {
        fprintf(to, " %s:", word);
        put_quoted(to, text);
}

static void zsh_group(FILE *to, const char *group) {
        fprintf(to, "        ('%s ') all=(", group);
        each_word(to, group, zsh_word);
        fputs(") ;;\n", to);
}

static void zsh_verb(FILE *to, const struct verb *verb) {
        fprintf(to, "        ('%s '*) all=(", verb->name);
        for (unsigned i = 0; i < N_FLAGS; i++)
                if (flags_of(verb) & FLAG_BIT(i)) {
                        fprintf(to, " --%s:", flags[i].name);
                        put_quoted(to, flags[i].text);
                }
        fputs(wants_space(verb) ? ") ; compadd - $(" SPACES ") ;;\n" : ") ; _files ;;\n", to);
}

static void zsh_values(FILE *to) {
        for (unsigned i = 0; i < N_FLAGS; i++) {
                if (takes_word(&flags[i])) {
                        fprintf(to, "        (--%s) compadd - ", flags[i].name);
                        put_values(to, &flags[i]);
                        fputs("; return ;;\n", to);
                } else if (flags[i].value) {
                        fprintf(to, "        (--%s) %sreturn ;;\n", flags[i].name,
                                takes_file(&flags[i]) ? "_files; " : "");
                }
        }
}

static void put_zsh(FILE *to) {
        fputs("#compdef kvctl\n"
              "# zsh completion for kvctl, made by: kvctl completion zsh\n"
              "_kvctl() {\n"
              "        local -a all\n"
              "        case $words[CURRENT-1] in\n",
              to);
        zsh_values(to);
        fputs("        esac\n"
              "        case \"${(j: :)${(@)words[2,CURRENT-1]:#-*}} \" in\n"
              "        (' ') all=(",
              to);
        each_word(to, "", zsh_word);
        fputs(") ;;\n", to);
        each_group(to, zsh_group);
        for (unsigned i = 0; i < n_verbs; i++)
                zsh_verb(to, &verbs[i]);
        fputs("        esac\n"
              "        _describe kvctl all\n"
              "}\n"
              "if [[ $funcstack[1] == _kvctl ]]; then _kvctl \"$@\"; else compdef _kvctl kvctl; fi\n",
              to);
}

/* ---- fish ------------------------------------------------------------------------------------ */

static void fish_word(FILE *to, const char *word, const char *text) {
        fprintf(to, "-a %s -d ", word);
        put_quoted(to, text);
        fputc('\n', to);
}

static void fish_first(FILE *to, const char *word, const char *text) {
        fputs("complete -c kvctl -n '__kvctl_at' ", to);
        fish_word(to, word, text);
}

static void fish_verb(FILE *to, const struct verb *verb) {
        const char *second = strchr(verb->name, ' ');

        if (second) {
                fprintf(to, "complete -c kvctl -n '__kvctl_at %.*s' ", (int)(second - verb->name),
                        verb->name);
                fish_word(to, second + 1, verb->text);
        }
        for (unsigned i = 0; i < N_FLAGS; i++) {
                if (!(flags_of(verb) & FLAG_BIT(i)))
                        continue;
                fprintf(to, "complete -c kvctl -n '__kvctl_in %s' -l %s", verb->name, flags[i].name);
                if (takes_word(&flags[i])) {
                        fputs(" -x -a '", to);
                        put_values(to, &flags[i]);
                        fputc('\'', to);
                } else if (flags[i].value) {
                        fputs(takes_file(&flags[i]) ? " -r -F" : " -x", to);
                }
                fputs(" -d ", to);
                put_quoted(to, flags[i].text);
                fputc('\n', to);
        }
        if (wants_space(verb))
                fprintf(to, "complete -c kvctl -n '__kvctl_in %s' -a '(__kvctl_spaces)' -d space\n",
                        verb->name);
}

static void put_fish(FILE *to) {
        fputs("# fish completion for kvctl, made by: kvctl completion fish\n"
              "function __kvctl_words; string match -v -- '-*' (commandline -opc)[2..]; end\n"
              "function __kvctl_at; test \"$(__kvctl_words | string join ' ')\" = \"$argv\"; end\n"
              "function __kvctl_in; string match -q -- \"$argv *\" \"$(__kvctl_words | string join ' ') \"; end\n"
              "function __kvctl_spaces; " SPACES "; end\n"
              "complete -c kvctl -f\n",
              to);
        each_word(to, "", fish_first);
        for (unsigned i = 0; i < n_verbs; i++)
                fish_verb(to, &verbs[i]);
}

/* ---- the verb -------------------------------------------------------------------------------- */

static const struct {
        const char *name;
        void (*put)(FILE *to);
} shells[] = {{"bash", put_bash}, {"zsh", put_zsh}, {"fish", put_fish}};

int verb_completion(struct kvctl *kvctl, struct answer *answer) {
        const char *shell = kvctl->args.operand[0];
        char *text = NULL;
        unsigned i = 0;
        size_t size;
        FILE *to;

        while (i < ARRAY_SIZE(shells) && strcmp(shells[i].name, shell) != 0)
                i++;
        if (i == ARRAY_SIZE(shells))
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "no completion for \"%s\": bash, zsh or fish", shell);
        to = open_memstream(&text, &size);
        if (!to)
                return kvctl_out_of_memory(kvctl);
        shells[i].put(to);
        fclose(to);
        answer_picture(answer, text);
        return 0;
}
