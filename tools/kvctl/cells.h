/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_CELLS_H
#define KVCTL_CELLS_H

/* The inside of a table, for table.c, which fills it, and table_show.c and table_json.c. */

#include "tools/kvctl/table.h"

enum cell_kind { CELL_NONE, CELL_TEXT, CELL_NUMBER, CELL_REAL, CELL_FLAG, CELL_IDS };

struct cell {
        enum cell_kind kind;
        union {
                uint64_t number;
                double real;
                char *text;
                uint32_t *ids;
        };
        size_t n;           /* of text or ids */
        const char *colour; /* as in ESC[...m, or NULL */
};

struct table {
        const char *name;
        enum table_form form;
        const struct column *columns;
        size_t n_columns;
        struct cell *cells; /* rows of n_columns */
        size_t n_cells, room;
        size_t marked; /* column plus 1; 0 if none */
        bool failed;
};

static inline const struct cell *cell_at(const struct table *table, size_t row, size_t column) {
        return &table->cells[row * table->n_columns + column];
}

#endif
