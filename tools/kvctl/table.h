/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_TABLE_H
#define KVCTL_TABLE_H

/*
 * A table of cells, which can be shown as aligned columns, as one "title value" line per column, or
 * as JSON. Cells are filled row by row, in the order of the columns.
 * Running out of memory is remembered and reported when the table is printed.
 */

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ipc/base/util.h"
#include "ipc/msg.h"
#include "tools/kvctl/screen.h"
#include "tools/kvctl/units.h"

#define COLUMN_QUIET 0x100u /* not for people if all rows have the same value in it */

struct column {
        /* in JSON, never to change; "geometry.layers" is member layers of object geometry */
        const char *name;
        const char *title; /* for people; NULL: in JSON only */
        unsigned how;      /* enum unit, and COLUMN_QUIET */
};

enum table_form {
        TABLE_ROWS,   /* a header and rows; a list in JSON */
        TABLE_RECORD, /* exactly one row, shown as lines; an object in JSON */
};

struct table;

struct table *table_new(const char *name, enum table_form form, const struct column *columns,
                        size_t n_columns);
void table_free(struct table *table); /* NULL is fine */

/* fill: the next cell */
void table_text(struct table *table, const char *text, size_t n);
void table_string(struct table *table, const char *text); /* NULL: as table_none */
_printf_(2, 3) void table_format(struct table *table, const char *format, ...);
void table_number(struct table *table, uint64_t number);
void table_real(struct table *table, double real);
/* part / whole; none if whole is 0 */
void table_share(struct table *table, double part, double whole);
void table_flag(struct table *table, bool flag);
void table_ids(struct table *table, const uint32_t *ids, size_t n);
void table_none(struct table *table); /* "-", null */
/* the next n cells, whose columns are named after fields of the reply; 0 or 1 is a flag */
void table_fields(struct table *table, size_t n, enum kvd_msg_number number, const void *reply);
/* of the cell just filled, as in ESC[...m; a literal */
void table_colour(struct table *table, const char *colour);

/* rows */
size_t table_rows(const struct table *table);
/* by number or text, empty cells last; equal rows keep their order */
void table_sort(struct table *table, size_t column, bool ascending);
void table_mark(struct table *table, size_t column); /* highlights its title */
void table_cut(struct table *table, size_t rows);    /* keeps the first rows */

/* show; -ENOMEM if a cell is missing */
bool table_is_shown(const struct table *table); /* has columns for people, and rows */
int table_print(const struct table *table, const struct screen *screen); /* if it is shown */
int table_json(const struct table *table, json_t *to); /* as a member of that object */

#endif
