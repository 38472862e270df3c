/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_OPENMETRICS_H
#define KVCTL_OPENMETRICS_H

/*
 * Families, each with its samples behind it, as OpenMetrics 1.0 or in Prometheus's older text
 * format. The same samples can go into a table for JSON.
 */

#include "tools/kvctl/table.h"

struct family {
        const char *name, *type, *unit; /* unit: "", or what the name ends in */
        const char *help;
};

struct label { /* NULL: no more */
        const char *name, *value;
};

struct openmetrics {
        FILE *to;
        bool plain;         /* the older format, which more programs read */
        struct table *rows; /* NULL, or of openmetrics_columns */
        const struct family *family;
};

#define OPENMETRICS_COLUMNS 4
extern const struct column openmetrics_columns[OPENMETRICS_COLUMNS];

/* The name and the texts must outlive its samples. */
void openmetrics_family(struct openmetrics *om, const struct family *family);
/* Of the family; a counter's gets its _total. n labels. */
void openmetrics_number(struct openmetrics *om, const struct label *labels, size_t n,
                        uint64_t value);
void openmetrics_real(struct openmetrics *om, const struct label *labels, size_t n, double value);
/*
 * A histogram whose buckets count what is below first, 2 * first and so on, and in the last one
 * what is not; with room for one more label.
 */
struct histogram {
        const uint64_t *buckets;
        size_t n;
        double first, sum;
};
void openmetrics_histogram(struct openmetrics *om, const struct label *labels, size_t n,
                           const struct histogram *h);
void openmetrics_end(struct openmetrics *om);

#endif
