/* SPDX-License-Identifier: Apache-2.0 */

/* The command line: one table of options, which drives both parsing and the help. */

#include "tools/kvlm/options.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "client/kvd.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

enum { ORDINAL_MAX = 1023 };

struct row {
        const char *name;
        int (*read)(const struct row *, const char *text, struct options *);
        size_t at;          /* offset of the member of struct options */
        double least, most; /* range of a number */
        const char *words;  /* the choices, by number, separated by blanks */
        const char *value;  /* the value's name in the help; NULL if the option takes none */
        const char *help;
};

/* ---- values ---------------------------------------------------------------------------------- */

static void *member(const struct row *row, struct options *o) {
        return (char *)o + row->at;
}

static int read_text(const struct row *row, const char *text, struct options *o) {
        *(const char **)member(row, o) = text;
        return 0;
}

static int read_yes(const struct row *row, const char *text, struct options *o) {
        bool yes = strcmp(text, "yes") == 0;

        *(bool *)member(row, o) = yes;
        return yes || strcmp(text, "no") == 0 ?
                       0 :
                       refuse(-EINVAL, "--%s takes yes or no, not \"%s\"", row->name, text);
}

/* A flag takes no value and sets the opposite of the default. */
static int read_flag(const struct row *row, const char *text, struct options *o) {
        *(bool *)member(row, o) = row->most > 0;
        return 0;
}

static int read_u64(const struct row *row, const char *text, struct options *o) {
        uint64_t *to = member(row, o);
        char *end;

        errno = 0;
        *to = strtoull(text, &end, 10);
        if (!isdigit((unsigned char)*text) || *end || errno)
                return refuse(-EINVAL, "--%s takes a number from 0 to %ju, not \"%s\"", row->name,
                              UINTMAX_MAX, text);
        return 0;
}

static int read_u32(const struct row *row, const char *text, struct options *o) {
        unsigned long value;
        char *end;

        errno = 0;
        value = strtoul(text, &end, 10);
        *(uint32_t *)member(row, o) = (uint32_t)value;
        if (!isdigit((unsigned char)*text) || *end || errno || value < row->least ||
            value > row->most)
                return refuse(-EINVAL, "--%s takes a number from %.0f to %.0f, not \"%s\"",
                              row->name, row->least, row->most, text);
        return 0;
}

static int read_float(const struct row *row, const char *text, struct options *o) {
        float *to = member(row, o);
        char *end;

        *to = strtof(text, &end);
        if (end == text || *end || !(*to >= row->least && *to <= row->most))
                return refuse(-EINVAL, "--%s takes a number from %g to %g, not \"%s\"", row->name,
                              row->least, row->most, text);
        return 0;
}

static int read_word(const struct row *row, const char *text, struct options *o) {
        int i = kvd_word_index(row->words, text);

        if (i < 0)
                return refuse(-EINVAL, "--%s takes one of these: %s; not \"%s\"", row->name,
                              row->words, text);
        *(int *)member(row, o) = i + (int)row->least;
        return 0;
}

static int read_space(const struct row *row, const char *text, struct options *o) {
        if (!kvd_is_name(text, KVD_NAME_MAX))
                return refuse(-EINVAL,
                              "--space takes 1 to %d letters, digits, dots, hyphens and underscores",
                              KVD_NAME_MAX);
        strcpy(o->space, text);
        return 0;
}

static int read_stop(const struct row *row, const char *text, struct options *o) {
        char *to = strdup(text);

        if (!to)
                return refuse(-ENOMEM, "out of memory");
        free(o->stop);
        o->stop = to;
        for (; *text; text++) {
                if (text[0] == '\\' && text[1] && strchr("nt\\", text[1])) {
                        text++;
                        *to++ = (char)(*text == 'n' ? '\n' : *text == 't' ? '\t' : '\\');
                } else {
                        *to++ = *text;
                }
        }
        *to = '\0';
        return 0;
}

