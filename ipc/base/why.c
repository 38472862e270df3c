/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The line is formatted in a separate buffer and then copied, because an argument may be the
 * previous line, as in "space 'x': <previous reason>".
 */

#include "ipc/base/why.h"

#include <stdarg.h>
#include <stdio.h>

void kvd_say_why(struct kvd_why *why, const char *format, ...) {
        struct kvd_why now;
        va_list args;

        va_start(args, format);
        vsnprintf(now.line, sizeof now.line, format, args);
        va_end(args);
        *why = now;
}
