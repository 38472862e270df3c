/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_BASE_TIER_H
#define KVD_BASE_TIER_H

/*
 * The place of an exact copy is a number that only its tier interprets. The places of a space are
 * numbered across all tiers: those of tier t end before ix->tier_end[t]. A copy's row in the
 * summaries follows from its place (kvd_copy_row), in any tier.
 */

#include "ipc/base/layout.h"

enum kvd_tier {
#define KVD_TIER(id, what) KVD_TIER_##id,
#include "ipc/base/tiers.def"
        KVD_N_TIERS
};
static_assert(KVD_N_TIERS <= KVD_TIERS_ROOM, "room in the index header");

#define KVD_NOWHERE UINT32_MAX /* there is no copy */

static inline uint32_t kvd_tier_first(const struct kvd_index *ix, uint32_t tier) {
        return tier ? ix->tier_end[tier - 1] : 0;
}

/* Maximum number of exact copies in all tiers together. */
static inline uint32_t kvd_places(const struct kvd_index *ix) {
        return ix->tier_end[KVD_N_TIERS - 1];
}

/* The tier of a place below kvd_places(). */
static inline uint32_t kvd_place_tier(const struct kvd_index *ix, uint32_t place) {
        uint32_t tier = 0;

        while (place >= ix->tier_end[tier])
                tier++;
        return tier;
}

static inline uint32_t kvd_copy_row(const struct kvd_index *ix, uint32_t place) {
        return ix->capacity + place;
}

#endif
