/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A new error is logged soon, a persistent one every minute. Servers choose the text of their
 * errors, so new errors are rate-limited, too.
 */

#include "daemon/children/tier_errors.h"

#include <stdio.h>
#include <string.h>

static bool may_say(struct tier_errors *e, const char *last) {
        return strcmp(e->said, last) == 0 ? log_allow_rarely(&e->again) : log_allow(&e->new);
}

void tier_errors_say(struct tier_errors *e, const char *tier, uint64_t n, const char *last) {
        if (n == e->n || !may_say(e, last))
                return;
        log_warning("%s: %llu more errors, the last: %s", tier, (unsigned long long)(n - e->n),
                    last);
        e->n = n;
        snprintf(e->said, sizeof e->said, "%s", last);
}

const char *tier_errors_why(char *to, size_t size, const char *why, uint64_t n, const char *last) {
        snprintf(to, size, "%s", why);
        if (n)
                snprintf(to + strlen(to), size - strlen(to), "%slast error: %s", *why ? "; " : "",
                         last);
        return to;
}
