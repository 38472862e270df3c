/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A check says what must hold. All broken invariants are counted, and the first one is kept in
 * words.
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
