/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads the file as a whole and cuts it into lines. CR LF and a last line without a newline are
 * accepted, with a warning.
 */

#include "daemon/base/lines.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/trusted.h"
#include "ipc/base/sys.h"
#include "ipc/base/util.h"

#define FILE_MOST ((size_t)1 << 20)
#define LINE_MOST 2046u

struct text {
        const struct lines *lines;
        char *at; /* owned; n bytes and a NUL */
        size_t n;
        unsigned number; /* of the current line */
        bool has_cr;     /* the warning about CR LF was given */
};

static void text_clear(struct text *text) {
        free(text->at);
}

/* ---- the file -------------------------------------------------------------------------------- */

static int open_file(const struct lines *lines, FILE **ret, struct kvd_why *why) {
        const struct trusted file = {"configuration", lines->path, TRUST_CONFIG, geteuid()};
        int fd = trusted_open(&file, O_RDONLY, why);

        if (fd == -ENOENT && lines->optional)
                return 0;
        if (fd == TRUSTED_NOT)
                return -EINVAL;
        if (fd < 0)
                return kvd_refuse(why, -EINVAL,
                                  "%s: cannot be opened: %s; give another with --config",
                                  lines->path, strerror(-fd));
        *ret = fdopen(fd, "r");
        if (*ret)
                return 1;
        close(fd);
        return kvd_refuse(why, -EINVAL, "%s: %s", lines->path, strerror(errno));
}

static int read_file(FILE *f, struct text *text, struct kvd_why *why) {
        text->at = sys->calloc(1, FILE_MOST + 2);
        if (!text->at)
                return kvd_refuse(why, -EINVAL, "out of memory");
        text->n = fread(text->at, 1, FILE_MOST + 1, f);
        if (ferror(f))
                return kvd_refuse(why, -EINVAL, "%s: reading failed: %s", text->lines->path,
                                  strerror(errno));
        if (text->n > FILE_MOST)
                return kvd_refuse(why, -EINVAL,
                                  "%s: it is larger than 1 MiB; is it a configuration?",
                                  text->lines->path);
        return 0;
}

/* The marks of UTF-8 and of UTF-16, which would be full of NUL bytes. */
static int check_mark(const struct text *text, struct kvd_why *why) {
        static const char *const marks[] = {"\xef\xbb\xbf", "\xff\xfe", "\xfe\xff"};

        for (size_t i = 0; i < ARRAY_SIZE(marks); i++)
                if (strncmp(text->at, marks[i], strlen(marks[i])) == 0)
                        return kvd_refuse(
                                why, -EINVAL,
                                "%s:1: the file begins with a byte order mark; save it as UTF-8 without one",
                                text->lines->path);
        return 0;
}

/* ---- lines ----------------------------------------------------------------------------------- */

char *lines_strip(char *s) {
        char *end = s + strlen(s);

        while (end > s && strchr(" \t", end[-1]))
                *--end = 0;
        return s + strspn(s, " \t");
}

static int check_bytes(const char *line, size_t n, struct kvd_why *why) {
        if (n > LINE_MOST)
                return kvd_refuse(why, -EINVAL, "the line is longer than %u bytes; shorten it",
                                  LINE_MOST);
        for (size_t i = 0; i < n; i++) {
                unsigned char c = (unsigned char)line[i];

                if ((c < 0x20 && c != '\t') || c == 0x7f)
                        return kvd_refuse(why, -EINVAL,
                                          "byte %zu is a control character (0x%02x); remove it",
                                          i + 1, c);
        }
        return 0;
}

/* No-break spaces and characters without width, as in text copied from a web page. */
static int check_visible(const char *line, struct kvd_why *why) {
        static const char *const invisible[] = {"\xc2\xa0",     "\xc2\xad",     "\xe2\x80\x8b",
                                                "\xe2\x80\x8c", "\xe2\x80\x8d", "\xe2\x80\xaf",
                                                "\xe2\x81\xa0", "\xef\xbb\xbf"};

        for (size_t i = 0; i < ARRAY_SIZE(invisible); i++) {
                const char *at = strstr(line, invisible[i]);

                if (at)
                        return kvd_refuse(
                                why, -EINVAL,
                                "byte %zu begins an invisible character, such as a no-break space; remove it",
                                (size_t)(at - line) + 1);
        }
        return 0;
}

static int take_line(const struct text *text, char *line, size_t n, struct kvd_why *why) {
        const struct lines *lines = text->lines;
        int r = check_bytes(line, n, why);
        char *bare = lines_strip(line);

        if (r < 0 || !bare[0] || bare[0] == '#' || bare[0] == ';')
                return r;
        r = check_visible(line, why);
        return r < 0 ? r : lines->take(lines->data, bare, text->number, why);
}

static void name_it(const struct text *text, const char *what) {
        const struct lines *lines = text->lines;

        if (lines->all)
                fprintf(lines->all, "%s:%u: %s\n", lines->path, text->number, what);
        else
                log_warning("%s:%u: %s", lines->path, text->number, what);
}

/* Terminates the line with a NUL. Returns its length. */
static size_t cut_line(struct text *text, char *line, char *end) {
        bool has_cr = end > line && end[-1] == '\r';

        text->number++;
        if (has_cr && !text->has_cr)
                name_it(text, "lines end with CR LF; LF is enough");
        if (end == text->at + text->n)
                name_it(text, "the last line does not end with a newline; is the file complete?");
        text->has_cr |= has_cr;
        end[has_cr ? -1 : 0] = 0;
        return (size_t)(end - line) - has_cr;
}

static int read_lines(struct text *text, struct kvd_why *why) {
        char *end, *last = text->at + text->n;
        int r = 0;

        for (char *line = text->at; line < last; line = end + 1) {
                size_t n;

                end = memchr(line, '\n', (size_t)(last - line)) ?: last;
                n = cut_line(text, line, end);
                if (take_line(text, line, n, why) == 0)
                        continue;
                r = kvd_refuse(why, -EINVAL, "%s:%u: %s", text->lines->path, text->number,
                               why->line);
                if (!text->lines->all)
                        return r;
                fprintf(text->lines->all, "%s\n", why->line);
        }
        return r;
}

int lines_read(const struct lines *lines, struct kvd_why *why) {
        _cleanup_(text_clear) struct text text = {.lines = lines};
        FILE *f = NULL;
        int r = open_file(lines, &f, why);

        if (r == 0)
                return 0;
        if (r > 0)
                r = read_file(f, &text, why);
        if (f)
                fclose(f);
        if (r == 0)
                r = check_mark(&text, why);
        if (r == 0)
                return read_lines(&text, why);
        if (lines->all)
                fprintf(lines->all, "%s\n", why->line);
        return r;
}
