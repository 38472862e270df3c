/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_BELOW_CARRY_H
#define KVD_STORE_BELOW_CARRY_H

/*
 * Blocks of a pool on a GPU on their way to a tier below it, or back. Disks and servers can access
 * only host memory, so a worker copies the blocks to places of exact copies, and from there.
 *
 *      carry_begin ─► carry_add ─┬─► carry_down ─► done ─► the tier reads the copies ─┬─► carry_end
 *                                └─► the tier writes the copies ─► carry_up ─► done ──┘
 *
 * After that, places that were not given to the caller (carry_give) stay as spare places for the
 * next blocks of the same space, which saves freeing and allocating their memory. Spare places are
 * given back a few at a time (carry_shrink), and all of them before blocks of another space are
 * carried (carry_may_begin).
 *
 * Exact copies of sequences must leave enough places and memory for this (carry_spares): otherwise
 * no block could be written to a tier any more.
 */

#include "store/cache/cache.h"

#define CARRY_MOST 256u /* maximum number of blocks at a time */

struct carry_item {
        kvd_ref block;     /* held by the caller */
        uint32_t place;    /* of its copy; KVD_NOWHERE: none, or given away (carry_give) */
        bool borrowed;     /* the place is not the carry's (carry_add_copy) */
        int32_t error;     /* 0, or a negative errno: the block is not carried */
        uint64_t checksum; /* XXH3-64 of the copy */
};

struct carry {
        void *owner;
        void (*done)(struct carry *carry, bool failed); /* failed: because of the worker */
        uint64_t most;      /* maximum bytes of spare places; copies leave this much room */
        struct carry *next; /* in the store's list */
        struct ticket ticket;
        struct space *space; /* NULL: empty */
        uint32_t n, n_spare;
        struct carry_item items[CARRY_MOST];
        struct space *last;         /* space of the spare places; NULL: there are none */
        uint32_t spare[CARRY_MOST]; /* places that have memory but no copy; n_spare of them */
};

/* One for each request that a tier can have outstanding. The caller sets owner, done and most. */
void carry_open(struct carry *carry, struct store *store);
void carry_close(struct carry *carry, struct store *store);

/* False while there are spare places of another space. True: spare places are this space's now. */
bool carry_may_begin(struct carry *carry, struct space *space);
void carry_begin(struct carry *carry, struct space *space);
/* Is there a place for one more block of a space? */
bool carry_has_room(const struct carry *carry, const struct space *space);
void carry_add(struct carry *carry, kvd_ref block);
/* Adds a block with an existing copy at that place, which stays. */
void carry_add_copy(struct carry *carry, kvd_ref block, uint32_t place, uint64_t checksum);

/* Carry the items that have no error. Each calls done at its end, unless forgotten. */
void carry_down(struct carry *carry);
void carry_up(struct carry *carry);
/*
 * carry_up of the items that the tier has written without an error. False: there are none, and the
 * carry has ended.
 */
bool carry_up_written(struct carry *carry, const int32_t *errors, const uint64_t *checksums,
                      uint32_t n);
bool carry_is_under_way(const struct carry *carry);
bool carry_is_whole(const struct carry *carry); /* no item has an error */

/*
 * Where the tier finds a block: returns a descriptor, and the offset in it; or a negative errno.
 * carry: NULL: the tier accesses the block itself.
 */
int carry_memory(const struct carry *carry, uint32_t item, struct space *space, kvd_ref block,
                 uint64_t *offset);
/* Gives the item's place to the caller. */
uint32_t carry_give(struct carry *carry, uint32_t item);
/* Takes a place from the caller, as a spare place or to erase it. */
void carry_take_back(struct carry *carry, struct space *space, uint32_t place);
void carry_end(struct carry *carry);
/* Gives back some spare places. True: there are more. */
bool carry_shrink(struct carry *carry);
/* The space is deleted, with all of its places. */
void carry_forget(struct carry *carry);

/* Is there a place for a copy of one of the space's blocks, or memory, that no carry needs? */
bool carry_spares_place(const struct space *space);
bool carry_spares(const struct space *space, uint64_t bytes);

/*
 * A number that changes when clients allocate or seal blocks of a space. It does not change when a
 * worker copies blocks for a tier, which is no reason for another sweep. carry: NULL: changes with
 * everything, since there are no workers.
 */
uint64_t carry_changes(const struct carry *carry, const struct space *space);

#endif