static int read_device(const struct row *row, const char *text, struct options *o) {
        int use = kvd_word_index(row->words, text);
        char *end = NULL;
        long ordinal;

        o->device.ordinal = -1;
        o->use_device = use < 0 ? DEVICE_GIVEN : (enum use_device)use;
        if (use >= 0)
                return 0;
        if (strncmp(text, "cuda:", 5) != 0 || !isdigit((unsigned char)text[5]))
                return refuse(-EINVAL, "--device takes auto, cpu, cuda or cuda:N, not \"%s\"",
                              text);
        ordinal = strtol(text + 5, &end, 10);
        if (*end || ordinal > ORDINAL_MAX)
                return refuse(-EINVAL,
                              "--device takes a number from 0 to %d after cuda:, not \"%s\"",
                              ORDINAL_MAX, text + 5);
        o->device.ordinal = (cu_device)ordinal;
        return 0;
}

static int show_help(const struct row *row, const char *text, struct options *o);

static int show_version(const struct row *row, const char *text, struct options *o) {
        puts("kvlm (kvd) " KVD_VERSION);
        return 1;
}

/* ---- the table of options -------------------------------------------------------------------- */

#define AT(member) offsetof(struct options, member)
#define SECTION(title) {.help = title}
#define TEXT(name, member, value, help) {name, read_text, AT(member), 0, 0, NULL, value, help}
#define FLAG(name, member, to, help) {name, read_flag, AT(member), 0, to, NULL, NULL, help}
#define YES(name, member, help) {name, read_yes, AT(member), 0, 0, NULL, "YES", help}
#define U32(name, member, least, most, help) \
        { name, read_u32, AT(member), least, most, NULL, "N", help }
#define FLOAT(name, member, most, value, help) \
        { name, read_float, AT(member), 0, most, NULL, value, help }
#define WORD(name, member, least, words, value, help) \
        { name, read_word, AT(member), least, 0, words, value, help }

