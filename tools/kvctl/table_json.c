/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A table as JSON. A column named a.b becomes member b of an object a.
 */

#include <errno.h>
#include <string.h>

#include "tools/kvctl/cells.h"

static void cell_json(const struct cell *cell, const char *name, struct json *json) {
        switch (cell->kind) {
        case CELL_NONE:
                json_nil(json, name);
                break;
        case CELL_TEXT:
                json_text(json, name, cell->text, cell->n);
                break;
        case CELL_NUMBER:
                json_u64(json, name, cell->number);
                break;
        case CELL_REAL:
                json_f64(json, name, cell->real);
                break;
        case CELL_FLAG:
                json_bool(json, name, cell->number);
                break;
        case CELL_IDS:
                json_ids(json, name, cell->ids, cell->n);
                break;
        }
}

/* Length of "geometry" in "geometry.layers", 0 in "layers". */
static size_t object_length(const char *name) {
        const char *dot = strchr(name, '.');

        return dot ? (size_t)(dot - name) : 0;
}

static bool same_object(const char *a, const char *b) {
        return object_length(a) == object_length(b) && strncmp(a, b, object_length(a)) == 0;
}

static void row_json(const struct table *table, size_t row, struct json *json) {
        const char *before = "";

        for (size_t i = 0; i < table->n_columns; i++) {
                const char *name = table->columns[i].name;
                size_t n = object_length(name);
                char object[64];

                if (object_length(before) && !same_object(before, name))
                        json_close(json, '}');
                if (n && !same_object(before, name)) {
                        snprintf(object, sizeof object, "%.*s", (int)n, name);
                        json_open(json, object, '{');
                }
                cell_json(cell_at(table, row, i), n ? name + n + 1 : name, json);
                before = name;
        }
        if (object_length(before))
                json_close(json, '}');
}

int table_json(const struct table *table, struct json *json) {
        if (table->failed)
                return -ENOMEM;
        json_open(json, table->name, table->form == TABLE_RECORD ? '{' : '[');
        for (size_t row = 0; row < table_rows(table); row++) {
                if (table->form == TABLE_ROWS)
                        json_open(json, NULL, '{');
                row_json(table, row, json);
                if (table->form == TABLE_ROWS)
                        json_close(json, '}');
        }
        json_close(json, table->form == TABLE_RECORD ? '}' : ']');
        return 0;
}
