/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_ANSWER_H
#define KVCTL_ANSWER_H

/*
 * A verb's answer: tables, which people and programs get, and sentences and pictures, which only
 * people get. In JSON an answer is an object with one member per table.
 */

#include "tools/kvctl/table.h"

struct answer;

struct answer *answer_new(void);
struct answer *answer_free(struct answer *answer);
void answer_freep(struct answer **answer);

/* The answer keeps the table. NULL: out of memory. */
struct table *answer_table(struct answer *answer, const char *name, enum table_form form,
                           const struct column *columns, size_t n_columns);
#define ANSWER_ROWS(answer, name, columns) \
        answer_table(answer, name, TABLE_ROWS, columns, ARRAY_SIZE(columns))
#define ANSWER_RECORD(answer, name, columns) \
        answer_table(answer, name, TABLE_RECORD, columns, ARRAY_SIZE(columns))

/* one line, without its end */
_printf_(2, 3) void answer_say(struct answer *answer, const char *format, ...);
/* takes ownership of lines, which may contain colours; NULL: out of memory */
void answer_picture(struct answer *answer, char *lines);

/* 0, or -ENOMEM if a part is missing */
int answer_print(const struct answer *answer, const struct screen *screen);
json_t *answer_json(const struct answer *answer); /* NULL: out of memory, too */

#endif
