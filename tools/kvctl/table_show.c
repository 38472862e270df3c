/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A table on a terminal. Where its columns do not fit side by side, it is printed in parts, one
 * below the other, each of which begins with the columns that name a row.
 */

#include <errno.h>

#include "ipc/base/text.h"
#include "tools/kvctl/cells.h"
#include "tools/kvctl/text.h"

#define IDS_SHOWN 8u
#define WRAP_MIN 12u /* columns; narrower text is unreadable */

/* ---- cells as text --------------------------------------------------------------------------- */

static void put_ids(FILE *to, const json_t *ids) {
        size_t n = json_array_size(ids);

        for (size_t i = 0; i < MIN(n, IDS_SHOWN); i++)
                fprintf(to, "%s%" JSON_INTEGER_FORMAT, i ? " " : "",
                        json_integer_value(json_array_get(ids, i)));
        if (n > IDS_SHOWN)
                fputs(" ..", to);
}

static void put_cell(FILE *to, const json_t *cell, enum unit unit) {
        char text[UNIT_TEXT_MAX] = "-";

        if (json_is_string(cell)) {
                text_put(to, json_string_value(cell), json_string_length(cell));
                return;
        }
        if (json_is_array(cell)) {
                put_ids(to, cell);
                return;
        }
        if (json_is_integer(cell))
                unit_format_u64(unit, (uint64_t)json_integer_value(cell), text);
        else if (json_is_real(cell))
                unit_format(unit, json_real_value(cell), text);
        fputs(json_is_true(cell) ? "yes" : json_is_false(cell) ? "no" : text, to);
}

/* As people see it; NULL: out of memory. */
static json_t *cell_text(const json_t *cell, enum unit unit, const char *colour) {
        _cleanup_(freep) char *text = NULL;
        size_t n;
        FILE *to = open_memstream(&text, &n);

        if (!to)
                return NULL;
        if (colour)
                fprintf(to, "\033[%sm", colour);
        put_cell(to, cell, unit);
        fputs(colour ? "\033[0m" : "", to);
        return fclose(to) == 0 ? json_stringn(text, n) : NULL;
}

/* ---- lines of texts -------------------------------------------------------------------------- */

struct column_layout {
        size_t from; /* column of the table */
        bool right;
        unsigned width, part;
};

struct layout {
        struct column_layout *column; /* owned */
        size_t n;
        size_t keys;   /* number of columns that begin every part: a space's name and domain */
        json_t *texts; /* lines of n; owned */
        bool failed;
};

static void layout_clear(struct layout *l) {
        free(l->column);
        json_decref(l->texts);
}

static const char *text_at(const struct layout *l, size_t line, size_t column) {
        return json_string_value(json_array_get(l->texts, line * l->n + column));
}

static void add(struct layout *l, json_t *text) {
        l->failed |= json_array_append_new(l->texts, text) < 0;
}

static enum unit unit_of(const struct table *table, size_t column) {
        return (enum unit)(table->columns[column].how & (COLUMN_QUIET - 1));
}

static bool is_shown(const struct table *table, size_t column) {
        bool differs = !(table->columns[column].how & COLUMN_QUIET);

        for (size_t row = 1; row < table->n_rows && !differs; row++)
                differs = !json_equal(cell_at(table, 0, column), cell_at(table, row, column));
        return table->columns[column].title && differs;
}

static void choose_columns(const struct table *table, struct layout *l) {
        unsigned names = 0;

        for (size_t i = 0; i < table->n_columns; i++) {
                bool right = unit_of(table, i) != UNIT_NONE ||
                             json_is_integer(cell_at(table, 0, i));

                names += table->columns[i].title && !(table->columns[i].how & COLUMN_QUIET);
                if (!is_shown(table, i))
                        continue;
                l->column[l->n++] = (struct column_layout){.from = i, .right = right};
                l->keys = names <= 1 ? l->n : l->keys;
        }
}

static void add_titles(const struct table *table, bool colour, struct layout *l) {
        for (size_t i = 0; i < l->n; i++) {
                const char *title = table->columns[l->column[i].from].title,
                           *how = l->column[i].from + 1 == table->marked ? "1;7" : "1";

                add(l, colour ? json_sprintf("\033[%sm%s\033[0m", how, title) : json_string(title));
        }
}

