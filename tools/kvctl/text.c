/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/kvctl/text.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "ipc/base/util.h"

/* Lead byte, shortest code point that needs that many bytes: everything else is overlong, a surrogate, or no lead. */
static const struct {
        uint8_t mask, lead, bytes;
        uint32_t least;
} utf8_forms[] = {{0x80, 0x00, 1, 0}, {0xe0, 0xc0, 2, 0x80}, {0xf0, 0xe0, 3, 0x800}, {0xf8, 0xf0, 4, 0x10000}};

static bool utf8_valid(uint32_t point, uint32_t least) {
        return point >= least && point <= 0x10ffff && !(point >= 0xd800 && point <= 0xdfff);
}

size_t utf8_length(const char *text, size_t n) {
        const uint8_t *p = (const uint8_t *)text;

        for (size_t i = 0; n && i < ARRAY_SIZE(utf8_forms); i++) {
                uint32_t point = p[0] & (uint8_t)~utf8_forms[i].mask;
                size_t k = 1;

                if ((p[0] & utf8_forms[i].mask) != utf8_forms[i].lead || utf8_forms[i].bytes > n)
                        continue;
                for (; k < utf8_forms[i].bytes && (p[k] & 0xc0) == 0x80; k++)
                        point = point << 6 | (p[k] & 0x3f);
                return k == utf8_forms[i].bytes && utf8_valid(point, utf8_forms[i].least) ? k : 0;
        }
        return 0;
}

unsigned text_width(const char *text) {
        unsigned width = 0;

        for (; *text; text++)
                width += ((uint8_t)*text & 0xc0) != 0x80;
        return width;
}

static bool is_control(const uint8_t *p, size_t length) {
        return length == 1 ? p[0] < 0x20 || p[0] == 0x7f : length == 2 && p[0] == 0xc2 && p[1] < 0xa0;
}

void text_put(FILE *to, const char *text, size_t n) {
        for (size_t i = 0; i < n;) {
                size_t length = utf8_length(text + i, n - i);

                if (length && !is_control((const uint8_t *)text + i, length))
                        fwrite(text + i, 1, length, to);
                else
                        fputc('?', to);
                i += MAX(length, (size_t)1);
        }
}

/* Bytes of text that fit into width, ending at a space where there is one. */
static size_t wrap_at(const char *text, unsigned width) {
        size_t fits = 0, space = 0, n = strlen(text);

        for (unsigned used = 0; fits < n; fits++) {
                used += ((uint8_t)text[fits] & 0xc0) != 0x80;
                if (used > width)
                        break;
                if (text[fits] == ' ')
                        space = fits;
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
                        row[j] = MIN(MIN(last[j], row[j - 1]) + 1, last[j - 1] + (a[i - 1] != b[j - 1]));
                        if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                                row[j] = MIN(row[j], before[j - 2] + 1);
                }
                before = last;
                last = row;
                row = free_row;
        }
        return last[n];
}
