/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_TIER_ERRORS_H
#define KVD_DAEMON_CHILDREN_TIER_ERRORS_H

/* Logs the last error of a tier, at a bounded rate. */

#include <stddef.h>
#include <stdint.h>

#include "daemon/base/log.h"

struct tier_errors {
        uint64_t n;                  /* number of errors when one was logged last */
        char said[128];              /* the error logged last */
        struct log_limit new, again; /* for another error; for the same one */
};

/* n: number of errors so far. Logs the last one, if n has changed since a line was logged. */
void tier_errors_say(struct tier_errors *errors, const char *tier, uint64_t n, const char *last);

/* Writes why, which may be "", and the last error, if n is not 0; returns to. */
const char *tier_errors_why(char *to, size_t size, const char *why, uint64_t n, const char *last);

#endif
