/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_OPENMETRICS_H
#define KVCTL_OPENMETRICS_H

/*
 * Writes families, each followed by its samples, as OpenMetrics 1.0 or in Prometheus's older text
 * format. The same samples can go into a table for JSON.
 */

#include "tools/kvctl/table.h"

struct family {
        const char *name, *type, *unit; /* unit: "", or the last word of the name */
        const char *help;
};

struct label {
        const char *name, *value;
};

struct openmetrics {
        FILE *to;
        bool plain;         /* the older format, which more programs read */
        struct table *rows; /* NULL, or a table of openmetrics_columns to fill */
        const struct family *family;
};

#define OPENMETRICS_COLUMNS 4
extern const struct column openmetrics_columns[OPENMETRICS_COLUMNS];

/* The name and the texts must outlive its samples. */
void openmetrics_family(struct openmetrics *om, const struct family *family);
/* A sample of the current family, with n labels. A counter's name gets its _total. */
void openmetrics_number(struct openmetrics *om, const struct label *labels, size_t n,
                        uint64_t value);
void openmetrics_real(struct openmetrics *om, const struct label *labels, size_t n, double value);
/*
 * A histogram. Bucket 0 counts values below first, bucket i those from there to first * 2^i, and
 * the last bucket the rest. It takes at most 5 labels.
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
