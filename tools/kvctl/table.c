/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Cells, filled row by row. They are JSON values, so that the table as JSON only needs their names;
 * table_show.c shows them to people.
 */

#include "tools/kvctl/table.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "tools/json.h"
#include "tools/kvctl/cells.h"

/* ---- life ------------------------------------------------------------------------------------ */

struct table *table_new(const char *name, enum table_form form, const struct column *columns,
                        size_t n_columns) {
        struct table *table = calloc(1, sizeof *table);

        if (table)
                *table = (struct table){.name = name,
                                        .form = form,
                                        .columns = columns,
                                        .n_columns = n_columns};
        return table;
}

void table_free(struct table *table) {
        if (!table)
                return;
        table_cut(table, 0);
        free(table->rows);
        free(table);
}

/* ---- fill ------------------------------------------------------------------------------------ */

/* The row of the next cell, or NULL. */
static struct row *row_to_fill(struct table *table) {
        size_t n = table->n_rows;
        struct row *rows = table->rows;

        if (n && json_array_size(rows[n - 1].cells) < table->n_columns)
                return &rows[n - 1];
        if ((n & (n - 1)) == 0) /* full: it has room for a power of two */
                rows = realloc(rows, MAX(2 * n, 1) * sizeof *rows);
        if (!rows)
                return NULL;
        table->rows = rows;
        rows[n] = (struct row){.cells = json_array()};
        return &rows[table->n_rows++];
}

/* Takes the value. NULL: out of memory. */
static void put(struct table *table, json_t *value) {
        struct row *row = table->failed ? NULL : row_to_fill(table);

        if (json_array_append_new(row ? row->cells : NULL, value) < 0)
                table->failed = true;
}

void table_text(struct table *table, const char *text, size_t n) {
        put(table, json_bytes(text, n));
}

void table_string(struct table *table, const char *text) {
        put(table, text ? json_bytes(text, strlen(text)) : json_null());
}

void table_format(struct table *table, const char *format, ...) {
        _cleanup_(freep) char *text = NULL;
        va_list list;
        int n;

        va_start(list, format);
        n = vasprintf(&text, format, list);
        va_end(list);
        if (n < 0)
                text = NULL;
        put(table, text ? json_bytes(text, (size_t)n) : NULL);
}

void table_number(struct table *table, uint64_t number) {
        put(table,
            number <= INT64_MAX ? json_integer((json_int_t)number) : json_real((double)number));
}

void table_real(struct table *table, double real) {
        put(table, isfinite(real) ? json_real(real) : json_null());
}

void table_share(struct table *table, double part, double whole) {
        table_real(table, whole > 0 ? part / whole : NAN);
}

void table_flag(struct table *table, bool flag) {
        put(table, json_boolean(flag));
}

void table_ids(struct table *table, const uint32_t *ids, size_t n) {
        json_t *list = json_array();

        for (size_t i = 0; i < n; i++)
                if (json_array_append_new(list, json_integer(ids[i])) < 0)
                        table->failed = true;
        put(table, list);
}

void table_none(struct table *table) {
        put(table, json_null());
}

static const struct kvd_field *next_field(const struct table *table,
                                          const struct kvd_msg_info *message) {
        size_t filled = table->n_rows ? json_array_size(table->rows[table->n_rows - 1].cells) : 0;
        const char *name = table->columns[filled % table->n_columns].name, *dot = strchr(name, '.');

        for (const struct kvd_field *field = message->fields;; field++) {
                assert(field->name);
                if (strcmp(field->name, dot ? dot + 1 : name) == 0)
                        return field;
        }
}

static void put_field(struct table *table, const struct kvd_field *field, const void *at) {
        const struct kvd_slice *text = at;
        const uint64_t *large = at;
        const uint32_t *small = at;

        if (field->type == KVD_FIELD_str)
                table_text(table, text->data, text->size);
        else if (field->limit == 1)
                table_flag(table, *small);
        else
                table_number(table, field->type == KVD_FIELD_u64 ? *large : *small);
}

