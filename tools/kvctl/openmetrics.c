/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes metrics directly, without building a tree. In the older format, a counter's family has the
 * name of its samples, and there are no units, no info type and no end mark. A label's value is not
 * trusted: invalid UTF-8 and control characters become question marks, and quotes are escaped.
 */

#include "tools/kvctl/openmetrics.h"

#include <inttypes.h>
#include <string.h>

#include "ipc/base/text.h"
#include "tools/kvctl/units.h"

#define LABELS_MAX 6u

const struct column openmetrics_columns[OPENMETRICS_COLUMNS] = {
        {"name", NULL, UNIT_NONE},
        {"type", NULL, UNIT_NONE},
        {"labels", NULL, UNIT_NONE},
        {"value", NULL, UNIT_NONE},
};

static const char *ending(const struct family *family) {
        if (strcmp(family->type, "counter") == 0)
                return "_total";
        return strcmp(family->type, "info") == 0 ? "_info" : "";
}

static void put_plain_family(FILE *to, const struct family *family) {
        const char *type = strcmp(family->type, "info") == 0 ? "gauge" : family->type;

        fprintf(to, "# HELP %s%s %s\n", family->name, ending(family), family->help);
        fprintf(to, "# TYPE %s%s %s\n", family->name, ending(family), type);
}

void openmetrics_family(struct openmetrics *om, const struct family *family) {
        om->family = family;
        if (om->plain) {
                put_plain_family(om->to, family);
                return;
        }
        fprintf(om->to, "# TYPE %s %s\n", family->name, family->type);
        if (*family->unit)
                fprintf(om->to, "# UNIT %s %s\n", family->name, family->unit);
        fprintf(om->to, "# HELP %s %s\n", family->name, family->help);
}

/* ---- labels ---------------------------------------------------------------------------------- */

static void put_value(FILE *to, const char *text) {
        for (size_t n = strlen(text), bytes; n; text += bytes, n -= bytes) {
                size_t length = kvd_utf8(text, n);

                bytes = MAX(length, (size_t)1);
                if (!length || kvd_is_control(text, length)) {
                        fputc('?', to);
                        continue;
                }
                if (*text == '"' || *text == '\\')
                        fputc('\\', to);
                fwrite(text, 1, length, to);
        }
}

static void put_labels(FILE *to, const struct label *labels, size_t n) {
        for (size_t i = 0; i < n; i++) {
                fprintf(to, "%s%s=\"", i ? "," : "", labels[i].name);
                put_value(to, labels[i].value);
                fputc('"', to);
        }
}

/* Owned; NULL: out of memory. */
static char *labels_text(const struct label *labels, size_t n) {
        char *text = NULL;
        size_t size;
        FILE *to = open_memstream(&text, &size);

        if (!to)
                return NULL;
        put_labels(to, labels, n);
        if (fclose(to) != 0) {
                free(text);
                return NULL;
        }
        return text;
}

/* ---- samples --------------------------------------------------------------------------------- */

/* Writes a sample up to its value. */
static void begin(struct openmetrics *om, const char *end, const struct label *labels, size_t n) {
        _cleanup_(freep) char *text = labels_text(labels, n);

        fprintf(om->to, n ? "%s%s{%s} " : "%s%s%s ", om->family->name, end, text ? text : "");
        if (!om->rows)
                return;
        table_format(om->rows, "%s%s", om->family->name, end);
        table_string(om->rows, om->family->type);
        table_string(om->rows, text);
}

static void put_number(struct openmetrics *om, const char *end, const struct label *labels,
                       size_t n, uint64_t value) {
        begin(om, end, labels, n);
        fprintf(om->to, "%" PRIu64 "\n", value);
        if (om->rows)
                table_number(om->rows, value);
}

static void put_real(struct openmetrics *om, const char *end, const struct label *labels, size_t n,
                     double value) {
        begin(om, end, labels, n);
        fprintf(om->to, "%.9g\n", value);
        if (om->rows)
                table_real(om->rows, value);
}

void openmetrics_number(struct openmetrics *om, const struct label *labels, size_t n,
                        uint64_t value) {
        put_number(om, ending(om->family), labels, n, value);
}

void openmetrics_real(struct openmetrics *om, const struct label *labels, size_t n, double value) {
        put_real(om, ending(om->family), labels, n, value);
}

void openmetrics_histogram(struct openmetrics *om, const struct label *labels, size_t n,
                           const struct histogram *h) {
        struct label all[LABELS_MAX];
        double limit = h->first;
        uint64_t count = 0;
        char le[32];

        n = MIN(n, LABELS_MAX - 1);
        memcpy(all, labels, n * sizeof *labels);
        all[n] = (struct label){"le", le};
        for (size_t i = 0; i < h->n; i++, limit *= 2) {
                snprintf(le, sizeof le, i + 1 < h->n ? "%.9g" : "+Inf", limit);
                count += h->buckets[i];
                put_number(om, "_bucket", all, n + 1, count);
        }
        put_number(om, "_count", labels, n, count);
        put_real(om, "_sum", labels, n, h->sum);
}

void openmetrics_end(struct openmetrics *om) {
        if (!om->plain)
                fputs("# EOF\n", om->to);
}
