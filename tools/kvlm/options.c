/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvlm/options.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "client/kvd.h"
#include "ipc/base/util.h"
#include "tools/kvlm/note.h"

static const char help[] =
        "Usage: kvlm --model DIR (--prompts FILE | --text FILE | --tokens FILE | --tokenize FILE) [OPTION]...\n"
        "Runs a language model whose keys and values lie in the cache of a kvd daemon, used where they are.\n"
        "\n"
        "A FILE of - is standard input. Without a daemon, and where the cache has no room, kvlm computes in memory\n"
        "of its own; answers are the same to the last bit.\n"
        "\n"
        "Input:\n"
        "  --model DIR          directory of model.safetensors, config.json and vocab.txt\n"
        "  --prompts FILE       one prompt a line, as JSON: {\"prompt\": \"...\"}\n"
        "  --text FILE          the whole file is one prompt\n"
        "  --tokens FILE        the file is one prompt, as token ids\n"
        "  --document FILE      text that stands before every prompt\n"
        "  --tokenize FILE      print the token ids of a text on one line, and do nothing else; a prompt's ids\n"
        "                       are those with <bos> (1) before them\n"
        "\n"
        "Cache:\n"
        "  --socket PATH        socket of the daemon (default: $KVD_SOCKET, or /run/kvd-0.sock)\n"
        "  --space NAME         space in the cache (default: the name of the model's directory)\n"
        "  --no-share           use no daemon\n"
        "  --kv-type TYPE       keys and values as f32, f16 or bf16 (default f32)\n"
        "  --verify             after each prompt, compute what was reused anew and compare every byte\n"
        "\n"
        "Answers:\n"
        "  --max-tokens N       length of an answer at most (default 64)\n"
        "  --stop STRING        end of an answer, \\n and \\t understood (default \\n; empty: none)\n"
        "  --temperature T      0 takes the most likely token (default 0)\n"
        "  --top-k N            draw from the N most likely tokens (default: all)\n"
        "  --top-p P            draw from the most likely tokens that make up P (default 1)\n"
        "  --seed S             for drawing (default 0)\n"
        "\n"
        "Computing:\n"
        "  --chunk N            prompt tokens computed at a time (default 256)\n"
        "  --threads N          threads (default 1)\n"
        "  --variant NAME       instructions: avx512, avx2 or scalar (default: the best there is)\n"
        DEVICE_HELP
        "\n"
        METHODS_HELP
        "\n"
        POOLED_HELP
        "\n"
        DIFFUSE_HELP
        "\n"
        "Output:\n"
        "  --json               one JSON line a prompt\n"
        "  --progress           show how far a prompt is on standard error\n"
        "  --logits FILE        with --tokens: write the logits of every token as little-endian float32, row by row\n"
        "  --help, --version\n"
        "\n"
        "Exit status: 0 all prompts answered; 1 some failed, or something is wrong with the model; 2 wrong usage;\n"
        "130 interrupted.\n";

enum {
        OPT_MODEL = 256, OPT_SOCKET, OPT_SPACE, OPT_NO_SHARE, OPT_PROMPTS, OPT_TEXT, OPT_TOKENS, OPT_TOKENIZE,
        OPT_DOCUMENT, OPT_KV_TYPE, OPT_VERIFY, OPT_MAX_TOKENS, OPT_STOP, OPT_TEMPERATURE, OPT_TOP_K, OPT_TOP_P,
        OPT_SEED, OPT_CHUNK, OPT_THREADS, OPT_VARIANT, OPT_JSON, OPT_PROGRESS, OPT_LOGITS, OPT_HELP, OPT_VERSION,
        OPT_DEVICE, OPT_DIFFUSE, OPT_POOLED,
        OPT_METHOD, /* and up: + index of the method's parameter */
};

