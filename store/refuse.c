/* SPDX-License-Identifier: Apache-2.0 */

/* Refusals in words: one line, kept until the next one. */

#include <stdarg.h>
#include <stdio.h>

#include "store/internal.h"

int store_refuse(struct store *store, int error, const char *format, ...) {
        va_list args;

        va_start(args, format);
        vsnprintf(store->why, sizeof store->why, format, args);
        va_end(args);
        return error;
}

const char *store_why(const struct store *store) {
        return store->why;
}
