/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pieces are kept in a trie whose edges are in one hash table: (node, byte) leads to a node.
 * Matching walks it along the text and remembers the last node at which a piece ended.
 */

#include "tools/kvlm/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/util.h"
#include "tools/kvlm/refuse.h"
#include "tools/kvlm/file.h"

enum { MAX_PIECE = 1024, MAX_TOKENS = 1 << 24 };

struct piece {
        const char *bytes;
        uint32_t size;
};

struct edge {
        uint64_t from; /* node << 8 | byte, plus 1; 0: no edge */
        uint32_t to;
        uint32_t id; /* id of the piece that ends here; 0 if none */
};

struct tokenizer {
        struct mapping file;
        char *bytes; /* of all pieces, unescaped */
        struct piece *pieces;
        uint32_t n;
        struct edge *edges;
        size_t n_edges, mask;
};

static uint32_t count_lines(const struct mapping *file) {
        size_t lines = 0;

        for (size_t i = 0; i < file->size; i++)
                lines += file->data[i] == '\n';
        lines += file->data[file->size - 1] != '\n';
        return (uint32_t)MIN(lines, MAX_TOKENS);
}

static int hex_digit(char c) {
        static const char digits[] = "0123456789abcdef";
        const char *digit = memchr(digits, c >= 'A' && c <= 'F' ? c | 0x20 : c, sizeof digits - 1);

        return digit ? (int)(digit - digits) : -1;
}

/* Decodes the characters after a backslash. Returns how many it used, or -EINVAL. */
static int unescape(const char *at, size_t left, char *to) {
        static const char codes[] = "nt\\", bytes[] = "\n\t\\";
        const char *code = left > 0 ? memchr(codes, *at, sizeof codes - 1) : NULL;
        int high, low;

        if (code) {
                *to = bytes[code - codes];
                return 1;
        }
        if (left < 3 || *at != 'x')
                return -EINVAL;
        high = hex_digit(at[1]);
        low = hex_digit(at[2]);
        if (high < 0 || low < 0)
                return -EINVAL;
        *to = (char)(high << 4 | low);
        return 3;
}

/* Writes a line's bytes to to, which is as large as the line. */
static int unescape_line(const char *line, size_t size, char *to) {
        char *start = to;

        while (size > 0) {
                int n = 1;

                if (*line != '\\') {
                        *to++ = *line;
                } else {
                        n = unescape(line + 1, size - 1, to++);
                        if (n < 0)
                                return n;
                        n++;
                }
                line += n;
                size -= (size_t)n;
        }
        return (int)(to - start);
}

/* Control and byte tokens have fixed names in the file; a byte token stands for its byte. */
static int check_reserved(uint32_t id, const char *line, size_t size, struct piece *piece) {
        static const char *const control[] = {"<pad>", "<bos>", "<eos>", "<unk>"};
        static char every_byte[256];
        char byte[8];
        const char *name = id < TOKEN_BYTE ? control[id] : byte;

        snprintf(byte, sizeof byte, "<0x%02X>", (id - TOKEN_BYTE) & 0xff);
        if (size != strlen(name) || memcmp(line, name, size) != 0)
                return refuse(-EINVAL, "vocab.txt: line %u must be %s", id + 1, name);
        if (id >= TOKEN_BYTE) {
                every_byte[id - TOKEN_BYTE] = (char)(id - TOKEN_BYTE);
                *piece = (struct piece){every_byte + id - TOKEN_BYTE, 1};
        }
        return 0;
}

static int read_pieces(struct tokenizer *t) {
        const char *line = (const char *)t->file.data, *end = line + t->file.size;
        char *to = t->bytes;

        for (uint32_t id = 0; id < t->n; id++) {
                const char *newline = memchr(line, '\n', (size_t)(end - line));
                size_t size = (size_t)((newline ? newline : end) - line);
                int r = 0;

                if (size > MAX_PIECE)
                        return refuse(-EINVAL, "vocab.txt: line %u is longer than %d bytes", id + 1,
                                      MAX_PIECE);
                if (id < TOKEN_PIECE) {
                        r = check_reserved(id, line, size, t->pieces + id);
                        if (r < 0)
                                return r;
                } else {
                        r = unescape_line(line, size, to);
                        if (r <= 0)
                                return refuse(-EINVAL, "vocab.txt: line %u is %s", id + 1,
                                              r < 0 ? "wrongly escaped" : "empty");
                        t->pieces[id] = (struct piece){to, (uint32_t)r};
                }
                to += r;
                line += size + 1;
        }
        return 0;
}