void table_fields(struct table *table, size_t n, enum kvd_msg_number number, const void *reply) {
        const struct kvd_msg_info *message = kvd_msg_info(number);

        for (size_t i = 0; i < n && !table->failed; i++) {
                const struct kvd_field *field = next_field(table, message);

                put_field(table, field,
                          (const char *)reply + field->offset - offsetof(struct kvd_msg, attach));
        }
}

void table_colour(struct table *table, const char *colour) {
        struct row *row = table->n_rows ? &table->rows[table->n_rows - 1] : NULL;

        if (!row)
                return;
        row->colour = colour;
        row->coloured = json_array_size(row->cells) - 1;
}

/* ---- rows ------------------------------------------------------------------------------------ */

size_t table_rows(const struct table *table) {
        assert(table->failed || !table->n_rows ||
               json_array_size(table->rows[table->n_rows - 1].cells) == table->n_columns);
        return table->n_rows;
}

struct order {
        size_t column;
        bool ascending;
};

static double value_of(const json_t *cell) {
        return json_is_true(cell) ? 1 : json_number_value(cell);
}

/* Negative: a comes first in ascending order. */
static int compare_cells(const json_t *a, const json_t *b) {
        json_int_t x = json_integer_value(a), y = json_integer_value(b);

        if (json_is_string(a) && json_is_string(b))
                return strcmp(json_string_value(a), json_string_value(b));
        if (json_is_integer(a) && json_is_integer(b))
                return (x > y) - (x < y);
        return (value_of(a) > value_of(b)) - (value_of(a) < value_of(b));
}

static int compare(const void *a, const void *b, void *arg) {
        const struct row *x = a, *y = b;
        const struct order *order = arg;
        const json_t *p = json_array_get(x->cells, order->column),
                     *q = json_array_get(y->cells, order->column);
        int r = json_is_null(p) || json_is_null(q) ? 0 : compare_cells(p, q);

        if (json_is_null(p) != json_is_null(q))
                return json_is_null(q) ? -1 : 1;
        if (r)
                return order->ascending ? r : -r;
        return (x->number > y->number) - (x->number < y->number);
}

void table_sort(struct table *table, size_t column, bool ascending) {
        struct order order = {column, ascending};

        for (size_t i = 0; i < table->n_rows; i++)
                table->rows[i].number = i;
        if (table->n_rows)
                qsort_r(table->rows, table->n_rows, sizeof *table->rows, compare, &order);
}

void table_mark(struct table *table, size_t column) {
        table->marked = column + 1;
}

void table_cut(struct table *table, size_t rows) {
        while (table->n_rows > rows)
                json_decref(table->rows[--table->n_rows].cells);
}

/* ---- as JSON --------------------------------------------------------------------------------- */

/* A column named a.b becomes member b of an object a. */
static int add_cell(json_t *row, const char *name, json_t *cell) {
        const char *dot = strchr(name, '.');
        size_t n = dot ? (size_t)(dot - name) : 0;
        json_t *object = dot ? json_object_getn(row, name, n) : row;

        if (!object) {
                object = json_object();
                if (json_object_setn_new(row, name, n, object) < 0)
                        return -ENOMEM;
        }
        return json_object_set(object, dot ? dot + 1 : name, cell);
}

static json_t *row_json(const struct table *table, size_t row) {
        json_t *all = json_object();
        int r = 0;

        for (size_t i = 0; i < table->n_columns && r == 0; i++)
                r = add_cell(all, table->columns[i].name, cell_at(table, row, i));
        if (r == 0)
                return all;
        json_decref(all);
        return NULL;
}

int table_json(const struct table *table, json_t *to) {
        json_t *rows = json_array();
        int r = table->failed ? -ENOMEM : 0;

        for (size_t i = 0; i < table_rows(table) && r == 0; i++)
                r = json_array_append_new(rows, row_json(table, i));
        if (r == 0)
                r = json_object_set(to, table->name,
                                    table->form == TABLE_RECORD ? json_array_get(rows, 0) : rows);
        json_decref(rows);
        return r < 0 ? -ENOMEM : 0;
}
