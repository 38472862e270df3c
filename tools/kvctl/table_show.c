/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A table on a terminal. Where its columns do not fit side by side, it is printed in parts, one
 * below the other, each of which begins with the columns that name a row.
 */

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "tools/kvctl/cells.h"
#include "tools/kvctl/text.h"

#define IDS_SHOWN 8u
#define WRAP_MIN 12u /* columns; narrower text is unreadable */

static void put_ids(FILE *to, const uint32_t *ids, size_t n) {
        for (size_t i = 0; i < MIN(n, IDS_SHOWN); i++)
                fprintf(to, "%s%" PRIu32, i ? " " : "", ids[i]);
        if (n > IDS_SHOWN)
                fputs(" ..", to);
}

static void put_cell(FILE *to, const struct cell *cell, enum unit unit) {
        char text[UNIT_TEXT_MAX] = "-";

        if (cell->kind == CELL_TEXT) {
                text_put(to, cell->text, cell->n);
                return;
        }
        if (cell->kind == CELL_IDS) {
                put_ids(to, cell->ids, cell->n);
                return;
        }
        if (cell->kind == CELL_NUMBER)
                unit_format_u64(unit, cell->number, text);
        else if (cell->kind == CELL_REAL)
                unit_format(unit, cell->real, text);
        else if (cell->kind == CELL_FLAG)
                strcpy(text, cell->number ? "yes" : "no");
        fputs(text, to);
}

static enum unit unit_of(const struct table *table, size_t column) {
        return (enum unit)(table->columns[column].how & (COLUMN_QUIET - 1));
}

/* The cell as text, owned by the caller; NULL: out of memory. */
static char *cell_text(const struct table *table, size_t row, size_t column) {
        char *text = NULL;
        size_t n;
        FILE *to = open_memstream(&text, &n);

        if (!to)
                return NULL;
        put_cell(to, cell_at(table, row, column), unit_of(table, column));
        if (fclose(to) != 0) {
                free(text);
                return NULL;
        }
        return text;
}

static bool column_is_number(const struct table *table, size_t column) {
        return unit_of(table, column) != UNIT_NONE ||
               (table_rows(table) && cell_at(table, 0, column)->kind == CELL_NUMBER);
}

static bool column_width(const struct table *table, size_t column, unsigned *width) {
        *width = text_width(table->columns[column].title);
        for (size_t row = 0; row < table_rows(table); row++) {
                _cleanup_(freep) char *text = cell_text(table, row, column);

                if (!text)
                        return false;
                *width = MAX(*width, text_width(text));
        }
        return true;
}

static void put_padding(FILE *to, unsigned width, unsigned used) {
        fprintf(to, "%*s", (int)(width > used ? width - used : 0), "");
}

static void put_wrapped(const struct screen *screen, const char *text, unsigned indent) {
        text_put_wrapped(screen->to, text,
                         screen->width > indent + WRAP_MIN ? screen->width - indent : 0, indent);
}

static bool same_text(const struct cell *a, const struct cell *b) {
        return a->kind == b->kind &&
               (a->kind != CELL_TEXT || (a->n == b->n && memcmp(a->text, b->text, a->n) == 0)) &&
               ((a->kind != CELL_NUMBER && a->kind != CELL_FLAG) || a->number == b->number);
}

static bool shown(const struct table *table, size_t column) {
        if (!table->columns[column].title || !(table->columns[column].how & COLUMN_QUIET))
                return table->columns[column].title != NULL;
        for (size_t row = 1; row < table_rows(table); row++)
                if (!same_text(cell_at(table, 0, column), cell_at(table, row, column)))
                        return true;
        return false;
}

struct layout {
        struct column_layout {
                bool shown, right;
                unsigned width;
                unsigned part;
        } *column;
        size_t n;
        size_t keys;    /* number of columns that begin every part: a space's name and domain */
        unsigned parts; /* at least 1 */
        unsigned part;  /* being printed */
        size_t last;    /* last column of that part */
};

static bool in_part(const struct layout *layout, size_t column) {
        const struct column_layout *c = &layout->column[column];

        return c->shown && (column < layout->keys || c->part == layout->part);
}

static void put_coloured(const struct screen *screen, const char *text, const char *colour) {
        if (screen->colour && colour)
                fprintf(screen->to, "\033[%sm%s\033[0m", colour, text);
        else
                fputs(text, screen->to);
}

static void put_in_column(const struct screen *screen, const struct layout *layout, size_t column,
                          const char *text, const char *colour, unsigned *at) {
        const struct column_layout *c = &layout->column[column];

        if (*at)
                fputs("  ", screen->to);
        *at += *at ? 2 : 0;
        if (c->right)
                put_padding(screen->to, c->width, text_width(text));
        if (column == layout->last && !colour)
                put_wrapped(screen, text, *at);
        else
                put_coloured(screen, text, colour);
        if (column != layout->last)
                put_padding(screen->to, c->right ? 0 : c->width, text_width(text));
        *at += c->width;
}

