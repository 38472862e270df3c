/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_METRICS_H
#define KVCTL_METRICS_H

/* All figures, as text for Prometheus. */

#include "tools/kvctl/kvctl.h"

/*
 * Writes all figures; without a daemon, only kvd_up and kvd_scrape_seconds. plain: Prometheus's
 * older text format instead of OpenMetrics. rows: NULL, or a table of openmetrics_columns to fill.
 * 0, or negative, noted with kvctl_fail(), if the daemon did not answer.
 */
int metrics_write(struct kvctl *kvctl, FILE *to, bool plain, struct table *rows);

#endif
