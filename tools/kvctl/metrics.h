/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_METRICS_H
#define KVCTL_METRICS_H

/* All figures, as OpenMetrics. */

#include "tools/kvctl/kvctl.h"

/*
 * Writes them; also without a daemon, when there is little to say. rows: NULL, or of
 * openmetrics_columns. 0; negative, noted with kvctl_fail: there is no daemon.
 */
int metrics_write(struct kvctl *kvctl, FILE *to, struct table *rows);

#endif
