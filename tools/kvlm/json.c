/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Recursive descent with a bound on the depth. Every step checks against the end of the text, which need not be
 * terminated: headers of safetensors files are parsed where they are mapped.
 */

#include "tools/kvlm/json.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"

enum { MAX_DEPTH = 32 };

struct parser {
        const char *at, *end;
        struct json *json;
};

static int parse_value(struct parser *p, int depth);

static void skip_blanks(struct parser *p) {
        while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r'))
                p->at++;
}

static bool take(struct parser *p, char c) {
        skip_blanks(p);
        if (p->at == p->end || *p->at != c)
                return false;
        p->at++;
        return true;
}

static int add_node(struct parser *p, enum json_type type, uint32_t *ret) {
        struct json *j = p->json;

        if (j->n_nodes == j->n_room) {
                uint32_t room = j->n_room ? 2 * j->n_room : 64;
                struct json_node *nodes = reallocarray(j->nodes, room, sizeof *nodes);

                if (!nodes || room < j->n_room)
                        return -ENOMEM;
                j->nodes = nodes;
                j->n_room = room;
        }
        *ret = j->n_nodes++;
        j->nodes[*ret] = (struct json_node){.type = type, .at = (size_t)(p->at - j->text)};
        return 0;
}

static void close_node(struct parser *p, uint32_t node) {
        p->json->nodes[node].next = p->json->n_nodes;
        p->json->nodes[node].size = (size_t)(p->at - p->json->text) - p->json->nodes[node].at;
}

static int parse_string(struct parser *p) {
        uint32_t node;
        int r;

        if (!take(p, '"'))
                return -EINVAL;
        r = add_node(p, JSON_STRING, &node);
        if (r < 0)
                return r;
        for (; p->at < p->end && *p->at != '"'; p->at++) {
                if ((unsigned char)*p->at < ' ')
                        return -EINVAL;
                if (*p->at == '\\' && ++p->at == p->end)
                        return -EINVAL;
        }
        if (p->at == p->end)
                return -EINVAL;
        close_node(p, node);
        p->at++;
        return 0;
}

static int parse_members(struct parser *p, enum json_type type, char end, int depth) {
        uint32_t node;
        int r = add_node(p, type, &node);

        if (r < 0)
                return r;
        p->at++;
        if (!take(p, end)) {
                do {
                        if (type == JSON_OBJECT) {
                                r = parse_string(p);
                                if (r < 0)
                                        return r;
                                if (!take(p, ':'))
                                        return -EINVAL;
                        }
                        r = parse_value(p, depth + 1);
                        if (r < 0)
                                return r;
                } while (take(p, ','));
                if (!take(p, end))
                        return -EINVAL;
        }
        close_node(p, node);
        return 0;
}

static int parse_word(struct parser *p) {
        static const struct {
                const char *word;
                enum json_type type;
        } words[] = {{"null", JSON_NULL}, {"true", JSON_TRUE}, {"false", JSON_FALSE}};

        for (size_t i = 0; i < ARRAY_SIZE(words); i++) {
                size_t length = strlen(words[i].word);
                uint32_t node;
                int r;

                if ((size_t)(p->end - p->at) < length || memcmp(p->at, words[i].word, length) != 0)
                        continue;
                r = add_node(p, words[i].type, &node);
                if (r < 0)
                        return r;
                p->at += length;
                close_node(p, node);
                return 0;
        }
        return -EINVAL;
}

static int parse_number(struct parser *p) {
        uint32_t node;
        int r = add_node(p, JSON_NUMBER, &node);

        if (r < 0)
                return r;
        while (p->at < p->end && *p->at && strchr("+-.0123456789eE", *p->at))
                p->at++;
        close_node(p, node);
        return 0;
}

static int parse_value(struct parser *p, int depth) {
        skip_blanks(p);
        if (p->at == p->end || depth > MAX_DEPTH)
                return -EINVAL;
        switch (*p->at) {
        case '{':
                return parse_members(p, JSON_OBJECT, '}', depth);
        case '[':
                return parse_members(p, JSON_ARRAY, ']', depth);
        case '"':
                return parse_string(p);
        case '-':
        case '0' ... '9':
                return parse_number(p);
        default:
                return parse_word(p);
        }
}

int json_parse(const char *text, size_t size, struct json *ret) {
        struct json json = {.text = text};
        struct parser p = {text, text + size, &json};
        int r = parse_value(&p, 0);

        skip_blanks(&p);
        if (r == 0 && p.at != p.end)
                r = -EINVAL;
        if (r < 0) {
                json_release(&json);
                return r;
        }
        *ret = json;
        return 0;
}

void json_release(struct json *json) {
        free(json->nodes);
        *json = (struct json){0};
}

/* ---- access ---- */

bool json_is(const struct json *json, uint32_t node, const char *string) {
        const struct json_node *n = json->nodes + node;

        return n->type == JSON_STRING && n->size == strlen(string) && memcmp(json->text + n->at, string, n->size) == 0;
}

uint32_t json_find(const struct json *json, uint32_t object, const char *key) {
        if (json->nodes[object].type != JSON_OBJECT)
                return 0;
        for (uint32_t i = object + 1; i < json->nodes[object].next; i = json->nodes[i + 1].next)
                if (json_is(json, i, key))
                        return i + 1;
        return 0;
}

/* The number's text, terminated, in a buffer that any sensible number fits. */
static int number_text(const struct json *json, uint32_t node, char text[64]) {
        const struct json_node *n = json->nodes + node;

        if (n->type != JSON_NUMBER || n->size >= 64)
                return -EINVAL;
        memcpy(text, json->text + n->at, n->size);
        text[n->size] = '\0';
        return 0;
}

