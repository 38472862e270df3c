/* SPDX-License-Identifier: Apache-2.0 */

/* The command line: one table of options, which drives both parsing and the help. */

#include "tools/kvlm/options.h"

#include <ctype.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "client/kvd.h"
#include "ipc/base/options.h"
#include "ipc/base/text.h"
#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"

enum { ORDINAL_MAX = 1023 };

enum { SPACE = KVD_OPTION_OWN, KV_TYPE, STOP, DEVICE, HELP, VERSION }; /* kinds of our own */

/* ---- values ---------------------------------------------------------------------------------- */

static int read_space(const char *text, struct options *o) {
        if (!kvd_is_name(text, KVD_NAME_MAX))
                return refuse(
                        -EINVAL,
                        "--space takes 1 to %d letters, digits, dots, hyphens and underscores",
                        KVD_NAME_MAX);
        strcpy(o->space, text);
        return 0;
}

#define KV_TYPES "f32 f16 bf16 int8 int4 fp8 fp8_e5m2"

static int read_kv_type(const char *text, struct options *o) {
        static const enum kvd_number numbers[] = {KVD_NUMBER_F32, KVD_NUMBER_F16, KVD_NUMBER_BF16,
                                                  KVD_NUMBER_Q8,  KVD_NUMBER_Q4,  KVD_NUMBER_E4M3,
                                                  KVD_NUMBER_E5M2};
        int i = kvd_word_index(KV_TYPES, text);

        if (i < 0)
                return refuse(-EINVAL, "--kv-type takes one of these: " KV_TYPES "; not \"%s\"",
                              text);
        o->kv_type = numbers[i];
        o->kv_word = text;
        return 0;
}

