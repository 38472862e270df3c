/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_BELOW_PLACE_H
#define KVD_STORE_BELOW_PLACE_H

/*
 * The places of exact copies, in host memory. The store identifies a copy by its place
 * (ipc/base/place.h): it takes a place, has a worker write to it (KVD_JOB_SPILL) or read from it
 * (KVD_JOB_REVIVE), and erases it.
 */

#include "ipc/base/place.h"
#include "store/cache/cache.h"

/*
 * Where the bytes of a copy are: in memory (also while they are being written to a file), or in a
 * file (also while they are being read). The place does not change, and neither does its row of the
 * summaries. Only file/cold_copies.c moves the bytes.
 *
 *      HERE ──► GOES ──► BELOW ──wanted──► WANTED ──► COMES ──► HERE
 *       ▲         │        ▲                  │         │
 *       └─failed──┘        └──────failed──────┴─────────┘
 */
enum place_state { PLACE_HERE, PLACE_GOES, PLACE_BELOW, PLACE_WANTED, PLACE_COMES };

struct place {
        uint32_t record;          /* place in the file's catalog, unless HERE */
        uint32_t sequence, entry; /* owner of the copy, unless HERE; sequence 0: none waits */
        uint32_t next;            /* WANTED: next place to read; or KVD_NOWHERE */
        uint8_t state;
        uint8_t tries; /* number of attempts to read it */
        bool erased;   /* to be erased when it is not being moved any more */
};

struct places {         /* of a space */
        uint32_t *free; /* owned; stack of unused places, see place_free_at */
        uint32_t n_free, n;
        uint32_t end; /* places from here on never had a copy */
        /* owned; descriptor with which workers access the copies; -1: not open */
        int fd;
        uint64_t spill_bytes; /* of copies in memory and of sketches, charged to the store */
        struct place *moved;  /* owned; by place; NULL: no copy ever left memory */
        /* drops the record of a place that is erased while BELOW */
        void (*drop)(struct space *space, uint32_t record);
        uint32_t n_below; /* used places without memory: copies in files */
        uint32_t buried;  /* places that bury_below has looked at */
};

static inline struct places *places_of(const struct space *space) {
        return space->parts.places;
}

static inline struct place *place_moved(const struct space *space, uint32_t place) {
        const struct places *all = places_of(space);

        return all->moved && place < all->n ? &all->moved[place] : NULL;
}
/* Are the bytes of the copy in memory? */
static inline bool place_is_here(const struct space *space, uint32_t place) {
        const struct place *p = place_moved(space, place);

        return !p || p->state <= PLACE_GOES;
}

/*
 * HERE to GOES: the copy is being written to that record, which drop drops if the place is erased.
 * -ENOMEM: out of memory.
 */
int place_goes(struct space *space, uint32_t place, uint32_t record,
               void (*drop)(struct space *space, uint32_t record));
/* WANTED to COMES: gives the place memory to read into. False if none is free. */
bool place_comes(struct space *space, uint32_t place);
/*
 * Ends a move: the copy is HERE, or BELOW and without memory. False: the place was erased
 * meanwhile, and is free now.
 */
bool place_ends(struct space *space, uint32_t place, enum place_state state);
/* Where the place's memory is: returns a descriptor, and the offset in it; or a negative errno. */
int place_memory(struct space *space, uint32_t place, uint64_t *offset);

bool place_available(const struct space *space);
uint32_t place_take(struct space *space); /* KVD_NOWHERE: there is no place, or no memory */
void place_erase(struct space *space, uint32_t place);

uint64_t places_free(const struct space *space); /* even if there is no memory for them */
uint64_t places_used(const struct space *space);
/* Memory of the space's copies, without those in files. */
uint64_t places_bytes(const struct space *space);
/* the i-th unused place, from the bottom of the stack */
uint32_t place_free_at(const struct space *space, uint32_t i);

/*
 * Copies and sketches of all spaces share a budget of host memory. The space's domain must be set.
 */
bool spill_charge(struct space *space, uint64_t bytes);
void spill_discharge(struct space *space, uint64_t bytes);

#endif
