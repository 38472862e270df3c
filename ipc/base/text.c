/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Checks text from peers, files and users. Text must be UTF-8 in its shortest form. Names may only
 * contain characters without a special meaning in shells, paths and terminals. Nothing here depends
 * on a locale.
 */

#include "ipc/base/text.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/util.h"

/* ---- characters ------------------------------------------------------------------------------ */

static size_t length_by_lead(uint8_t lead) {
        return lead < 0x80 ? 1 :
               lead < 0xc0 ? 0 :
               lead < 0xe0 ? 2 :
               lead < 0xf0 ? 3 :
               lead < 0xf8 ? 4 :
                             0;
}

size_t kvd_utf8(const char *text, size_t n) {
        static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
        const uint8_t *p = (const uint8_t *)text;
        size_t length = n ? length_by_lead(p[0]) : 0;
        uint32_t code;

        if (length <= 1)
                return length;
        if (length > n)
                return 0;
        code = p[0] & (0xffu >> (length + 1));
        for (size_t i = 1; i < length; i++) {
                if ((p[i] & 0xc0) != 0x80)
                        return 0;
                code = code << 6 | (p[i] & 0x3fu);
        }
        return code < least[length] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ?
                       0 :
                       length;
}

bool kvd_is_control(const char *character, size_t bytes) {
        const uint8_t *p = (const uint8_t *)character;

        return bytes == 1 ? p[0] < 0x20 || p[0] == 0x7f : bytes == 2 && p[0] == 0xc2 && p[1] < 0xa0;
}

bool kvd_is_plain(const char *text, size_t n) {
        size_t length;

        for (size_t i = 0; i < n; i += length) {
                length = kvd_utf8(text + i, n - i);
                if (!length || kvd_is_control(text + i, length))
                        return false;
        }
        return true;
}

char *kvd_make_plain(char *text) {
        for (char *p = text; *p; p++)
                if (*p < 0x20 || *p > 0x7e)
                        *p = '?';
        return text;
}

/* ---- names ----------------------------------------------------------------------------------- */

bool kvd_is_name_letter(char c) {
        return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
               c == '.' || c == '_' || c == '-';
}

bool kvd_is_name(const char *text, size_t most) {
        size_t n = 0;

        while (n <= most && kvd_is_name_letter(text[n]))
                n++;
        return n > 0 && n <= most && text[n] == '\0';
}

/* ---- words ----------------------------------------------------------------------------------- */

const char *kvd_word_at(const char *words, int index, size_t *bytes) {
        for (; *words; words += *bytes + (words[*bytes] != '\0')) {
                *bytes = strcspn(words, " |");
                if (index-- == 0)
                        return words;
        }
        return NULL;
}

int kvd_word_index(const char *words, const char *word) {
        const char *at;
        size_t n;

        for (int i = 0; (at = kvd_word_at(words, i, &n)); i++)
                if (strlen(word) == n && memcmp(at, word, n) == 0)
                        return i;
        return -1;
}

/* ---- output ---------------------------------------------------------------------------------- */

/* The errno of an earlier failure is unknown, so this writes once more to the broken stream. */
int kvd_flush_output(FILE *to) {
        int error = !ferror(to) ? 0 : write(fileno(to), "\n", 1) < 0 ? errno : EIO;

        return fflush(to) != 0 ? negative_errno() : -error;
}

/* If the stream was closed from the start (>&-), that is an error only if something was printed. */
int kvd_end_output(FILE *to) {
        int r = kvd_flush_output(to);

        return fclose(to) != 0 && errno != EBADF && r == 0 ? negative_errno() : r;
}

/* ---- width ----------------------------------------------------------------------------------- */

size_t kvd_text_step(const char *text, size_t n, unsigned *width) {
        bool begins = n > 1 && text[0] == '\033' && text[1] == '[';
        const char *end = begins ? memchr(text, 'm', n) : NULL;

        *width = !end;
        return end ? (size_t)(end - text) + 1 : MAX(kvd_utf8(text, n), (size_t)1);
}

unsigned kvd_text_width(const char *text) {
        unsigned width = 0, one;

        for (size_t n = strlen(text), bytes; n; text += bytes, n -= bytes) {
                bytes = kvd_text_step(text, n, &one);
                width += one;
        }
        return width;
}

/* Bytes of text that fit into width, ending at a space where there is one. */
static size_t wrap_at(const char *text, unsigned width) {
        size_t fits = 0, space = 0, n = strlen(text);

        for (unsigned used = 0, one; fits < n;) {
                size_t bytes = kvd_text_step(text + fits, n - fits, &one);

                used += one;
                if (used > width)
                        break;
                if (text[fits] == ' ')
                        space = fits;
                fits += bytes;
        }
        return fits < n && space ? space : fits;
}

void kvd_put_wrapped(FILE *to, const char *text, unsigned width, unsigned indent) {
        while (width && kvd_text_width(text) > width) {
                size_t n = wrap_at(text, width);

                fprintf(to, "%.*s\n%*s", (int)n, text, (int)indent, "");
                text += n + (text[n] == ' ');
        }
        fputs(text, to);
}

/* ---- suggestions ----------------------------------------------------------------------------- */

#define DISTANCE_MAX 32u /* no verb or flag is longer */

unsigned kvd_distance(const char *a, const char *b) {
        unsigned rows[3][DISTANCE_MAX + 1], *before = rows[0], *last = rows[1], *row = rows[2];
        size_t m = MIN(strlen(a), DISTANCE_MAX), n = MIN(strlen(b), DISTANCE_MAX);

        for (unsigned j = 0; j <= n; j++)
                last[j] = j;
        for (unsigned i = 1; i <= m; i++) {
                unsigned *free_row = before;

                row[0] = i;
                for (unsigned j = 1; j <= n; j++) {
                        row[j] = MIN(MIN(last[j], row[j - 1]) + 1,
                                     last[j - 1] + (a[i - 1] != b[j - 1]));
                        if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                                row[j] = MIN(row[j], before[j - 2] + 1);
                }
                before = last;
                last = row;
                row = free_row;
        }
        return last[n];
}

/* A short word may have fewer wrong letters: three of three make another word. */
struct kvd_nearest kvd_nearest_to(const char *given) {
        return (struct kvd_nearest){given, NULL, MIN((unsigned)strlen(given) / 3 + 2, 4u)};
}

void kvd_consider(struct kvd_nearest *nearest, const char *name) {
        size_t n = strlen(nearest->given);
        unsigned distance = kvd_distance(nearest->given, name);

        if (n >= 2 && strncmp(nearest->given, name, n) == 0)
                distance = MIN(distance, 1u);
        if (distance < nearest->distance) {
                nearest->name = name;
                nearest->distance = distance;
        }
}
