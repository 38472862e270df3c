/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Texts of refusals. The store keeps the line of the last refusal. Refusals that several files
 * share are here.
 */

#include <errno.h>

#include "store/cache/cache.h"

const char *store_why(const struct store *store) {
        return store->why.line;
}

int space_refuse_opaque(const struct space *space, const char *what) {
        if (!kvd_shape_is_opaque(space_geometry(space)))
                return 0;
        return store_refuse(space_store(space), -EOPNOTSUPP,
                            "space '%s' has opaque blocks (%.31s), which the methods "
                            "cannot look into: no %s",
                            space_name(space), space_geometry(space)->layout, what);
}