static const struct row rows[] = {
        SECTION("Input:"),
        TEXT("model", model, "DIR", "directory of model.safetensors, config.json and vocab.txt"),
        TEXT("prompts", prompts, "FILE", "one prompt per line, as JSON: {\"prompt\": \"...\"}"),
        TEXT("text", text, "FILE", "the whole file is one prompt"),
        TEXT("tokens", tokens, "FILE", "the file is one prompt, as token ids"),
        TEXT("document", document, "FILE", "text to put before every prompt"),
        TEXT("tokenize", tokenize, "FILE",
             "print the token ids of a text on one line, and do nothing else; a\n"
             "prompt's ids are those with <bos> (1) before them"),
        SECTION("Cache:"),
        TEXT("socket", socket, "PATH",
             "socket of the daemon (default: $KVD_SOCKET, or /run/kvd-0.sock)"),
        {"space", read_space, 0, 0, 0, NULL, "NAME",
         "space in the cache (default: the name of the model's directory)"},
        FLAG("no-share", share, 0, "use no daemon"),
        WORD("kv-type", kv_type, KVD_NUMBER_F32, "f32 f16 bf16", "TYPE",
             "keys and values as f32 (default), f16 or bf16"),
        FLAG("verify", verify, 1,
             "after each prompt, recompute what was reused and compare every byte"),
        SECTION("Answers:"),
        U32("max-tokens", max_tokens, 0, 1 << 24, "maximum length of an answer (default 64)"),
        {"stop", read_stop, 0, 0, 0, NULL, "STRING",
         "end of an answer, \\n and \\t understood (default \\n; empty: none)"},
        FLOAT("temperature", sampling.temperature, 100, "T",
              "0 takes the most likely token (default 0)"),
        U32("top-k", sampling.top_k, 0, 1 << 24,
            "draw from the N most likely tokens (default: all)"),
        FLOAT("top-p", sampling.top_p, 1, "P",
              "draw from the most likely tokens that make up P (default 1)"),
        {"seed", read_u64, AT(sampling.seed), 0, 0, NULL, "S", "random seed (default 0)"},
        SECTION("Computing:"),
        U32("chunk", chunk, 1, 65536, "prompt tokens computed at a time (default 256)"),
        U32("decode-tail", decode_tail, 0, 1 << 24,
            "compute a prompt's last N tokens one by one, as if they were\n"
            "generated"),
        U32("threads", threads, 1, 1024, "threads (default 1)"),
        TEXT("variant", variant, "NAME",
             "instructions: avx512, avx2 or scalar (default: the best available)"),
        {"device", read_device, 0, 0, 0, "auto cpu cuda", "WHERE",
         "cpu, cuda or cuda:N; auto (default): where the daemon's pool is"},
        WORD("matmul", device.products, 0, "f32 tf32 bf16", "TYPE",
             "on a GPU: weights and products in f32 (default), tf32 or bf16"),
        WORD("decode", device.decode, 0, "fast exact", "HOW",
             "on a GPU: fast (default), or exact: generated tokens have the bits\nof a prompt"),
        SECTION("Sequences of the pool (the space's settings turn methods on for them):"),
        WORD("sequence", pooled.use, 0, "auto off on", "WHEN",
             "auto: if a method is on (default); on; or off"),
        YES("own-prompt", pooled.own_prompt,
            "yes: the prompt is part of the sequence, and not shared as a prefix\n"
            "(default no)"),
        YES("align-steps", pooled.align,
            "long steps of reasoning begin in a fresh block (default yes)"),
        U32("sync-wait", pooled.wait_ms, 0, 10000,
            "maximum time to wait for the pool, in milliseconds: for a missing\n"
            "block, an eviction or a sharing decision (default 500)"),
        SECTION("Masked diffusion (a model whose config.json says \"attention\": \"bidirectional\"):"),
        U32("gen-length", diffuse.length, 1, 1 << 20,
            "length of the answer (default 64; a line of --prompts may have\n"
            "its \"gen_length\")"),
        U32("steps", diffuse.steps, 1, 1 << 20,
            "denoising steps (default: one per token; or a line's \"steps\")"),
        WORD("bicache", diffuse.bicache, 0, "space off naive on", "MODE",
             "the document's keys and values: off computes them in every step;\n"
             "on shares those of shallow layers and refreshes those of deep ones;\n"
             "naive shares all; space is on or off, as \"kvctl space set\" says\n(default space)"),
        TEXT("bicache-table", bicache_table, "FILE",
             "how many layers are shallow, by the document's share of a request\n"
             "(default: the space's table)"),
        U32("bicache-depth", diffuse.depth, 1, 1024,
            "treat the first N layers as shallow, ignoring the table"),
        U32("prefix-tokens", prefix, 1, 1 << 24, "with --tokens: the first N are the document"),
        U32("refresh", diffuse.refresh, 1, 1 << 20,
            "steps between refreshes (default: the space's setting, or 16)"),
        TEXT("profile-out", profile_out, "FILE",
             "generate nothing, but append to FILE how similar the document's keys\n"
             "and values are with and without the rest of the request, layer by\n"
             "layer, one JSON line per request"),
        U32("profile-step", diffuse.profile_step, 1, 100,
            "the same for the first N, 2 N, 3 N ... percent of each request"),
        SECTION("Output:"),
        FLAG("json", json, 1, "one JSON line per prompt"),
        FLAG("progress", progress, 1, "show the progress of a prompt on standard error"),
        TEXT("logits", logits, "FILE",
             "with --tokens: write the logits of every token as little-endian\nfloat32, row by row"),
        {"help", show_help, 0, 0, 0, NULL, NULL, "or -h"},
        {"version", show_version, 0, 0, 0, NULL, NULL, "or -V"},
};

/* ---- help ------------------------------------------------------------------------------------ */

enum { COLUMN = 23, WIDTH = 79 };

/* Prints words from column at on, in lines of WIDTH that begin at COLUMN. */
static void print_words(const char *text, int at) {
        for (size_t n; *text; text += n + strspn(text + n, " \n")) {
                n = strcspn(text, " \n");
                if (at > COLUMN && at + 1 + (int)n > WIDTH)
                        at = printf("\n") - 1;
                at += printf("%*s%.*s", at < COLUMN ? COLUMN - at : 1, "", (int)n, text);
        }
        putchar('\n');
}

static void print_row(const struct row *row) {
        if (row->name)
                print_words(row->help, printf("  --%s%s%s", row->name, row->value ? " " : "",
                                              row->value ? row->value : ""));
        else
                printf("\n%s\n", row->help);
}

static int show_help(const struct row *row, const char *text, struct options *o) {
        puts("Usage: kvlm --model DIR (--prompts FILE | --text FILE | --tokens FILE |\n"
             "            --tokenize FILE) [OPTION]...\n"
             "Runs a language model whose keys and values are in the cache of a kvd daemon,\n"
             "used in place.\n\n"
             "A FILE of - is standard input. Without a daemon, and where the cache has no\n"
             "room, kvlm computes in its own memory; answers are the same to the last bit.");
        for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
                print_row(rows + i);
        puts("\nExit status: 0 all prompts answered; 1 some failed, or the model could not be\n"
             "used; 2 wrong usage; 130 interrupted.");
        return 1;
}

