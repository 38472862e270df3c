/* SPDX-License-Identifier: Apache-2.0 */

/* Refusals in words: one line, kept until the next one. */

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

#include "store/cache/cache.h"

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

int space_refuse_opaque(const struct space *space, const char *what) {
        if (!kvd_geometry_is_opaque(&space->ix->geometry))
                return 0;
        return store_refuse(space_store(space), -EOPNOTSUPP, "space '%s' has opaque blocks (%.31s), which the methods "
                            "cannot look into: no %s", space->name, space->ix->geometry.layout, what);
}
