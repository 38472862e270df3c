/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVCTL_HEALTH_H
#define KVCTL_HEALTH_H

/* Whether the daemon answers and can serve, in one line. For probes of containers. */

#include "tools/kvctl/kvctl.h"

struct health {
        bool serves; /* clients get memory */
        uint32_t pid;
        char version[64], degraded[512], line[1024];
};

/* 0, or negative, noted with kvctl_fail(), if the daemon does not answer within five seconds. */
int health_ask(struct kvctl *kvctl, struct health *ret);

#endif
