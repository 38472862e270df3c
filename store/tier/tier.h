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

/*
 * Where the bytes of a copy are: in memory (also while they are being written to a file), or in a
 * file (also while they are being read). Its place is the same all the time, so that its row of the
 * summaries is. Only file/copies.c moves them.
 *
 *      HERE ──► GOES ──► BELOW ──wanted──► WANTED ──► COMES ──► HERE
 *       ▲         │        ▲                  │         │
 *       └not gone─┘        └──────not come────┴─────────┘
 */
enum place_state { PLACE_HERE, PLACE_GOES, PLACE_BELOW, PLACE_WANTED, PLACE_COMES };

struct place { /* of tier memory */
        uint32_t record;          /* place in the files, unless it is HERE */
        uint32_t sequence, entry; /* who waits for it, WANTED or COMES; sequence 0: nobody */
        uint32_t next;            /* WANTED: place that is read after it; or KVD_NOWHERE */
        uint8_t state;
        uint8_t tries;            /* to read it */
        bool erased;              /* nobody's any more: given back when nothing is under way */
};

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
        struct place *moved;   /* owned; by place; NULL: none ever left memory */
        uint32_t n_below;      /* places whose bytes have no memory */
        uint32_t buried;       /* ... looked at, of a space that goes */
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
        uint64_t (*count)(const struct space *space, const struct kvd_index *ix,
                          uint64_t max_blocks);
        bool (*has_room)(const struct space *space); /* may one more copy be charged to it? */
        void (*charge)(struct space *space, int64_t copies);
        /* the descriptor for workers, or -errno */
        int (*open)(struct space *space, uint64_t bytes);
        void (*erase)(int fd, uint64_t from, uint64_t bytes); /* gives back what lies there */
};

#define KVD_TIER(id, what) extern const struct tier tier_##id;
#include "ipc/base/tiers.def"

static inline struct place *place_moved(const struct space *space, uint32_t place) {
        const struct tiers *all = tiers_of(space);

        return all->moved && place < space->ix->tier_end[KVD_TIER_memory] ? &all->moved[place] :
                                                                            NULL;
}
/* Does it have memory with all bytes of the copy? */
static inline bool place_is_here(const struct space *space, uint32_t place) {
        const struct place *p = place_moved(space, place);

        return !p || p->state <= PLACE_GOES;
}

/* One that is HERE: its bytes are being written to that record. -ENOMEM: they cannot be. */
int place_goes(struct space *space, uint32_t place, uint32_t record);
/* One that is WANTED is given memory to be read into. False: there is none. */
bool place_comes(struct space *space, uint32_t place);
/*
 * Nothing is under way any more: it is HERE or BELOW, and without memory there. False: it was
 * erased meanwhile, and is no more.
 */
bool place_ends(struct space *space, uint32_t place, enum place_state state);
/* Where its memory is: a descriptor, and where in there; or a negative errno. */
int place_memory(struct space *space, uint32_t place, uint64_t *offset);

bool place_available(const struct space *space);
uint64_t places_free(const struct space *space); /* whatever memory allows */
uint32_t place_take(struct space *space); /* KVD_NOWHERE: no tier has room */
void place_erase(struct space *space, uint32_t place);

/* Memory that copies have: those in files have none. */
uint64_t tiers_copy_bytes(const struct space *space);
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
