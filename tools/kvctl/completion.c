/* SPDX-License-Identifier: Apache-2.0 */

/*
 * completion: a script that completes kvctl's command line in a shell. The script runs "kvctl
 * completion next" with the words so far. The answer comes from the tables that also parse the
 * command line, and where a space is expected from the daemon.
 */

#include <errno.h>

#include "tools/kvctl/kvctl.h"

/* A shell lists files if there is no answer; fish must be told where. */
static const struct {
        const char *name, *script;
} shells[] = {
        {"bash",
         "# bash completion for kvctl, made by: kvctl completion bash\n"
         "_kvctl() {\n"
         "        local all=$(kvctl completion next -- \"${COMP_WORDS[@]:1:COMP_CWORD-1}\" 2>/dev/null | cut -f 1)\n"
         "        COMPREPLY=($(compgen -W \"$all\" -- \"${COMP_WORDS[COMP_CWORD]}\"))\n"
         "}\n"
         "complete -o default -F _kvctl kvctl\n"},
        {"zsh",
         "#compdef kvctl\n"
         "# zsh completion for kvctl, made by: kvctl completion zsh\n"
         "_kvctl() {\n"
         "        local -a all\n"
         "        all=(${(f)\"$(kvctl completion next -- \"${(@)words[2,CURRENT-1]}\" 2>/dev/null)\"})\n"
         "        all=(${all/$'\\t'/:})\n"
         "        _describe kvctl all || _files\n"
         "}\n"
         "if [[ $funcstack[1] == _kvctl ]]; then _kvctl \"$@\"; else compdef _kvctl kvctl; fi\n"},
        {"fish",
         "# fish completion for kvctl, made by: kvctl completion fish\n"
         "complete -c kvctl -f -a '(kvctl completion next -- (commandline -opc)[2..] 2>/dev/null)'\n"
         "complete -c kvctl -l socket -r -F\n"},
};

/* ---- what may follow ------------------------------------------------------------------------- */

/* The words after the first one of a group, or the first words if group is NULL. */
static void put_words(FILE *to, const char *group) {
        for (unsigned i = 0; i < n_verbs; i++) {
                const char *name = verbs[i].name;
                size_t n = strcspn(name, " ");

                if (group && verb_is_of(&verbs[i], group))
                        fprintf(to, "%s\t%s\n", name + n + 1, verbs[i].text);
                else if (!group && (i == 0 || strncmp(verbs[i - 1].name, name, n + 1) != 0))
                        fprintf(to, "%.*s\t%s\n", (int)n, name,
                                name[n] ? "several verbs" : verbs[i].text);
        }
}

/* The words of a value such as "f32|f16"; nothing for a name such as N. */
static void put_values(FILE *to, const char *value) {
        bool words = strchr(value, '|');

        for (size_t n; words && *value; value += n + (value[n] == '|')) {
                n = strcspn(value, "|");
                fprintf(to, "%.*s\n", (int)n, value);
        }
}

static void put_flags(FILE *to, const struct verb *verb) {
        uint64_t taken = FLAGS_GLOBAL | verb->required | verb->optional;

        for (unsigned i = 0; i < N_FLAGS; i++)
                if (taken & FLAG_BIT(i))
                        fprintf(to, "--%s\t%s\n", flags[i].name, flags[i].text);
}

static void put_spaces(FILE *to, struct kvctl *kvctl, const struct verb *verb) {
        struct kvd_msg_space_info_reply info;
        bool wanted = strncmp(verb->operands, "[SPACE]", 7) == 0 ||
                      strncmp(verb->operands, "SPACE", 5) == 0 ||
                      (verb_is_of(verb, "space") && strcmp(verb->name, "space create") != 0);
        uint32_t cursor = 0;

        while (wanted && kvctl_next_space(kvctl, &cursor, &info) == 1)
                fprintf(to, "%s\tspace\n", space_name_of(&info).name);
}

/* The first operand is in the place of the program's name. */
static void put_next(FILE *to, struct kvctl *kvctl) {
        const char *last = kvctl->args.operand[kvctl->args.n_operands - 1];
        struct kvd_why why;
        struct args args;
        int r;

        for (unsigned i = 0; i < N_FLAGS; i++)
                if (flags[i].value && strncmp(last, "--", 2) == 0 &&
                    strcmp(last + 2, flags[i].name) == 0) {
                        put_values(to, flags[i].value);
                        return;
                }
        r = args_parse(&args, (int)kvctl->args.n_operands, (char **)kvctl->args.operand, &why);
        if (args.verb) {
                put_flags(to, args.verb);
                put_spaces(to, kvctl, args.verb);
        } else if (args.group || r == 0) {
                put_words(to, args.group);
        }
}

int verb_completion(struct kvctl *kvctl, struct answer *answer) {
        const char *shell = kvctl->args.operand[0];
        char *text = NULL;
        unsigned i = 0;
        size_t size;
        FILE *to;

        while (i < ARRAY_SIZE(shells) && strcmp(shells[i].name, shell) != 0)
                i++;
        if (i == ARRAY_SIZE(shells) && strcmp(shell, "next") != 0)
                return kvctl_fail(kvctl, KVCTL_USAGE, -EINVAL,
                                  "no completion for \"%s\": bash, zsh or fish", shell);
        to = open_memstream(&text, &size);
        if (!to)
                return kvctl_out_of_memory(kvctl);
        if (i < ARRAY_SIZE(shells))
                fputs(shells[i].script, to);
        else
                put_next(to, kvctl);
        fclose(to);
        answer_picture(answer, text);
        return 0;
}