int json_u64(const struct json *json, uint32_t node, uint64_t *ret) {
        char text[64], *end;
        int r = number_text(json, node, text);

        if (r < 0)
                return r;
        errno = 0;
        *ret = strtoull(text, &end, 10);
        return *end || *text == '-' || errno ? -EINVAL : 0;
}

int json_double(const struct json *json, uint32_t node, double *ret) {
        char text[64], *end;
        int r = number_text(json, node, text);

        if (r < 0)
                return r;
        *ret = strtod(text, &end);
        return *end ? -EINVAL : 0;
}

/* ---- strings ---- */

static int hex4(const char *at, const char *end, uint32_t *ret) {
        *ret = 0;
        if (end - at < 4)
                return -EINVAL;
        for (int i = 0; i < 4; i++) {
                const char *digits = "0123456789abcdef", *digit = memchr(digits, at[i] | 0x20, 16);

                if (!digit)
                        return -EINVAL;
                *ret = *ret << 4 | (uint32_t)(digit - digits);
        }
        return 0;
}

static char *put_utf8(char *to, uint32_t c) {
        if (c < 0x80) {
                *to++ = (char)c;
        } else if (c < 0x800) {
                *to++ = (char)(0xc0 | c >> 6);
                *to++ = (char)(0x80 | (c & 0x3f));
        } else if (c < 0x10000) {
                *to++ = (char)(0xe0 | c >> 12);
                *to++ = (char)(0x80 | (c >> 6 & 0x3f));
                *to++ = (char)(0x80 | (c & 0x3f));
        } else {
                *to++ = (char)(0xf0 | c >> 18);
                *to++ = (char)(0x80 | (c >> 12 & 0x3f));
                *to++ = (char)(0x80 | (c >> 6 & 0x3f));
                *to++ = (char)(0x80 | (c & 0x3f));
        }
        return to;
}

/* Behind "\u": four digits, or eight in two halves. Half a pair alone becomes U+FFFD. */
static int unescape_unicode(const char **at, const char *end, char **to) {
        uint32_t c, low;
        int r = hex4(*at, end, &c);

        if (r < 0)
                return r;
        *at += 4;
        if (c >= 0xd800 && c < 0xdc00 && end - *at >= 6 && (*at)[0] == '\\' && (*at)[1] == 'u' &&
            hex4(*at + 2, end, &low) == 0 && low >= 0xdc00 && low < 0xe000) {
                *at += 6;
                c = 0x10000 + (c - 0xd800) * 0x400 + (low - 0xdc00);
        }
        *to = put_utf8(*to, c >= 0xd800 && c < 0xe000 ? 0xfffd : c);
        return 0;
}

static int unescape(const char **at, const char *end, char **to) {
        static const char codes[] = "\"\\/bfnrt", bytes[] = "\"\\/\b\f\n\r\t";
        const char *code;

        if (**at == 'u') {
                ++*at;
                return unescape_unicode(at, end, to);
        }
        code = memchr(codes, *(*at)++, sizeof codes - 1);
        if (!code)
                return -EINVAL;
        *(*to)++ = bytes[code - codes];
        return 0;
}

int json_string(const struct json *json, uint32_t node, char **ret, size_t *ret_size) {
        const struct json_node *n = json->nodes + node;
        const char *at = json->text + n->at, *end = at + n->size;
        _cleanup_(freep) char *string = NULL;
        char *to;

        if (n->type != JSON_STRING)
                return -EINVAL;
        to = string = malloc(n->size + 1); /* an escape is never shorter than what it stands for */
        if (!string)
                return -ENOMEM;
        while (at < end) {
                if (*at != '\\') {
                        *to++ = *at++;
                        continue;
                }
                at++;
                if (unescape(&at, end, &to) < 0)
                        return -EINVAL;
        }
        *to = '\0';
        *ret_size = (size_t)(to - string);
        *ret = STEAL(string);
        return 0;
}

/* Length of the valid UTF-8 sequence at the start of bytes, or 0. */
static size_t utf8_length(const unsigned char *bytes, size_t size) {
        size_t length = bytes[0] < 0x80 ? 1 : bytes[0] < 0xc2 ? 0 : bytes[0] < 0xe0 ? 2 : bytes[0] < 0xf0 ? 3 : 4;

        if (length == 0 || length > size || bytes[0] > 0xf4)
                return 0;
        for (size_t i = 1; i < length; i++)
                if ((bytes[i] & 0xc0) != 0x80)
                        return 0;
        if ((bytes[0] == 0xe0 && bytes[1] < 0xa0) || (bytes[0] == 0xed && bytes[1] > 0x9f) ||
            (bytes[0] == 0xf0 && bytes[1] < 0x90) || (bytes[0] == 0xf4 && bytes[1] > 0x8f))
                return 0;
        return length;
}

void json_write_string(FILE *f, const char *bytes, size_t size) {
        const unsigned char *at = (const unsigned char *)bytes, *end = at + size;

        putc('"', f);
        while (at < end) {
                size_t length = utf8_length(at, (size_t)(end - at));

                if (length == 0)
                        fputs("\\ufffd", f);
                else if (*at == '"' || *at == '\\')
                        fprintf(f, "\\%c", *at);
                else if (*at == '\n')
                        fputs("\\n", f);
                else if (*at < ' ' || *at == 0x7f)
                        fprintf(f, "\\u%04x", *at);
                else
                        fwrite(at, 1, length, f);
                at += MAX(length, 1);
        }
        putc('"', f);
}
