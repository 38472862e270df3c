/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_PLACE_H
#define KVD_BASE_PLACE_H

/*
 * Exact copies of a space's blocks have places, which are numbered from 0. A copy's row in the
 * summaries follows from its place.
 */

#include "ipc/base/layout.h"

#define KVD_NOWHERE UINT32_MAX /* there is no copy */

/* Maximum number of exact copies. */
static inline uint32_t kvd_places(const struct kvd_index *ix) {
        return ix->n_places;
}

static inline uint32_t kvd_copy_row(const struct kvd_index *ix, uint32_t place) {
        return ix->capacity + place;
}

#endif
