/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prints untrusted text on a terminal. Control characters become question marks, and width is
 * counted in characters, not in bytes.
 */

#include "tools/kvctl/text.h"

#include <stdint.h>
#include <string.h>

#include "ipc/base/text.h"
#include "ipc/base/util.h"

/* Bytes of the character or the colour (ESC[...m, which takes no room) at the start of text. */
static size_t step(const char *text, size_t n, unsigned *width) {
        bool begins = n > 1 && text[0] == '\033' && text[1] == '[';
        const char *end = begins ? memchr(text, 'm', n) : NULL;

        *width = !end;
        return end ? (size_t)(end - text) + 1 : MAX(kvd_utf8(text, n), (size_t)1);
}

unsigned text_width(const char *text) {
        unsigned width = 0, one;

        for (size_t n = strlen(text), bytes; n; text += bytes, n -= bytes) {
                bytes = step(text, n, &one);
                width += one;
        }
        return width;
}

void text_put(FILE *to, const char *text, size_t n) {
        for (size_t i = 0; i < n;) {
                size_t length = kvd_utf8(text + i, n - i);

                if (length && !kvd_is_control(text + i, length))
                        fwrite(text + i, 1, length, to);
                else
                        fputc('?', to);
                i += MAX(length, (size_t)1);
        }
}

/* Bytes of text that fit into width, ending at a space where there is one. */
static size_t wrap_at(const char *text, unsigned width) {
        size_t fits = 0, space = 0, n = strlen(text);

        for (unsigned used = 0, one; fits < n;) {
                size_t bytes = step(text + fits, n - fits, &one);

                used += one;
                if (used > width)
                        break;
                if (text[fits] == ' ')
                        space = fits;
                fits += bytes;
        }
        return fits < n && space ? space : fits;
}

void text_put_wrapped(FILE *to, const char *text, unsigned width, unsigned indent) {
        while (width && text_width(text) > width) {
                size_t n = wrap_at(text, width);

                fprintf(to, "%.*s\n%*s", (int)n, text, (int)indent, "");
                text += n + (text[n] == ' ');
        }
        fputs(text, to);
}

void text_put_cut(FILE *to, const char *text, size_t n, unsigned width) {
        unsigned used = 0, one;

        for (size_t i = 0, bytes; i < n; i += bytes) {
                bytes = step(text + i, n - i, &one);
                used = text[i] == '\n' ? 0 : used + one;
                if (!one || used <= width)
                        fwrite(text + i, 1, bytes, to);
        }
}

#define DISTANCE_MAX 32u /* no verb or flag is longer */

unsigned text_distance(const char *a, const char *b) {
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