static const struct option basic[] = {
        {"model", required_argument, NULL, OPT_MODEL},
        {"socket", required_argument, NULL, OPT_SOCKET},
        {"space", required_argument, NULL, OPT_SPACE},
        {"no-share", no_argument, NULL, OPT_NO_SHARE},
        {"prompts", required_argument, NULL, OPT_PROMPTS},
        {"text", required_argument, NULL, OPT_TEXT},
        {"tokens", required_argument, NULL, OPT_TOKENS},
        {"tokenize", required_argument, NULL, OPT_TOKENIZE},
        {"document", required_argument, NULL, OPT_DOCUMENT},
        {"kv-type", required_argument, NULL, OPT_KV_TYPE},
        {"verify", no_argument, NULL, OPT_VERIFY},
        {"max-tokens", required_argument, NULL, OPT_MAX_TOKENS},
        {"stop", required_argument, NULL, OPT_STOP},
        {"temperature", required_argument, NULL, OPT_TEMPERATURE},
        {"top-k", required_argument, NULL, OPT_TOP_K},
        {"top-p", required_argument, NULL, OPT_TOP_P},
        {"seed", required_argument, NULL, OPT_SEED},
        {"chunk", required_argument, NULL, OPT_CHUNK},
        {"threads", required_argument, NULL, OPT_THREADS},
        {"variant", required_argument, NULL, OPT_VARIANT},
        {"json", no_argument, NULL, OPT_JSON},
        {"progress", no_argument, NULL, OPT_PROGRESS},
        {"logits", required_argument, NULL, OPT_LOGITS},
        {"help", no_argument, NULL, OPT_HELP},
        {"version", no_argument, NULL, OPT_VERSION},
        DEVICE_OPTIONS(OPT_DEVICE),
        DIFFUSE_OPTIONS(OPT_DIFFUSE),
        POOLED_OPTIONS(OPT_POOLED),
};

static struct option table[ARRAY_SIZE(basic) + METHOD_NAMES + 1]; /* basic, those of methods, and a zero */

static void fill_table(void) {
        memcpy(table, basic, sizeof basic);
        for (size_t i = 0; i < METHOD_NAMES; i++)
                table[ARRAY_SIZE(basic) + i] = (struct option){method_name(i), required_argument, NULL,
                                                               OPT_METHOD + (int)i};
}

/* ---- values ---- */

static int read_u64(const char *name, const char *text, uint64_t least, uint64_t most, uint64_t *ret) {
        char *end;

        errno = 0;
        *ret = strtoull(text, &end, 10);
        if (!isdigit((unsigned char)*text) || *end || errno || *ret < least || *ret > most)
                return note(-EINVAL, "--%s takes a number from %ju to %ju, not \"%s\"", name, (uintmax_t)least,
                            (uintmax_t)most, text);
        return 0;
}

static int read_u32(const char *name, const char *text, uint32_t least, uint32_t most, uint32_t *ret) {
        uint64_t value;
        int r = read_u64(name, text, least, most, &value);

        if (r == 0)
                *ret = (uint32_t)value;
        return r;
}

static int read_float(const char *name, const char *text, float most, float *ret) {
        char *end;

        *ret = strtof(text, &end);
        if (end == text || *end || !(*ret >= 0.0f && *ret <= most))
                return note(-EINVAL, "--%s takes a number from 0 to %g, not \"%s\"", name, (double)most, text);
        return 0;
}

static int read_kv_type(const char *text, enum kvd_number *ret) {
        static const char *const names[] = {"f32", "f16", "bf16"};
        static const enum kvd_number types[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16};

        for (size_t i = 0; i < ARRAY_SIZE(names); i++)
                if (strcmp(text, names[i]) == 0) {
                        *ret = types[i];
                        return 0;
                }
        return note(-EINVAL, "--kv-type takes f32, f16 or bf16, not \"%s\"", text);
}

static int read_space(const char *text, char *ret) {
        size_t good = strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");

        if (good == 0 || text[good] || good > KVD_NAME_MAX)
                return note(-EINVAL, "--space takes 1 to %d letters, digits, dots, hyphens and underscores",
                            KVD_NAME_MAX);
        memcpy(ret, text, good + 1);
        return 0;
}

