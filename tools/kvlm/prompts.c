/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads prompts one by one: lines of JSON, text, or token ids. A line that is not a prompt is
 * refused; the next one is read.
 */

#include "tools/kvlm/prompts.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"
#include "tools/kvlm/file.h"
#include "tools/json.h"

struct prompts {
        const struct options *options;
        const struct tokenizer *tokenizer;
        uint32_t vocab;
        char *document; /* followed by the prompt */
        size_t document_size;
        FILE *lines; /* lines of --prompts */
        char *line;
        size_t line_room;
        uint64_t line_number;
        bool done;              /* a single prompt has been read */
        bool split;             /* see prompts_split() */
        uint32_t n_prefix;      /* of the last prompt */
        uint32_t length, steps; /* requested by the last prompt; 0 if not */
};

int prompts_open(const struct options *o, const struct tokenizer *tokenizer, uint32_t vocab,
                 struct prompts **ret) {
        struct prompts *p = calloc(1, sizeof *p);
        int r = p ? 0 : refuse(-ENOMEM, "out of memory");

        if (r == 0)
                *p = (struct prompts){.options = o, .tokenizer = tokenizer, .vocab = vocab};
        if (r == 0 && o->document)
                r = read_file(o->document, &p->document, &p->document_size);
        if (r == 0 && o->prompts) {
                p->lines = strcmp(o->prompts, "-") == 0 ? stdin : fopen(o->prompts, "re");
                if (!p->lines)
                        r = refuse(negative_errno(), "cannot open %s: %s", o->prompts,
                                   strerror(errno));
        }
        if (r < 0) {
                prompts_close(p);
                return r;
        }
        *ret = p;
        return 0;
}

struct prompts *prompts_close(struct prompts *p) {
        if (!p)
                return NULL;
        if (p->lines && p->lines != stdin)
                fclose(p->lines);
        free(p->line);
        free(p->document);
        free(p);
        return NULL;
}

void prompts_split(struct prompts *p) {
        p->split = true;
}

uint32_t prompts_prefix(const struct prompts *p) {
        return p->n_prefix;
}

void prompts_region(const struct prompts *p, uint32_t *length, uint32_t *steps) {
        *length = p->length ? p->length : *length;
        *steps = p->steps ? p->steps : *steps;
}

/* Tokenizes document and text separately. */
static int encode_split(struct prompts *p, const char *document, size_t document_size,
                        const char *text, size_t size, uint32_t **ids, uint32_t *n) {
        _cleanup_(freep) uint32_t *rest = NULL, *prefix = NULL;
        uint32_t n_rest = 0, n_prefix = 0, *all;
        int r = tokenizer_encode(p->tokenizer, document, document_size, true, &prefix, &n_prefix);

        if (r == 0)
                r = tokenizer_encode(p->tokenizer, text, size, false, &rest, &n_rest);
        if (r < 0)
                return r;
        all = reallocarray(prefix, n_prefix + (size_t)n_rest, sizeof *all);
        if (!all)
                return refuse(-ENOMEM, "out of memory for a prompt");
        prefix = NULL;
        if (n_rest > 0)
                memcpy(all + n_prefix, rest, n_rest * sizeof *all);
        p->n_prefix = n_prefix;
        *ids = all;
        *n = n_prefix + n_rest;
        return 0;
}

static int encode(struct prompts *p, const char *text, size_t size, uint32_t **ids, uint32_t *n) {
        _cleanup_(freep) char *both = NULL;

        p->n_prefix = 0;
        if (!p->document)
                return tokenizer_encode(p->tokenizer, text, size, true, ids, n);
        if (p->split)
                return encode_split(p, p->document, p->document_size, text, size, ids, n);
        both = malloc(p->document_size + size + 1);
        if (!both)
                return refuse(-ENOMEM, "out of memory for a prompt");
        memcpy(both, p->document, p->document_size);
        memcpy(both + p->document_size, text, size);
        return tokenizer_encode(p->tokenizer, both, p->document_size + size, true, ids, n);
}

