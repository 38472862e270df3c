/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Checks call expect. It counts the broken invariants, and keeps the text of the first one.
 */

#include <stdarg.h>
#include <stdio.h>

#include "store/check/check.h"

void expect(struct walk *w, bool holds, const char *format, ...) {
        va_list args;

        if (holds)
                return;
        if (w->report->broken++ == 0) {
                va_start(args, format);
                vsnprintf(w->report->first, sizeof w->report->first, format, args);
                va_end(args);
        }
}
