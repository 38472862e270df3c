/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_DAEMON_CHILDREN_TIER_ERRORS_H
#define KVD_DAEMON_CHILDREN_TIER_ERRORS_H

/* The errors of a tier, in the log: what the last one was, at a bounded rate. */

#include <stddef.h>
#include <stdint.h>

#include "daemon/base/log.h"

struct tier_errors {
        uint64_t n;       /* that were looked at */
        char said[128];   /* of the last line */
        struct log_limit new, again; /* lines that say something else, or the same */
};

/* n: so far. Says the last one, if there are more than when it was called before. */
void tier_errors_say(struct tier_errors *errors, const char *tier, uint64_t n, const char *last);

/* What there is to say of a tier's state, and of its last error; why may be "". */
const char *tier_errors_why(char *to, size_t size, const char *why, uint64_t n, const char *last);

#endif
