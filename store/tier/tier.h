/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_TIER_H
#define KVD_STORE_TIER_H

/*
 * Where exact copies are. The store knows a copy by its place (ipc/base/tier.h): it takes one, has
 * a worker write there (KVD_JOB_SPILL) or read from there (KVD_JOB_REVIVE), and erases it. Both
 * jobs end when a worker says so, however long the tier takes. A tier is one row of
 * ipc/base/tiers.def and a struct tier of that name; places, and who has which, are the same for
 * all of them.
 */

#include "ipc/base/tier.h"
#include "store/cache/cache.h"

/* The places of one space in one tier. */
struct tier_places {
        uint32_t *free;        /* owned; stack of unused places, see number_at */
        uint32_t n_free, n;
        uint32_t end;          /* places from here on never had a copy */
        /* owned; what a worker needs to reach the copies; -1: nothing, or not yet */
        int fd;
};

struct tiers { /* of a space */
        struct tier_places places[KVD_N_TIERS];
        uint64_t spill_bytes;  /* of copies in memory and of sketches, charged to the store */
};

static inline struct tiers *tiers_of(const struct space *space) {
        return space->parts.tiers;
}

struct tier {
        const char *what;      /* for refusals */
        /*
         * Most copies of a space, fixed when it is made. Places that are not used must cost nothing
         * but their number.
         */
        uint64_t (*count)(const struct space *space, uint64_t block_bytes, uint64_t max_blocks);
        bool (*has_room)(const struct space *space); /* may one more copy be charged to it? */
        void (*charge)(struct space *space, int64_t copies);
        /* the descriptor for workers, or -errno */
        int (*open)(struct space *space, uint64_t bytes);
        void (*erase)(int fd, uint64_t from, uint64_t bytes); /* gives back what lies there */
};

#define KVD_TIER(id, what) extern const struct tier tier_##id;
#include "ipc/base/tiers.def"

bool place_available(const struct space *space);
bool places_left(const struct space *space); /* is there one at all, whatever memory allows? */
uint32_t place_take(struct space *space); /* KVD_NOWHERE: no tier has room */
void place_erase(struct space *space, uint32_t place);

uint64_t places_used(const struct space *space, uint32_t tier); /* copies that are there */
/* the i-th unused place, for checks */
uint32_t place_free_at(const struct space *space, uint32_t tier, uint32_t i);

/*
 * Copies and sketches of all spaces share a budget of the host memory; the domain of the space must
 * be known.
 */
bool spill_charge(struct space *space, uint64_t bytes);
void spill_discharge(struct space *space, uint64_t bytes);

#endif
