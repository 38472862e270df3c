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
        for (; *words; words += *bytes + (words[*bytes] == ' ')) {
                *bytes = strcspn(words, " ");
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

        return fflush(to) != 0 ? -errno : -error;
}

/* If the stream was closed from the start (>&-), that is an error only if something was printed. */
int kvd_end_output(FILE *to) {
        int r = kvd_flush_output(to);

        return fclose(to) != 0 && errno != EBADF && r == 0 ? -errno : r;
}
