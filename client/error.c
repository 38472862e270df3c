/* SPDX-License-Identifier: Apache-2.0 */
#include "client/error.h"

#include <stdarg.h>
#include <stdio.h>

#include "client/kvd.h"

static _Thread_local char line[320];

int client_fail(int error, const char *format, ...) {
        va_list args;

        va_start(args, format);
        vsnprintf(line, sizeof line, format, args);
        va_end(args);
        return error;
}

const char *kvd_error(void) {
        return line;
}

const char *kvd_version(void) {
        return KVD_VERSION;
}