/* -ENOENT if the line has no such member. */
static int line_string(const struct prompts *p, const json_t *line, const char *member,
                       const char **ret, size_t *ret_size) {
        const json_t *value = json_object_get(line, member);

        if (!value)
                return -ENOENT;
        if (!json_is_string(value))
                return refuse(-EINVAL, "%s, line %ju: \"%s\" is not a string", p->options->prompts,
                              (uintmax_t)p->line_number, member);
        *ret = json_string_value(value);
        *ret_size = json_string_length(value);
        return 0;
}

/* Reads a number; 0 if the line has no such member. */
static int line_number(const struct prompts *p, const json_t *line, const char *member,
                       uint32_t *ret) {
        const json_t *number = json_object_get(line, member);
        uint64_t value = 0;

        if (number && (json_whole(number, &value) < 0 || value < 1 || value > 1 << 20))
                return refuse(-EINVAL, "%s, line %ju: \"%s\" is not a number from 1 to %u",
                              p->options->prompts, (uintmax_t)p->line_number, member, 1 << 20);
        *ret = (uint32_t)value;
        return 0;
}

static int encode_members(struct prompts *p, const json_t *line, uint32_t **ids, uint32_t *n) {
        const char *text = NULL, *document = NULL;
        size_t size = 0, document_size = 0;
        int r = line_string(p, line, "prompt", &text, &size);

        if (r == -ENOENT)
                return refuse(-EINVAL, "%s, line %ju: no string \"prompt\" in it",
                              p->options->prompts, (uintmax_t)p->line_number);
        if (r == 0)
                r = line_number(p, line, "gen_length", &p->length);
        if (r == 0)
                r = line_number(p, line, "steps", &p->steps);
        if (r < 0)
                return r;
        r = p->split ? line_string(p, line, "document", &document, &document_size) : -ENOENT;
        if (r == 0)
                return encode_split(p, document, document_size, text, size, ids, n);
        return r == -ENOENT ? encode(p, text, size, ids, n) : r;
}

static int encode_line(struct prompts *p, size_t size, uint32_t **ids, uint32_t *n) {
        json_auto_t *line = json_read(p->line, size);

        if (!line)
                return refuse(-EINVAL, "%s, line %ju: not JSON", p->options->prompts,
                              (uintmax_t)p->line_number);
        return encode_members(p, line, ids, n);
}

static bool is_blank(const char *line) {
        return line[strspn(line, " \t\r\n")] == '\0';
}

static int next_line(struct prompts *p, uint32_t **ids, uint32_t *n) {
        ssize_t size;
        int r;

        do {
                errno = 0;
                size = getline(&p->line, &p->line_room, p->lines);
                if (size < 0)
                        return errno == EINTR ? -EINTR : 0;
                p->line_number++;
        } while (is_blank(p->line));
        r = encode_line(p, (size_t)size, ids, n);
        return r < 0 ? r : 1;
}

static int read_ids(const struct prompts *p, char *text, uint32_t **ids, uint32_t *n) {
        _cleanup_(freep) uint32_t *tokens = calloc(strlen(text) / 2 + 1, sizeof *tokens);
        uint32_t count = 0;
        char *rest = NULL;

        if (!tokens)
                return refuse(-ENOMEM, "out of memory for the token ids");
        for (char *word = strtok_r(text, " \t\r\n", &rest); word;
             word = strtok_r(NULL, " \t\r\n", &rest)) {
                char *end;
                unsigned long long id = strtoull(word, &end, 10);

                if (*word < '0' || *word > '9' || *end || id >= p->vocab)
                        return refuse(-EINVAL, "%s: \"%.32s\" is not a token id below %u",
                                      p->options->tokens, word, p->vocab);
                tokens[count++] = (uint32_t)id;
        }
        *n = count;
        *ids = STEAL(tokens);
        return 0;
}

static int single(struct prompts *p, uint32_t **ids, uint32_t *n) {
        const struct options *o = p->options;
        _cleanup_(freep) char *text = NULL;
        size_t size;
        int r;

        if (p->done)
                return 0;
        p->done = true;
        r = read_file(o->tokens ? o->tokens : o->text, &text, &size);
        if (r == 0)
                r = o->tokens ? read_ids(p, text, ids, n) : encode(p, text, size, ids, n);
        return r < 0 ? r : 1;
}

int prompts_next(struct prompts *p, uint32_t **ids, uint32_t *n) {
        return p->lines ? next_line(p, ids, n) : single(p, ids, n);
}