static int read_stop(const char *text, char **ret) {
        char *to = strdup(text);

        if (!to)
                return note(-ENOMEM, "out of memory");
        free(*ret);
        *ret = to;
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

/* The directory's own name, with what a space's name cannot have replaced. */
static void default_space(const char *directory, char *ret) {
        size_t end = strlen(directory), start, n;

        while (end > 1 && directory[end - 1] == '/')
                end--;
        for (start = end; start > 0 && directory[start - 1] != '/'; start--)
                ;
        n = MIN(end - start, (size_t)KVD_NAME_MAX);
        for (size_t i = 0; i < n; i++) {
                unsigned char c = (unsigned char)directory[start + i];

                ret[i] = (char)(c < 0x80 && (isalnum(c) || strchr("._-", c)) ? c : '-');
        }
        ret[n] = '\0';
        if (n == 0 || strcmp(ret, ".") == 0 || strcmp(ret, "..") == 0)
                strcpy(ret, "kvlm");
}

/* ---- command line ---- */

static int set_number(struct options *o, int option, const char *name, const char *value) {
        switch (option) {
        case OPT_MAX_TOKENS:
                return read_u32(name, value, 0, 1 << 24, &o->max_tokens);
        case OPT_CHUNK:
                return read_u32(name, value, 1, 65536, &o->chunk);
        case OPT_THREADS:
                return read_u32(name, value, 1, 1024, &o->threads);
        case OPT_TOP_K:
                return read_u32(name, value, 0, 1 << 24, &o->sampling.top_k);
        case OPT_TOP_P:
                return read_float(name, value, 1.0f, &o->sampling.top_p);
        case OPT_TEMPERATURE:
                return read_float(name, value, 100.0f, &o->sampling.temperature);
        default:
                return read_u64(name, value, 0, UINT64_MAX, &o->sampling.seed);
        }
}

static int set_flag(struct options *o, int option) {
        switch (option) {
        case OPT_NO_SHARE:
                o->share = false;
                return 1;
        case OPT_VERIFY:
                o->verify = true;
                return 1;
        case OPT_JSON:
                o->json = true;
                return 1;
        case OPT_PROGRESS:
                o->progress = true;
                return 1;
        case OPT_HELP:
                fputs(help, stdout);
                return 0;
        default:
                puts("kvlm (kvd) " KVD_VERSION);
                return 0;
        }
}

/* Options whose value is kept as it is. */
static const char **plain_value(struct options *o, int option) {
        switch (option) {
        case OPT_MODEL:
                return &o->model;
        case OPT_SOCKET:
                return &o->socket;
        case OPT_VARIANT:
                return &o->variant;
        case OPT_PROMPTS:
                return &o->prompts;
        case OPT_TEXT:
                return &o->text;
        case OPT_TOKENS:
                return &o->tokens;
        case OPT_TOKENIZE:
                return &o->tokenize;
        case OPT_DOCUMENT:
                return &o->document;
        case OPT_LOGITS:
                return &o->logits;
        default:
                return NULL;
        }
}

static int set(struct options *o, const struct option *option, const char *value) {
        const char **plain = plain_value(o, option->val);
        int r;

        if (option->has_arg == no_argument)
                return set_flag(o, option->val);
        if (option->val >= OPT_METHOD) {
                o->method_values[option->val - OPT_METHOD] = value;
                return 1;
        }
        if (plain) {
                *plain = value;
                return 1;
        }
        if (option->val == OPT_SPACE)
                r = read_space(value, o->space);
        else if (option->val == OPT_STOP)
                r = read_stop(value, &o->stop);
        else if (option->val == OPT_KV_TYPE)
                r = read_kv_type(value, &o->kv_type);
        else if (option->val == OPT_DEVICE)
                r = device_option(&o->device, option->name, value);
        else if (option->val == OPT_DIFFUSE)
                r = diffuse_option(&o->diffuse, option->name, value);
        else if (option->val == OPT_POOLED)
                r = pooled_option(&o->pooled, option->name, value);
        else
                r = set_number(o, option->val, option->name, value);
        return r < 0 ? r : 1;
}

static int check(struct options *o) {
        int inputs = !!o->prompts + !!o->text + !!o->tokens + !!o->tokenize;

        if (!o->model)
                return note(-EINVAL, "--model DIR is missing (kvlm --help tells more)");
        if (inputs != 1)
                return note(-EINVAL, "give one of --prompts, --text, --tokens and --tokenize (kvlm --help tells more)");
        if (o->logits && !o->tokens)
                return note(-EINVAL, "--logits needs --tokens");
        if (o->document && (o->tokens || o->tokenize))
                return note(-EINVAL, "--document stands before texts: it needs --prompts or --text");
        if (!*o->space)
                default_space(o->model, o->space);
        return methods_read(o->method_values, &o->methods) < 0 ? -EINVAL : 1;
}

static int parse(int argc, char **argv, struct options *o) {
        int option, index, r;

        opterr = 0;
        fill_table();
        o->stop = strdup("\n");
        if (!o->stop)
                return note(-ENOMEM, "out of memory");
        while ((option = getopt_long(argc, argv, ":", table, &index)) != -1) {
                if (option == ':')
                        return note(-EINVAL, "%s needs a value", argv[optind - 1]);
                if (option == '?')
                        return note(-EINVAL, "unknown option %s (kvlm --help lists them)", argv[optind - 1]);
                r = set(o, table + index, optarg);
                if (r <= 0)
                        return r;
        }
        if (optind < argc)
                return note(-EINVAL, "what is \"%s\"? (kvlm --help tells more)", argv[optind]);
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
                .device = DEVICE_DEFAULTS,
                .diffuse = DIFFUSE_DEFAULTS,
                .pooled = POOLED_DEFAULTS,
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
