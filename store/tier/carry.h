/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_TIER_CARRY_H
#define KVD_STORE_TIER_CARRY_H

/*
 * Blocks of a pool on a GPU on their way to a tier below it, or back: disks and servers reach memory of the host
 * alone, so a worker carries blocks to places of exact copies, and from there.
 *
 *      carry_begin ──► carry_add ──┬─► carry_down ──► done ──► what is below reads the copies ─┬─► carry_end
 *                                  └─► what is below writes them ──► carry_up ──► done ────────┘
 *
 * Places that were taken and that nobody has taken over (carry_give) are kept for what is carried next of the same
 * space: their memory need be neither given back nor made. That is done a piece at a time (carry_shrink), and to its
 * end before something of another space is carried (carry_may_begin).
 *
 * Others who want places and memory for copies leave what is needed here: else nothing goes to a tier any more.
 */

#include "store/cache/cache.h"

#define CARRY_MOST 256u /* blocks at once */

struct carry_item {
        kvd_ref block;          /* somebody holds it */
        uint32_t place;         /* of its copy; KVD_NOWHERE: there is none, or it is another's by now */
        bool borrowed;          /* ... as it was before */
        int32_t error;          /* 0, or a negative errno: it is not carried */
        uint64_t checksum;      /* XXH3-64 of the copy */
};

struct carry {
        void *owner;
        void (*done)(struct carry *carry, bool failed); /* failed: by the worker's fault */
        uint64_t most;          /* bytes of spare places; so much is kept for it */
        struct carry *next;     /* of the store's */
        struct ticket ticket;
        struct space *space;    /* NULL: it is empty */
        uint32_t n, n_spare;
        struct carry_item items[CARRY_MOST];
        struct space *last;     /* whose the spare places are; NULL: there are none */
        uint32_t spare[CARRY_MOST]; /* n_spare of them: places with memory, and nobody's copy */
};

/* One for each question that a tier below a pool on a GPU has at a time; most is set. */
void carry_open(struct carry *carry, struct store *store);
void carry_close(struct carry *carry, struct store *store);

/* Not before all that is spare of another space was given back. Nothing of another's is kept from then on. */
bool carry_may_begin(struct carry *carry, struct space *space);
void carry_begin(struct carry *carry, struct space *space);
/* Is there a place for one more block of a space? */
bool carry_has_room(const struct carry *carry, const struct space *space);
void carry_add(struct carry *carry, kvd_ref block);
/* One that has a copy, which stays. */
void carry_add_copy(struct carry *carry, kvd_ref block, uint32_t place, uint64_t checksum);

/* Those without an error. Each ends with done, if nothing ends it before. */
void carry_down(struct carry *carry);
void carry_up(struct carry *carry);
/* ... those that what is below has written. False: it wrote none, and the carry has ended. */
bool carry_up_written(struct carry *carry, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n);
bool carry_is_under_way(const struct carry *carry);
bool carry_is_whole(const struct carry *carry); /* no item has an error */

/*
 * Where what is below finds a block: a descriptor, and where in there; or a negative errno. carry: NULL: it is not
 * carried, and found where it is.
 */
int carry_memory(const struct carry *carry, uint32_t item, struct space *space, kvd_ref block,
                 uint64_t *offset);
/* The place is the caller's from now on. */
uint32_t carry_give(struct carry *carry, uint32_t item);
/* One that is nobody's any more. */
void carry_take_back(struct carry *carry, struct space *space, uint32_t place);
void carry_end(struct carry *carry);
/* Gives back a piece of what is spare. True: there is more. */
bool carry_shrink(struct carry *carry);
/* The space goes, and all places with it. */
void carry_forget(struct carry *carry);

/* May others have a place for a copy of a block of the space, or so many bytes of what is there for copies? */
bool carry_spares_place(const struct space *space);
bool carry_spares(const struct space *space, uint64_t bytes);

/*
 * Counts what clients did in a space: what a worker does for a tier below changes it, too, and is nothing to look at
 * again. carry: NULL: no worker does anything.
 */
uint64_t carry_changes(const struct carry *carry, const struct space *space);

#endif