static void print_header(const struct table *table, const struct screen *screen,
                         const struct layout *layout) {
        unsigned at = 0;

        for (size_t i = 0; i < layout->n; i++)
                if (in_part(layout, i))
                        put_in_column(screen, layout, i, table->columns[i].title,
                                      i + 1 == table->marked ? "1;7" : "1", &at);
        fputc('\n', screen->to);
}

static int print_row(const struct table *table, const struct screen *screen,
                     const struct layout *layout, size_t row) {
        unsigned at = 0;

        for (size_t i = 0; i < layout->n; i++) {
                _cleanup_(freep) char *text = NULL;

                if (!in_part(layout, i))
                        continue;
                text = cell_text(table, row, i);
                if (!text)
                        return -ENOMEM;
                put_in_column(screen, layout, i, text, cell_at(table, row, i)->colour, &at);
        }
        fputc('\n', screen->to);
        return 0;
}

static size_t skip_quiet(const struct table *table, size_t from) {
        while (from < table->n_columns && (table->columns[from].how & COLUMN_QUIET ||
                                           !table->columns[from].title))
                from++;
        return from;
}

static int measure(const struct table *table, struct layout *layout) {
        layout->keys = skip_quiet(table, skip_quiet(table, 0) + 1);
        for (size_t i = 0; i < layout->n; i++) {
                struct column_layout *c = &layout->column[i];

                c->shown = shown(table, i);
                c->right = column_is_number(table, i);
                if (c->shown && !column_width(table, i, &c->width))
                        return -ENOMEM;
                layout->last = c->shown ? i : layout->last;
        }
        return 0;
}

/* Text in the last column is wrapped, unless it would be too narrow to read. */
static unsigned least_width(const struct table *table, const struct layout *layout, size_t column) {
        const struct column_layout *c = &layout->column[column];

        return column == layout->last && !c->right ?
                       MIN(c->width, MAX(text_width(table->columns[column].title), WRAP_MIN + 1)) :
                       c->width;
}

/* Each column goes to the part of the previous one if it fits, or else begins the next part. */
static void divide(const struct table *table, struct layout *layout, unsigned room) {
        unsigned at = 0, part = 0, keys = 0;

        for (size_t i = 0; i < layout->n; i++) {
                struct column_layout *c = &layout->column[i];

                if (!c->shown)
                        continue;
                if (room && at > keys && at + 2 + least_width(table, layout, i) > room) {
                        part++;
                        at = keys;
                }
                at += c->width + (at ? 2 : 0);
                keys = i < layout->keys ? at : keys;
                c->part = part;
        }
        layout->parts = part + 1;
}

static void begin_part(struct layout *layout, unsigned part) {
        layout->part = part;
        for (size_t i = 0; i < layout->n; i++)
                if (in_part(layout, i))
                        layout->last = i;
}

static int print_part(const struct table *table, const struct screen *screen,
                      const struct layout *layout) {
        int r = 0;

        if (layout->part)
                fputc('\n', screen->to);
        print_header(table, screen, layout);
        for (size_t row = 0; row < table_rows(table) && r == 0; row++)
                r = print_row(table, screen, layout, row);
        return r;
}

static int print_rows(const struct table *table, const struct screen *screen) {
        _cleanup_(freep) struct column_layout *columns = calloc(table->n_columns, sizeof *columns);
        struct layout layout = {.column = columns, .n = table->n_columns};
        int r = columns ? measure(table, &layout) : -ENOMEM;

        if (r < 0)
                return r;
        divide(table, &layout, screen->width);
        for (unsigned part = 0; part < layout.parts && r == 0; part++) {
                begin_part(&layout, part);
                r = print_part(table, screen, &layout);
        }
        return r;
}

static bool in_record(const struct table *table, size_t column) {
        return table->columns[column].title && cell_at(table, 0, column)->kind != CELL_NONE;
}

/* One line per column that has a value. */
static int print_record(const struct table *table, const struct screen *screen) {
        unsigned width = 0;

        for (size_t i = 0; i < table->n_columns; i++)
                width = in_record(table, i) ? MAX(width, text_width(table->columns[i].title)) :
                                              width;
        for (size_t i = 0; i < table->n_columns; i++) {
                _cleanup_(freep) char *text = in_record(table, i) ? cell_text(table, 0, i) : NULL;

                if (!in_record(table, i))
                        continue;
                if (!text)
                        return -ENOMEM;
                fputs(table->columns[i].title, screen->to);
                put_padding(screen->to, width + 2, text_width(table->columns[i].title));
                put_wrapped(screen, text, width + 2);
                fputc('\n', screen->to);
        }
        return 0;
}

bool table_is_shown(const struct table *table) {
        bool titles = false;

        for (size_t i = 0; i < table->n_columns; i++)
                titles = titles || table->columns[i].title;
        return titles && table_rows(table) > 0;
}

int table_print(const struct table *table, const struct screen *screen) {
        if (table->failed)
                return -ENOMEM;
        return table->form == TABLE_RECORD ? print_record(table, screen) :
                                             print_rows(table, screen);
}