static void add_rows(const struct table *table, bool colour, struct layout *l) {
        for (size_t row = 0; row < table->n_rows; row++)
                for (size_t i = 0; i < l->n; i++) {
                        size_t from = l->column[i].from;
                        bool coloured = colour && from == table->rows[row].coloured;

                        add(l, cell_text(cell_at(table, row, from), unit_of(table, from),
                                         coloured ? table->rows[row].colour : NULL));
                }
}

/* One line per column that has a value. */
static void add_record(const struct table *table, struct layout *l) {
        l->n = 2;
        l->keys = 1;
        for (size_t i = 0; i < table->n_columns; i++) {
                const json_t *cell = cell_at(table, 0, i);

                if (!table->columns[i].title || json_is_null(cell))
                        continue;
                add(l, json_string(table->columns[i].title));
                add(l, cell_text(cell, unit_of(table, i), NULL));
        }
}

/* ---- parts that fit -------------------------------------------------------------------------- */

static void measure(struct layout *l) {
        for (size_t i = 0; i < json_array_size(l->texts); i++) {
                unsigned *width = &l->column[i % l->n].width;

                *width = MAX(*width, kvd_text_width(text_at(l, 0, i)));
        }
}

/* Text in the last column is wrapped, unless it would be too narrow to read. */
static unsigned least_width(const struct layout *l, size_t column) {
        const struct column_layout *c = &l->column[column];

        return column + 1 == l->n && !c->right ?
                       MIN(c->width, MAX(kvd_text_width(text_at(l, 0, column)), WRAP_MIN + 1)) :
                       c->width;
}

/* Each column goes to the part of the previous one if it fits, or else begins the next part. */
static void divide(struct layout *l, unsigned room) {
        unsigned at = 0, part = 0, keys = 0;

        for (size_t i = 0; i < l->n; i++) {
                if (room && at > keys && at + 2 + least_width(l, i) > room) {
                        part++;
                        at = keys;
                }
                at += l->column[i].width + (at ? 2 : 0);
                keys = i < l->keys ? at : keys;
                l->column[i].part = part;
        }
}

static void print_line(const struct layout *l, const struct screen *screen, size_t line,
                       unsigned part) {
        unsigned at = 0, used = 0;

        for (size_t i = 0; i < l->n; i++) {
                const struct column_layout *c = &l->column[i];
                const char *text = text_at(l, line, i);
                unsigned width = kvd_text_width(text),
                         from = at + (c->right ? c->width - width : 0);
                bool wraps = i >= l->keys && screen->width > from + WRAP_MIN;

                if (i >= l->keys && c->part != part)
                        continue;
                fprintf(screen->to, "%*s", (int)(from - used), "");
                kvd_put_wrapped(screen->to, text, wraps ? screen->width - from : 0, from);
                used = from + width;
                at += c->width + 2;
        }
        fputc('\n', screen->to);
}

static void print_parts(const struct layout *l, const struct screen *screen) {
        for (unsigned part = 0; part <= l->column[l->n - 1].part; part++) {
                if (part)
                        fputc('\n', screen->to);
                for (size_t line = 0; line < json_array_size(l->texts) / l->n; line++)
                        print_line(l, screen, line, part);
        }
}

int table_print(const struct table *table, const struct screen *screen) {
        _cleanup_(layout_clear) struct layout l = {.texts = json_array()};

        l.column = calloc(table->n_columns + 1, sizeof *l.column);
        if (!l.column || table->failed)
                return -ENOMEM;
        if (table->form == TABLE_RECORD) {
                add_record(table, &l);
        } else {
                choose_columns(table, &l);
                add_titles(table, screen->colour, &l);
                add_rows(table, screen->colour, &l);
        }
        if (l.failed)
                return -ENOMEM;
        if (l.n == 0)
                return 0;
        measure(&l);
        divide(&l, screen->width);
        print_parts(&l, screen);
        return 0;
}

bool table_is_shown(const struct table *table) {
        bool titles = false;

        for (size_t i = 0; i < table->n_columns; i++)
                titles = titles || table->columns[i].title;
        return titles && table->n_rows > 0;
}