/* ---- command line ---------------------------------------------------------------------------- */

/* The directory's base name; characters that a space's name cannot have are replaced. */
static void default_space(const char *directory, char *ret) {
        size_t end = strlen(directory), start, n;

        while (end > 1 && directory[end - 1] == '/')
                end--;
        for (start = end; start > 0 && directory[start - 1] != '/'; start--)
                ;
        n = MIN(end - start, (size_t)KVD_NAME_MAX);
        for (size_t i = 0; i < n; i++) {
                char c = directory[start + i];

                ret[i] = kvd_is_name_letter(c) ? c : '-';
        }
        ret[n] = '\0';
        if (n == 0 || strcmp(ret, ".") == 0 || strcmp(ret, "..") == 0)
                strcpy(ret, "kvlm");
}

static int check(struct options *o) {
        int inputs = !!o->prompts + !!o->text + !!o->tokens + !!o->tokenize;

        if (!o->model)
                return refuse(-EINVAL, "--model DIR is missing (see kvlm --help)");
        if (inputs != 1)
                return refuse(-EINVAL,
                              "give one of --prompts, --text, --tokens and --tokenize (see kvlm --help)");
        if (o->logits && !o->tokens)
                return refuse(-EINVAL, "--logits needs --tokens");
        if (o->document && (o->tokens || o->tokenize))
                return refuse(-EINVAL,
                              "--document is put before texts: it needs --prompts or --text");
        if (!*o->space)
                default_space(o->model, o->space);
        return 1;
}

#define FIRST_ROW 256 /* of getopt's values, after the letters */

/* Fills the table for getopt. */
static void fill_table(struct option *to) {
        for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
                if (rows[i].name)
                        *to++ = (struct option){rows[i].name, rows[i].value ? required_argument : no_argument, NULL,
                                                FIRST_ROW + (int)i};
        *to = (struct option){0};
}

static const struct row *row_of(int option) {
        const char *name = option == 'h' ? "help" : "version";
        size_t i = 0;

        if (option >= FIRST_ROW)
                return rows + option - FIRST_ROW;
        while (!rows[i].name || strcmp(rows[i].name, name) != 0)
                i++;
        return rows + i;
}

/* If several letters follow one hyphen, getopt gives the unknown one. */
static int refuse_unknown(char **argv) {
        const char letter[] = {'-', (char)optopt, 0};

        return refuse(-EINVAL, "unknown option %s (kvlm --help lists them)",
                      optopt > 0 && optopt < FIRST_ROW ? letter : argv[optind - 1]);
}

static int parse(int argc, char **argv, struct options *o) {
        struct option table[ARRAY_SIZE(rows) + 1];
        const struct row *row;
        int option, r;

        opterr = 0;
        fill_table(table);
        o->stop = strdup("\n");
        if (!o->stop)
                return refuse(-ENOMEM, "out of memory");
        while ((option = getopt_long(argc, argv, ":hV", table, NULL)) != -1) {
                if (option == ':')
                        return refuse(-EINVAL, "%s needs a value", argv[optind - 1]);
                if (option == '?')
                        return refuse_unknown(argv);
                row = row_of(option);
                r = row->read(row, optarg, o);
                if (r != 0)
                        return MIN(r, 0);
        }
        if (optind < argc)
                return refuse(-EINVAL, "unexpected argument \"%s\" (see kvlm --help)", argv[optind]);
        return check(o);
}

int options_parse(int argc, char **argv, struct options *ret) {
        struct options o = {
                .share = true,
                .kv_type = KVD_NUMBER_F32,
                .max_tokens = 64,
                .chunk = 256,
                .threads = 1,
                .sampling = {.top_p = 1.0f},
                .device = {.ordinal = -1},
                .diffuse = {.length = 64},
                .pooled = {.align = true, .wait_ms = 500},
        };
        int r = parse(argc, argv, &o);

        if (r <= 0)
                options_release(&o);
        else
                *ret = o;
        return r;
}

void options_release(struct options *o) {
        free(o->stop);
        *o = (struct options){0};
}
