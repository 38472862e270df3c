/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_METRICS_H
#define KVCTL_METRICS_H

/* All figures, as text for Prometheus. */

#include "tools/kvctl/kvctl.h"

/*
 * Writes them; also without a daemon, when there is little to say. plain: Prometheus's older text
 * format instead of OpenMetrics. rows: NULL, or of
 * openmetrics_columns. 0; negative, noted with kvctl_fail: there is no daemon.
 */
int metrics_write(struct kvctl *kvctl, FILE *to, bool plain, struct table *rows);

#endif
