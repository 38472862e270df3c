/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_HTTP_H
#define KVCTL_HTTP_H

/* Serves metrics by HTTP, which kvd itself does not speak. */

#include "tools/kvctl/kvctl.h"

/* Serves until a signal ends it: 0. Negative, noted with kvctl_fail(): it cannot listen there. */
int http_serve(struct kvctl *kvctl, const char *address);

#endif
