/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_MEMORY_H
#define KVD_STORE_CACHE_MEMORY_H

/*
 * Where a segment's memory comes from. segment.c decides who gets how much, by a budget of bytes;
 * one of these tables does it. The daemon maps none of it.
 *
 *      cache/memory.c     memfds: pages come a few MiB at a time, and go by punching holes under whoever has it mapped
 *      device/memory.c   chunks of a GPU's memory, all made at the start; a client has to unmap one before another
 *                        space can have it (drain.c)
 */

#include "store/core.h"

struct segment;

struct memory_ops {
        /* Behind the store's end: every space is buried. */
        void (*close)(struct store *store);

        /*
         * May this segment, which has no blocks, get memory? 0: not now; else the larger the
         * better.
         */
        uint32_t (*vacant)(const struct space *space, const struct segment *segment);

        /* Memory for it, at least to be filled. -EAGAIN: there is none at present. */
        int (*begin)(struct space *space, struct segment *segment);

        /* Memory behind n blocks, from that block of it on. */
        int (*fill)(struct space *space, struct segment *segment, uint32_t from, uint32_t n);

        /* What the daemon before had for it, with that version; *fd is taken if that works. */
        int (*adopt)(struct space *space, struct segment *segment, uint32_t version, int *fd);

        /*
         * It has no blocks any more. False: not yet, a piece of what is owed to the system was done
         * instead.
         */
        bool (*let_go)(struct space *space, struct segment *segment);

        /* Gives up a segment of a deleted space, when idle has nothing to do; false: it is done. */
        bool (*bury)(struct space *space, struct segment *segment);

        /* A piece of what is owed to the system; false: nothing is. */
        bool (*idle)(struct store *store);

        /* A piece of what the space's segments without memory still cost; false: nothing. */
        bool (*tidy)(struct space *space);

        /* What maps it, the store's own. -ENODATA: it has no memory at present. */
        int (*descriptor)(struct space *space, struct segment *segment, bool writable);

        /* An attachment has got its descriptor. */
        void (*handed_out)(struct attachment *a, uint32_t segment);

        /* A segment that a worker should unmap; false: there is none. */
        bool (*next_unmap)(struct store *store, struct space **space, uint32_t *segment);

        /* Is so much on its way from one space to others that no more should be taken? */
        bool (*scarce)(const struct store *store);
};

extern const struct memory_ops memory_host;

#endif