static struct edge *find_edge(const struct tokenizer *t, uint32_t node, unsigned char byte) {
        uint64_t from = ((uint64_t)node << 8 | byte) + 1;
        size_t i = (size_t)(from * UINT64_C(0x9e3779b97f4a7c15) >> 20) & t->mask;

        while (t->edges[i].from && t->edges[i].from != from)
                i = (i + 1) & t->mask;
        return t->edges + i;
}

static void add_piece(struct tokenizer *t, uint32_t id) {
        struct edge *edge = NULL;
        uint32_t node = 0;

        for (uint32_t i = 0; i < t->pieces[id].size; i++, node = edge->to) {
                unsigned char byte = (unsigned char)t->pieces[id].bytes[i];

                edge = find_edge(t, node, byte);
                if (!edge->from)
                        *edge = (struct edge){((uint64_t)node << 8 | byte) + 1,
                                              (uint32_t)++t->n_edges, 0};
        }
        if (edge && !edge->id) /* of equal pieces, the first one wins */
                edge->id = id;
}

static int build_trie(struct tokenizer *t) {
        size_t bytes = 0;

        for (uint32_t id = TOKEN_PIECE; id < t->n; id++)
                bytes += t->pieces[id].size;
        t->mask = pow2_up(2 * bytes + 2) - 1;
        t->edges = calloc(t->mask + 1, sizeof *t->edges);
        if (!t->edges)
                return refuse(-ENOMEM, "out of memory for the vocabulary");
        for (uint32_t id = TOKEN_PIECE; id < t->n; id++)
                add_piece(t, id);
        return 0;
}

static int load(struct tokenizer *t, const char *directory) {
        int r = map_file(directory, "vocab.txt", &t->file);

        if (r < 0)
                return r;
        t->n = count_lines(&t->file);
        if (t->n < TOKEN_PIECE || t->n == MAX_TOKENS)
                return refuse(-EINVAL, "vocab.txt: %u lines, but a vocabulary has %d to %d", t->n,
                              TOKEN_PIECE, MAX_TOKENS - 1);
        t->bytes = malloc(t->file.size);
        t->pieces = calloc(t->n, sizeof *t->pieces);
        if (!t->bytes || !t->pieces)
                return refuse(-ENOMEM, "out of memory for the vocabulary");
        r = read_pieces(t);
        return r < 0 ? r : build_trie(t);
}

int tokenizer_new(const char *directory, struct tokenizer **ret) {
        struct tokenizer *t = calloc(1, sizeof *t);
        int r = t ? load(t, directory) : refuse(-ENOMEM, "out of memory");

        if (r < 0) {
                tokenizer_free(t);
                return r;
        }
        *ret = t;
        return 0;
}

struct tokenizer *tokenizer_free(struct tokenizer *t) {
        if (!t)
                return NULL;
        free(t->edges);
        free(t->pieces);
        free(t->bytes);
        unmap(&t->file);
        free(t);
        return NULL;
}

uint32_t tokenizer_size(const struct tokenizer *t) {
        return t->n;
}

void tokenizer_file(const struct tokenizer *t, const uint8_t **data, size_t *size) {
        *data = t->file.data;
        *size = t->file.size;
}

/* The id of the token at the start of text, and its length. */
static uint32_t match(const struct tokenizer *t, const char *text, size_t size, size_t *length) {
        uint32_t id = TOKEN_BYTE + (unsigned char)*text, node = 0;

        *length = 1;
        for (size_t i = 0; i < size; i++) {
                const struct edge *edge = find_edge(t, node, (unsigned char)text[i]);

                if (!edge->from)
                        break;
                if (edge->id) {
                        id = edge->id;
                        *length = i + 1;
                }
                node = edge->to;
        }
        return id;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t size, bool prompt,
                     uint32_t **ids, uint32_t *n) {
        uint32_t *tokens = size < UINT32_MAX / 8 ? malloc((size + 1) * sizeof *tokens) : NULL;

        if (!tokens)
                return refuse(-ENOMEM, "out of memory for a text of %zu bytes", size);
        *n = 0;
        if (prompt)
                tokens[(*n)++] = TOKEN_BOS;
        for (size_t i = 0, length; i < size; i += length)
                tokens[(*n)++] = match(t, text + i, size - i, &length);
        *ids = tokens;
        return 0;
}

const char *tokenizer_decode(const struct tokenizer *t, uint32_t id, size_t *size) {
        *size = id < t->n ? t->pieces[id].size : 0;
        return id < t->n ? t->pieces[id].bytes : NULL;
}
