/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_CELLS_H
#define KVCTL_CELLS_H

/* The inside of a table, for table.c, which fills it, and table_show.c. */

#include "tools/kvctl/table.h"

struct row {
        json_t *cells;      /* a list; owned */
        size_t number;      /* before sorting */
        const char *colour; /* of one cell, as in ESC[...m, or NULL */
        size_t coloured;
};

struct table {
        const char *name;
        enum table_form form;
        const struct column *columns;
        size_t n_columns, n_rows;
        struct row *rows; /* owned */
        size_t marked;    /* column plus 1; 0 if none */
        bool failed;
};

static inline json_t *cell_at(const struct table *table, size_t row, size_t column) {
        return json_array_get(table->rows[row].cells, column);
}

#endif
