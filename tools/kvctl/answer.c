/* SPDX-License-Identifier: Apache-2.0 */

/*
 * An answer is a list of parts, in the order in which they are printed. People see all of them,
 * JSON has the tables.
 */

#include "tools/kvctl/answer.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>

#include "ipc/base/text.h"
#include "tools/kvctl/text.h"

struct part { /* one of these */
        struct table *table;
        char *sentence;
        char *picture;
};

struct answer {
        struct part *parts;
        size_t n;
        bool failed;
};

static void part_clear(struct part *part) {
        table_free(part->table);
        free(part->sentence);
        free(part->picture);
}

struct answer *answer_new(void) {
        return calloc(1, sizeof(struct answer));
}

struct answer *answer_free(struct answer *answer) {
        if (!answer)
                return NULL;
        for (size_t i = 0; i < answer->n; i++)
                part_clear(&answer->parts[i]);
        free(answer->parts);
        free(answer);
        return NULL;
}

void answer_freep(struct answer **answer) {
        answer_free(*answer);
}

/* The answer keeps what is in the part. */
static bool add(struct answer *answer, struct part part) {
        struct part *parts = realloc(answer->parts, (answer->n + 1) * sizeof *parts);

        if (!parts) {
                part_clear(&part);
                answer->failed = true;
                return false;
        }
        answer->parts = parts;
        answer->parts[answer->n++] = part;
        return true;
}

struct table *answer_table(struct answer *answer, const char *name, enum table_form form,
                           const struct column *columns, size_t n_columns) {
        struct table *table = table_new(name, form, columns, n_columns);

        return table && add(answer, (struct part){.table = table}) ? table : NULL;
}

void answer_say(struct answer *answer, const char *format, ...) {
        struct part part = {0};
        va_list list;

        va_start(list, format);
        if (vasprintf(&part.sentence, format, list) < 0)
                answer->failed = true;
        else
                add(answer, part);
        va_end(list);
}

void answer_picture(struct answer *answer, char *lines) {
        if (!lines)
                answer->failed = true;
        else
                add(answer, (struct part){.picture = lines});
}

/* An empty line sets tables and pictures apart. Successive sentences have none between them. */
static void print_gap(const struct part *before, const struct part *now,
                      const struct screen *screen) {
        if (before && !(before->sentence && now->sentence))
                fputc('\n', screen->to);
}

#define INDENT 2u /* of a sentence's further lines */

static int print_sentence(const char *sentence, const struct screen *screen) {
        _cleanup_(freep) char *text = NULL;
        size_t size;
        FILE *to = open_memstream(&text, &size);

        if (!to)
                return -ENOMEM;
        text_put(to, sentence, strlen(sentence));
        if (fclose(to) != 0)
                return -ENOMEM;
        kvd_put_wrapped(screen->to, text, screen->width > INDENT ? screen->width - INDENT : 0,
                        INDENT);
        fputc('\n', screen->to);
        return 0;
}

static int print_part(const struct part *part, const struct screen *screen) {
        if (part->table)
                return table_print(part->table, screen);
        if (part->picture) {
                fputs(part->picture, screen->to);
                return 0;
        }
        return print_sentence(part->sentence, screen);
}

int answer_print(const struct answer *answer, const struct screen *screen) {
        const struct part *before = NULL;
        int r = answer->failed ? -ENOMEM : 0;

        for (size_t i = 0; i < answer->n && r == 0; i++) {
                const struct part *part = &answer->parts[i];

                if (part->table && !table_is_shown(part->table))
                        continue;
                print_gap(before, part, screen);
                r = print_part(part, screen);
                before = part;
        }
        return r;
}

json_t *answer_json(const struct answer *answer) {
        json_t *json = json_object();
        int r = answer->failed ? -ENOMEM : 0;

        for (size_t i = 0; i < answer->n && r == 0; i++)
                if (answer->parts[i].table)
                        r = table_json(answer->parts[i].table, json);
        if (r == 0)
                return json;
        json_decref(json);
        return NULL;
}
