/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_STORE_CACHE_MEMORY_H
#define KVD_STORE_CACHE_MEMORY_H

/*
 * Where a segment's memory comes from. segment.c decides which segment gets how many bytes; one of
 * these tables provides them. The daemon cannot read or write this memory.
 *
 *      host_memory.c     memfds: pages are allocated a few MiB at a time, and freed by punching
 *                        holes, while clients keep their mappings
 *      device_memory.c   chunks of a GPU's memory, all made at the start; clients must unmap one
 *                        before another space can have it (device/drain.c)
 */

#include "store/core.h"

struct segment;

struct memory_ops {
        /* The store is closed: all spaces have been freed. */
        void (*close)(struct store *store);

        /*
         * May this segment, which has no blocks, get memory? 0: not now; otherwise segments with
         * larger values are preferred.
         */
        uint32_t (*vacant)(const struct space *space, const struct segment *segment);

        /* Assigns memory to the segment; fill provides it. -EAGAIN: none is free at present. */
        int (*begin)(struct space *space, struct segment *segment);

        /* Provides memory for n of the segment's blocks, beginning with block `from` of it. */
        int (*fill)(struct space *space, struct segment *segment, uint32_t from, uint32_t n);

        /*
         * Takes over its memory of that version from the previous daemon: a descriptor for each
         * shard. Takes them on success.
         */
        int (*adopt)(struct space *space, struct segment *segment, uint32_t version, int *fds);

        /*
         * Releases the memory of a segment without blocks. False: it could not yet, and freed a
         * piece of other memory instead.
         */
        bool (*let_go)(struct space *space, struct segment *segment);

        /* Frees a segment of a deleted space, once idle has returned false. False: done. */
        bool (*bury)(struct space *space, struct segment *segment);

        /* Frees a piece of the memory that was released; false: all of it is freed. */
        bool (*idle)(struct store *store);

        /* Frees a piece of what segments without blocks still use; false: nothing left. */
        bool (*tidy)(struct space *space);

        /*
         * The descriptor of a shard to map, owned by the store. -ENODATA: no memory at present;
         * -ENOENT: no such shard.
         */
        int (*descriptor)(struct space *space, struct segment *segment, uint32_t shard,
                          bool writable);

        /* The attachment was given the segment's descriptor. */
        void (*handed_out)(struct attachment *a, uint32_t segment);

        /* Returns a segment that a worker should unmap; false if none. */
        bool (*next_unmap)(struct store *store, struct space **space, uint32_t *segment);

        /* Is so much memory moving between spaces that no more should be taken? */
        bool (*scarce)(const struct store *store);
};

extern const struct memory_ops memory_host;

#endif
