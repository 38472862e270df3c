/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The line of a refusal is made in a buffer of its own and copied: what is said may quote the line
 * that stood there before, as "space 'x': " and an older reason do.
 */

#include "ipc/base/why.h"

#include <stdarg.h>
#include <stdio.h>

int kvd_refuse(struct kvd_why *why, int error, const char *format, ...) {
        struct kvd_why now;
        va_list args;

        va_start(args, format);
        vsnprintf(now.line, sizeof now.line, format, args);
        va_end(args);
        *why = now;
        return error;
}