static int read_stop(const char *text, struct options *o) {
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

static int read_device(const char *text, struct options *o) {
        int use = kvd_word_index("auto cpu cuda", text);
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

/* ---- the table of options -------------------------------------------------------------------- */

#define AT(member) offsetof(struct options, member)
#define SECTION(title) \
        { .text = title }
#define TEXT(name, member, value, help) \
        { name, 0, value, help, KVD_OPTION_TEXT, .at = AT(member) }
#define FLAG(name, member, to, help) \
        { name, 0, NULL, help, KVD_OPTION_BOOL, AT(member), .most = to }
#define YES(name, member, help) \
        { name, 0, "YES", help, KVD_OPTION_YES, .at = AT(member) }
#define U32(name, member, low, high, help) \
        { name, 0, "N", help, KVD_OPTION_U32, AT(member), .least = low, .most = high }
#define FLOAT(name, member, high, value, help) \
        { name, 0, value, help, KVD_OPTION_FLOAT, AT(member), .most = high }
#define WORD(name, member, first, choices, value, help) \
        { name, 0, value, help, KVD_OPTION_WORD, AT(member), .least = first, .words = choices }

static const struct kvd_option rows[] = {
        SECTION("Input:"),
        TEXT("model", model, "DIR", "directory of model.safetensors, config.json and vocab.txt"),
        TEXT("prompts", prompts, "FILE", "one prompt per line, as JSON: {\"prompt\": \"...\"}"),
        TEXT("text", text, "FILE", "the whole file is one prompt"),
        TEXT("tokens", tokens, "FILE", "the file is one prompt, as token ids"),
        TEXT("document", document, "FILE", "text to put before every prompt"),
        TEXT("tokenize", tokenize, "FILE",
             "print the token ids of a text on one line, and do nothing else; a "
             "prompt's ids are those with <bos> (1) before them"),
        SECTION("Cache:"),
        TEXT("socket", socket, "PATH",
             "socket of the daemon (default: $KVD_SOCKET, or /run/kvd-0.sock)"),
        {"space", 0, "NAME",
         "space in the cache (default: the name of the model's directory, and of the "
         "kv-type if it is not f32)",
         .kind = SPACE},
        FLAG("no-share", share, 0, "use no daemon"),
        {"kv-type", 0, "TYPE",
         "keys and values as f32 (default), f16, bf16, fp8 or fp8_e5m2; or quantised to int8 or int4",
         .kind = KV_TYPE},
        FLAG("verify", verify, 1,
             "after each prompt, recompute what was reused and compare every byte"),
        SECTION("Answers:"),
        U32("max-tokens", max_tokens, 0, 1 << 24, "maximum length of an answer (default 64)"),
        {"stop", 0, "STRING", "end of an answer, \\n and \\t understood (default \\n; empty: none)",
         .kind = STOP},
        FLOAT("temperature", sampling.temperature, 100, "T",
              "0 takes the most likely token (default 0)"),
        U32("top-k", sampling.top_k, 0, 1 << 24,
            "draw from the N most likely tokens (default: all)"),
        FLOAT("top-p", sampling.top_p, 1, "P",
              "draw from the most likely tokens that make up P (default 1)"),
        {"seed", 0, "S", "random seed (default 0)", KVD_OPTION_U64, .at = AT(sampling.seed)},
        SECTION("Computing:"),
        U32("chunk", chunk, 1, 65536, "prompt tokens computed at a time (default 256)"),
        U32("decode-tail", decode_tail, 0, 1 << 24,
            "compute a prompt's last N tokens one by one, as if they were "
            "generated"),
        U32("threads", threads, 1, 1024, "threads (default 1)"),
        TEXT("variant", variant, "NAME",
             "instructions: avx512, avx2 or scalar (default: the best available)"),
        {"device", 0, "WHERE", "cpu, cuda or cuda:N; auto (default): where the daemon's pool is",
         .kind = DEVICE},
        WORD("matmul", device.products, 0, "f32 tf32 bf16", "TYPE",
             "on a GPU: weights and products in f32 (default), tf32 or bf16"),
        WORD("decode", device.decode, 0, "fast exact", "HOW",
             "on a GPU: fast (default), or exact: generated tokens have the bits of a prompt"),
        SECTION("Sequences of the pool (the space's settings turn methods on for them):"),
        WORD("sequence", pooled.use, 0, "auto off on", "WHEN",
             "auto: if a method is on (default); on; or off"),
        YES("own-prompt", pooled.own_prompt,
            "yes: the prompt is part of the sequence, and not shared as a prefix "
            "(default no)"),
        YES("align-steps", pooled.align,
            "long steps of reasoning begin in a fresh block (default yes)"),
        U32("sync-wait", pooled.wait_ms, 0, 10000,
            "maximum time to wait for the pool, in milliseconds: for a missing "
            "block, an eviction or a sharing decision (default 500)"),
        SECTION("Masked diffusion (a model whose config.json says \"attention\": \"bidirectional\"):"),
        U32("gen-length", diffuse.length, 1, 1 << 20,
            "length of the answer (default 64; a line of --prompts may have "
            "its \"gen_length\")"),
        U32("steps", diffuse.steps, 1, 1 << 20,
            "denoising steps (default: one per token; or a line's \"steps\")"),
        WORD("bicache", diffuse.reuse, 0, "space off naive on", "MODE",
             "the document's keys and values: off computes them in every step; "
             "on shares those of shallow layers and refreshes those of deep ones; "
             "naive shares all; space is on or off, as \"kvctl space set\" says (default space)"),
        TEXT("bicache-table", table, "FILE",
             "how many layers are shallow, by the document's share of a request "
             "(default: the space's table)"),
        U32("bicache-depth", diffuse.depth, 1, 1024,
            "treat the first N layers as shallow, ignoring the table"),
        U32("prefix-tokens", prefix, 1, 1 << 24, "with --tokens: the first N are the document"),
        U32("refresh", diffuse.refresh, 1, 1 << 20,
            "steps between refreshes (default: the space's setting, or 16)"),
        TEXT("profile-out", profile_out, "FILE",
             "generate nothing, but append to FILE how similar the document's keys "
             "and values are with and without the rest of the request, layer by "
             "layer, one JSON line per request"),
        U32("profile-step", diffuse.profile_step, 1, 100,
            "the same for the first N, 2 N, 3 N ... percent of each request"),
        SECTION("Output:"),
        FLAG("json", json, 1, "one JSON line per prompt"),
        FLAG("progress", progress, 1, "show the progress of a prompt on standard error"),
        TEXT("logits", logits, "FILE",
             "with --tokens: write the logits of every token as little-endian float32, row by row"),
        {"help", 'h', NULL, "print this help", .kind = HELP},
        {"version", 'V', NULL, "print the version", .kind = VERSION},
};

/* ---- help ------------------------------------------------------------------------------------ */

static int show_help(void) {
        puts("Usage: kvlm --model DIR (--prompts FILE | --text FILE | --tokens FILE |\n"
             "            --tokenize FILE) [OPTION]...\n"
             "Runs a language model whose keys and values are in the cache of a kvd daemon,\n"
             "used in place.\n\n"
             "A FILE of - is standard input. Without a daemon, and where the cache has no\n"
             "room, kvlm computes in its own memory; answers are the same to the last bit.");
        for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
                kvd_option_help(stdout, rows + i);
        puts("\nExit status: 0 all prompts answered; 1 some failed, or the model could not be\n"
             "used; 2 wrong usage; 130 interrupted.");
        return 0;
}

/* ---- command line ---------------------------------------------------------------------------- */

/* The directory's base name; characters that a space's name cannot have are replaced. */
static void name_model(const char *directory, char *ret) {
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

/* A space has one type of numbers, so each type other than the default has its own name. */
static void default_space(struct options *o) {
        size_t room = sizeof o->space - strlen(o->kv_word) - 2, at;

        name_model(o->model, o->space);
        at = MIN(strlen(o->space), room);
        if (o->kv_type != KVD_NUMBER_F32)
                snprintf(o->space + at, sizeof o->space - at, "-%s", o->kv_word);
}

static int check(struct options *o) {
        int inputs = !!o->prompts + !!o->text + !!o->tokens + !!o->tokenize;

        if (!o->model)
                return refuse(-EINVAL, "--model DIR is missing (see kvlm --help)");
        if (inputs != 1)
                return refuse(
                        -EINVAL,
                        "give one of --prompts, --text, --tokens and --tokenize (see kvlm --help)");
        if (o->logits && !o->tokens)
                return refuse(-EINVAL, "--logits needs --tokens");
        if (o->document && (o->tokens || o->tokenize))
                return refuse(-EINVAL,
                              "--document is put before texts: it needs --prompts or --text");
        if (!*o->space)
                default_space(o);
        return 1;
}

/* 1; 0: the program has printed what it was asked for. */
static int take(const struct kvd_option *option, const char *value, struct options *o) {
        int r;

        switch (option->kind) {
        case HELP: return show_help();
        case VERSION: puts("kvlm (kvd) " KVD_VERSION); return 0;
        case SPACE: r = read_space(value, o); break;
        case KV_TYPE: r = read_kv_type(value, o); break;
        case STOP: r = read_stop(value, o); break;
        case DEVICE: r = read_device(value, o); break;
        default: r = kvd_option_store(option, value, o, &kvlm_why);
        }
        return r < 0 ? r : 1;
}

static int parse(int argc, char **argv, struct options *o) {
        struct kvd_words words = {"kvlm", rows, ARRAY_SIZE(rows), argc, argv, .why = &kvlm_why};
        int r;

        o->stop = strdup("\n");
        if (!o->stop)
                return refuse(-ENOMEM, "out of memory");
        while ((r = kvd_next_option(&words)) > 0) {
                if (!words.option)
                        return refuse(-EINVAL, "unexpected argument \"%s\" (see kvlm --help)",
                                      words.value);
                r = take(words.option, words.value, o);
                if (r <= 0)
                        return r;
        }
        return r < 0 ? r : check(o);
}

int options_parse(int argc, char **argv, struct options *ret) {
        struct options o = {
                .share = true,
                .kv_type = KVD_NUMBER_F32,
                .kv_word = "f32",
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
