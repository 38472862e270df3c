/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Cells, filled row by row. What they look like is decided when they are shown (table_show.c) or
 * written (table_json.c).
 */

#include "tools/kvctl/table.h"

#include <assert.h>
#include <stdarg.h>
#include <string.h>

#include "tools/kvctl/cells.h"

/* ---- life ------------------------------------------------------------------------------------ */

struct table *table_new(const char *name, enum table_form form, const struct column *columns,
                        size_t n_columns) {
        struct table *table = calloc(1, sizeof *table);

        if (table)
                *table = (struct table){.name = name, .form = form, .columns = columns, .n_columns = n_columns};
        return table;
}

static void cell_clear(struct cell *cell) {
        if (cell->kind == CELL_TEXT)
                free(cell->text);
        if (cell->kind == CELL_IDS)
                free(cell->ids);
}

struct table *table_free(struct table *table) {
        if (!table)
                return NULL;
        for (size_t i = 0; i < table->n_cells; i++)
                cell_clear(&table->cells[i]);
        free(table->cells);
        free(table);
        return NULL;
}

void table_freep(struct table **table) {
        table_free(*table);
}

/* ---- fill ------------------------------------------------------------------------------------ */

/* Always returns a cell to write to: a dummy once memory has run out. */
static struct cell *next_cell(struct table *table) {
        static struct cell nowhere;
        size_t room = table->room ? 2 * table->room : 64;
        struct cell *cells;

        if (table->n_cells == table->room && !table->failed) {
                cells = realloc(table->cells, room * sizeof *cells);
                table->failed = !cells;
                table->cells = cells ? cells : table->cells;
                table->room = cells ? room : table->room;
        }
        return table->failed ? &nowhere : &table->cells[table->n_cells++];
}

static void *copied(struct table *table, const void *from, size_t n) {
        char *to = malloc(n + 1);

        if (!to) {
                table->failed = true;
                return NULL;
        }
        if (n)
                memcpy(to, from, n);
        to[n] = 0;
        return to;
}

void table_text(struct table *table, const char *text, size_t n) {
        struct cell *cell = next_cell(table);

        if (!table->failed)
                *cell = (struct cell){.kind = CELL_TEXT, .text = copied(table, text, n), .n = n};
}

void table_string(struct table *table, const char *text) {
        if (text)
                table_text(table, text, strlen(text));
        else
                table_none(table);
}

void table_format(struct table *table, const char *format, ...) {
        _cleanup_(freep) char *text = NULL;
        va_list list;
        int n;

        va_start(list, format);
        n = vasprintf(&text, format, list);
        va_end(list);
        if (n < 0) {
                text = NULL;
                table->failed = true;
                return;
        }
        table_text(table, text, (size_t)n);
}

void table_number(struct table *table, uint64_t number) {
        *next_cell(table) = (struct cell){.kind = CELL_NUMBER, .number = number};
}

void table_real(struct table *table, double real) {
        *next_cell(table) = (struct cell){.kind = CELL_REAL, .real = real};
}

void table_share(struct table *table, double part, double whole) {
        if (whole > 0)
                table_real(table, part / whole);
        else
                table_none(table);
}

void table_flag(struct table *table, bool flag) {
        *next_cell(table) = (struct cell){.kind = CELL_FLAG, .number = flag};
}

void table_ids(struct table *table, const uint32_t *ids, size_t n) {
        struct cell *cell = next_cell(table);

        if (!table->failed)
                *cell = (struct cell){.kind = CELL_IDS, .ids = copied(table, ids, n * sizeof *ids), .n = n};
}

void table_none(struct table *table) {
        *next_cell(table) = (struct cell){.kind = CELL_NONE};
}

void table_colour(struct table *table, const char *colour) {
        if (table->n_cells)
                table->cells[table->n_cells - 1].colour = colour;
}

/* ---- rows ------------------------------------------------------------------------------------ */

size_t table_rows(const struct table *table) {
        assert(table->failed || table->n_cells % table->n_columns == 0);
        return table->n_cells / table->n_columns;
}

struct order {
        const struct cell *cell;
        size_t row;
        bool ascending;
};

static double value_of(const struct cell *cell) {
        return cell->kind == CELL_REAL ? cell->real : (double)cell->number;
}

/* Negative: a comes first in ascending order. */
static int compare_cells(const struct cell *a, const struct cell *b) {
        if (a->kind == CELL_TEXT && b->kind == CELL_TEXT)
                return strcmp(a->text, b->text);
        if (a->kind == CELL_NUMBER && b->kind == CELL_NUMBER)
                return (a->number > b->number) - (a->number < b->number);
        return (value_of(a) > value_of(b)) - (value_of(a) < value_of(b));
}

static int compare(const void *a, const void *b) {
        const struct order *x = a, *y = b;
        bool x_is = x->cell->kind != CELL_NONE, y_is = y->cell->kind != CELL_NONE;
        int r = x_is && y_is ? compare_cells(x->cell, y->cell) : 0;

        if (x_is != y_is)
                return x_is ? -1 : 1;
        if (r)
                return x->ascending ? r : -r;
        return (x->row > y->row) - (x->row < y->row);
}

void table_sort(struct table *table, size_t column, bool ascending) {
        size_t rows = table_rows(table), bytes = table->n_columns * sizeof *table->cells;
        _cleanup_(freep) struct order *order = calloc(rows + 1, sizeof *order);
        struct cell *sorted = calloc(rows + 1, bytes);

        if (!order || !sorted || table->failed) {
                table->failed = true;
                free(sorted);
                return;
        }
        for (size_t i = 0; i < rows; i++)
                order[i] = (struct order){cell_at(table, i, column), i, ascending};
        qsort(order, rows, sizeof *order, compare);
        for (size_t i = 0; i < rows; i++)
                memcpy(sorted + i * table->n_columns, cell_at(table, order[i].row, 0), bytes);
        free(table->cells);
        table->cells = sorted;
        table->room = (rows + 1) * table->n_columns;
}

void table_mark(struct table *table, size_t column) {
        table->marked = column + 1;
}

void table_cut(struct table *table, size_t rows) {
        while (table_rows(table) > rows)
                for (size_t i = 0; i < table->n_columns; i++)
                        cell_clear(&table->cells[--table->n_cells]);
}
